"""The record of a training run: its summary and its learning curve."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Point:
    """One point of a learning curve."""

    step: int
    train_s: float
    loss: float | None = None
    score: float | None = None
    """The score of the run's objective."""
    dev: dict[str, float] | None = None


@dataclass
class Best:
    """The state with the best score on dev. It is tested when it is found, so that nothing has to be loaded back."""

    step: int
    metric: str
    dev: dict[str, float]
    test: dict[str, float]
    test_metric: str | None = None
    """The metric of test scores; None: that of dev."""

    @property
    def value(self) -> float:
        return self.dev[self.metric]


@dataclass
class Summary:
    """The result of a run: printed, written beside the model as summary.json, and appended to --results as a row."""

    model: str
    task: str
    head: str
    config: str
    config_hash: str
    optimizer: str
    lr: float | None
    seed: int
    batch_size: int
    device: str
    dtype: str
    steps: int
    train_s: float
    tokens_per_s: float
    loss_first: float | None
    loss_last: float | None
    metric: str
    before: float | None
    after: float | None
    """`before` and `after` are scores on test: zero-shot, and of the best state by dev (without --eval-every, of the
    last step)."""
    before_values: dict[str, float] | None
    after_values: dict[str, float] | None
    dev: float | None
    dev_metric: str | None
    """The metric of `dev`, which is not `metric` for a task that scores test in another way."""
    best_step: int | None
    peak_device_gb: float
    peak_host_gb: float
    model_folder: str | None
    checkpoint_folder: str | None
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    data_digest: str | None = None
    """Tells apart the training rows of a task that makes them from the machine's packages."""
    objective: str | None = None
    """What --objective names; None: the loss."""
    score_first: float | None = None
    score_last: float | None = None
    curve: list[Point] = field(default_factory=list)

    def __str__(self) -> str:
        first, last = self.score_first, self.score_last
        if self.objective is None:
            first, last = self.loss_first, self.loss_last
        loss = f"{first:.3f} -> {last:.3f}" if first is not None else "no steps taken"
        found = [_percent(self.metric, value) for value in (self.before, self.after) if value is not None]
        nowhere = "nowhere (--no-save)" if self.best_step is None else "nowhere (--no-save, or the best is elsewhere)"
        best = f" (the best by dev, of step {self.best_step})" if self.best_step is not None else ""
        on_device = f"GPU {self.peak_device_gb:.2f} GB, " if self.peak_device_gb else ""
        lines = {
            "model, task": f"{self.model}, {self.task}",
            "config": f"{self.config} ({self.device}, {self.dtype})",
            "test": f"{self.metric} {' -> '.join(found)}{best}",
            "loss" if self.objective is None else "score": loss,
            "speed": f"{self.steps} steps in {self.train_s:.1f} s, {self.tokens_per_s:,.0f} tokens/s",
            "peak memory": f"{on_device}host {self.peak_host_gb:.2f} GB",
            "model saved in": self.model_folder or nowhere,
            "checkpoints in": self.checkpoint_folder or "none (--save-every STEPS writes them)",
        }
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _percent(metric: str, value: float) -> str:
    return f"{value:.1%}" if metric in ("accuracy", "pass_at_1") else f"{value:.3f}"
