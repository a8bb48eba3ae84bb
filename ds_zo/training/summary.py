"""The summary of a finished run."""

from __future__ import annotations

import hashlib
import json

import torch
from deepspeed.accelerator import get_accelerator

from ds_zo.config import backend_of
from ds_zo.records.environment import commit, host_peak_gb, versions
from ds_zo.records.run_summary import Summary
from ds_zo.tasks import Score
from ds_zo.training.loop import TrainingLoop


def summarise(loop: TrainingLoop, before: Score | None, after: Score | None) -> Summary:
    """Collects the run's summary. `after` is the test score of the last step; None if a best state was kept."""
    accelerator = get_accelerator()
    on_device = accelerator.device_name() != "cpu"
    args, config, progress, best = loop.args, loop.config, loop.progress, loop.progress.best
    optimizer = config.get("optimizer") or {}
    losses = [point.loss for point in progress.curve if point.loss is not None]
    scores = [point.score for point in progress.curve if point.score is not None]
    after_values = best.test if best else after.values if after else None
    metric = next((found.metric for found in (after, before) if found is not None), None)
    if best is not None:
        metric = best.test_metric or best.metric
    return Summary(
        model=args.model,
        task=args.task,
        head=args.head,
        config=str(args.deepspeed),
        config_hash=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12],
        optimizer=str(optimizer.get("type", backend_of(config) or "")),
        lr=(optimizer.get("params") or {}).get("lr"),
        seed=args.seed,
        batch_size=loop.samples_per_step,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else accelerator.device_name(),
        dtype=loop.dtype,
        steps=progress.step,
        train_s=round(progress.train_s, 2),
        tokens_per_s=round(progress.num_tokens / progress.train_s, 1) if progress.train_s else 0.0,
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        metric=metric or "",
        before=before.value if before else None,
        after=after_values[metric] if after_values is not None and metric is not None else None,
        before_values=before.values if before else None,
        after_values=after_values,
        dev=best.value if best else None,
        dev_metric=best.metric if best else None,
        best_step=best.step if best else None,
        peak_device_gb=round(accelerator.max_memory_allocated() / 1e9, 3) if on_device else 0.0,
        peak_host_gb=round(host_peak_gb(), 3),
        model_folder=str(loop.model_folder) if loop.model_folder else None,
        checkpoint_folder=str(loop.checkpoints.folder) if loop.checkpoints.folder.is_dir() else None,
        versions=versions(),
        commit=commit(),
        data_digest=loop.task.digest(),
        objective=args.objective,
        score_first=scores[0] if scores else None,
        score_last=scores[-1] if scores else None,
        curve=progress.curve,
    )
