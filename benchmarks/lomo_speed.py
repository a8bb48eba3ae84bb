"""LOMO and AdaLOMO beside the authors' package, AdamW and ZeRO-3 offload; streamed under a cap; the paper's tables.

python -m benchmarks.lomo_speed run --preset speed --out rows.jsonl
python -m benchmarks.lomo_speed run --preset hosts --only 7b --out rows.jsonl
python -m benchmarks.lomo_speed run --preset all --only 7b --out rows.jsonl --resume
python -m benchmarks.lomo_speed report rows.jsonl
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import presets
from benchmarks.lomo_cases import LOMOCase, MemoryCase
from benchmarks.report import report
from ds_zo.bench.runner import WARM, Case

_CASES = "benchmarks.lomo_cases"
_WARM = (*WARM, _CASES)


def _speed(name: str, method: str, shape: str, *, timeout_s: float = 90, host_gb: float = 8, **params: Any) -> Case:
    case = LOMOCase(shape, method, **{"batch": 4, "length": 1024, **params})
    return case.to_run(name, f"{_CASES}:speed", timeout_s=timeout_s, planned_host_gb=host_gb)


def speed_cases() -> list[Case]:
    """One run for every ratio between resident methods: LLaMA-7B, 4 x 1024, checkpointing. AdamW has its blocks
    compiled too, so that LOMO's gain from that is not taken for a gain over AdamW."""
    methods = (
        *("lomo", "peer_lomo", "adamw", "adamw_fused", "adalomo", "peer_adalomo", "lomo_clipped", "peer_lomo_clipped"),
        *("adamw_master", "no_update"),
    )
    compiled = ("no_update", "lomo", "adalomo", "lomo_clipped", "adamw_fused")
    alike: dict[str, Any] = {"shape": "llama-7b", "steps": 5}
    return [
        *(_speed(f"speed/{method}", method, **alike) for method in methods),
        *(_speed(f"speed/{method}-compiled", method, timeout_s=150, compiled=True, **alike) for method in compiled),
    ]


def host_cases() -> list[Case]:
    """LOMO beside plain hooks, also on two cores. Each is measured twice, in turns: machines drift."""
    alike: dict[str, Any] = {"slow_host": True, "warmup": 10, "steps": 12}
    sizes = {"7b": (False,), "1.3b": (False, True)}
    return [
        _speed(f"hosts/{size}-{method}{'-compiled' if compiled else ''}{turn}", method, f"llama-{size}", **options)
        for size, kinds in sizes.items()
        for compiled in kinds
        for options in [{**alike, **({"compiled": True, "timeout_s": 150} if compiled else {})}]
        for turn in ("", "-again")
        for method in ("hooks", "lomo")
        if not (compiled and turn)
    ]


def streamed_cases() -> list[Case]:
    """Streamed LOMO recomputes each block itself, so its cases ask for no checkpointing."""
    all_on_host = {"resident_blocks": 0}
    within_24: dict[str, Any] = {"checkpointing": False, "cap_gb": 24, "stream": {"device_memory_gb": 22}, "steps": 18}
    return [
        _speed("streamed/1.3b", "lomo", "llama-1.3b", checkpointing=False, stream=all_on_host, host_gb=12),
        _speed("streamed/1.3b-zero3", "zero3_offload", "llama-1.3b", timeout_s=240, host_gb=40),
        _speed("streamed/7b-resident", "lomo", "llama-7b"),
        _speed(
            "streamed/7b-6gb",
            "lomo",
            "llama-7b",
            checkpointing=False,
            cap_gb=6,
            stream={**all_on_host, "device_memory_gb": 6},
            timeout_s=120,
            host_gb=24,
        ),
        *(
            _speed(f"streamed/{size}-24gb", "lomo", f"llama-{size}", timeout_s=timeout_s, host_gb=host_gb, **within_24)
            for size, timeout_s, host_gb in (("13b", 150, 38), ("30b", 300, 78))
        ),
    ]


def paper_cases() -> list[Case]:
    """The LOMO paper's table 1 (8 x 512, its plain attention), table 2 (1 x 1024), and sequential accumulation."""
    memory = [
        MemoryCase("llama-7b", method, batch=8, length=512, checkpointing=checkpointing).to_run(
            f"paper/memory-{method}-{'checkpointed' if checkpointing else 'plain'}",
            f"{_CASES}:memory",
            timeout_s=90,
            planned_host_gb=8,
        )
        for method in ("lomo", "sgd_master", "adamw_master")
        for checkpointing in (True, False)
    ]
    compiled = {**memory[0].params, "compiled": True}
    memory.append(replace(memory[0], name=f"{memory[0].name}-compiled", params=compiled, timeout_s=150))
    beside = {"7b": ("lomo", "sgd_master", "adamw_master"), "13b": ("lomo", "sgd_master", "adamw_master")}
    throughput = [
        _speed(f"paper/speed-{size}-{method}", method, f"llama-{size}", batch=1)
        for size in ("7b", "13b", "30b", "65b")
        for method in beside.get(size, ("lomo", "sgd"))
    ]
    throughput.append(_speed("paper/speed-7b-lomo-compiled", "lomo", "llama-7b", batch=1, compiled=True, timeout_s=150))
    return [*memory, *throughput, Case("paper/accumulation", f"{_CASES}:accumulation", timeout_s=300)]


PRESETS: dict[str, Callable[[], list[Case]]] = {
    "speed": speed_cases,
    "hosts": host_cases,
    "streamed": streamed_cases,
    "paper": paper_cases,
    "all": lambda: [*speed_cases(), *host_cases(), *streamed_cases(), *paper_cases()],
}


def cases_of(preset: str, *, device: str = "cuda", tiny: bool = False) -> list[Case]:
    """`tiny` keeps a preset's cases and shrinks their models: a rehearsal that needs no GPU."""
    cases = []
    for case in PRESETS[preset]():
        params = {**case.params, "device": device}
        if case.target.endswith(":accumulation"):
            params |= {"steps": 3, "length": 32, "batch": 4, "micro_batches": 2} if tiny else {}
        elif tiny:
            params |= {"overrides": presets.TINY, "batch": 2, "length": 16}
            if "stream" in params:
                params |= {"stream": {"resident_blocks": 0}, "cap_gb": None}
            if case.target.endswith(":speed"):
                params |= {"warmup": 1, "steps": 2}
        host_gb = None if tiny else case.planned_host_gb
        cases.append(Case(case.name, case.target, params, timeout_s=case.timeout_s, planned_host_gb=host_gb))
    return cases


def main(arguments: list[str] | None = None) -> None:
    cases: dict[str, Any] = {"presets": PRESETS, "cases_of": cases_of, "warm": _WARM}
    presets.main(arguments, description=__doc__, markdown=report, **cases)


if __name__ == "__main__":
    main()
