"""What the planner expects of a measured LOMO case, from the case's parameters alone."""

from __future__ import annotations

from ds_zo.records.rows import Row


def planned(row: Row) -> Row | None:
    """Peak and seconds a step for one-pass LOMO and AdaLOMO on a published shape; None for whatever else."""
    params = row["params"]
    measured = row["status"] == "ok" and row["target"].endswith(":speed") and row["fits"]
    planless = params.get("overrides") or params.get("compiled")
    if not measured or params["method"] not in ("lomo", "adalomo") or planless:
        return None

    from ds_zo.config.section import StreamConfig
    from ds_zo.planner.estimate import Limits
    from ds_zo.planner.lomo import estimate_adalomo, estimate_lomo
    from ds_zo.planner.models import load_model

    stream = StreamConfig(**params.get("stream") or {})
    budget = None if stream.device_memory_gb is None else int(stream.device_memory_gb * 1e9)
    estimate = (estimate_adalomo if params["method"] == "adalomo" else estimate_lomo)(
        load_model(f"random:{params['shape']}", batch=params["batch"], seq=params["length"]),
        Limits(device_nbytes=budget),
        stream=stream,
        offload="stream" in params,
        checkpointing=params.get("checkpointing", True),
    )
    return {"peak_gb": estimate.device_nbytes / 1e9, "step_s": estimate.step_s, "setting": estimate.setting}
