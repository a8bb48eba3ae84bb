"""The top-level `ds_zo` section."""

from __future__ import annotations

from typing import Any, Literal, NewType

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from ds_zo.config.base import ConfigModel
from ds_zo.config.errors import rule_error, shown

BackendName = NewType("BackendName", str)
"""The name of a registered backend, in lower case."""


class StreamConfig(ConfigModel):
    """How blocks travel between host and device when `zero_optimization.offload_param.device` is "cpu"."""

    device_memory_gb: float | None = Field(None, gt=0, le=100_000)
    """Device memory to fill, in GB of 10**9 bytes; null: what is free, less activations and a margin."""

    resident_blocks: int | None = Field(None, ge=0, le=1_000_000)
    """Blocks that never leave the device; null: as many as fit the memory."""

    device_slots: int = Field(2, ge=2, le=64)
    """Blocks in flight at once: one computing, the rest arriving or leaving."""

    wire_dtype: Literal["auto", "fp32", "bf16", "fp16", "bf12", "fp8"] = "auto"
    """What host storage holds and the bus carries; auto: the model's dtype. Wider than the model (fp32 under a bf16
    model) keeps a master copy on the host; bf12 is bf16 in 12 bits (the same mantissa, the exponent shared by 256), fp8
    half of bf16."""

    master: Literal["split", "wire"] = "split"
    """split: float32's low bits stay in a second host plane; wire: storage is all there is, with its rounding."""

    writeback_interval: int | None = Field(None, ge=1, le=64)
    """Steps between write-backs of a block (ZO replays what is pending); null: chosen by the engine."""

    blocks: str | list[str] | None = None
    """Dotted path of the block list, or several; []: the model has none; null: found in the model."""

    overlap: bool = True
    """Copy beside compute. Off only to measure what it brings."""

    reuse_buffers: bool = True
    """Allocate device slots once. Off only to measure what it brings."""

    fuse_update: bool = True
    """Update a block on the visit that computes it. Off only to measure what it brings."""

    @field_validator("blocks", mode="before")
    @classmethod
    def _dotted_paths(cls, value: Any) -> Any:
        if value is None:
            return None
        paths = value if isinstance(value, list) else [value]
        if not all(isinstance(path, str) and all(path.split(".")) for path in paths):
            text = (
                f"blocks must be a dotted path such as model.layers or a list of them, got {shown(value)}; leave it "
                "out to have them found"
            )
            raise rule_error(text)
        return value

    @model_validator(mode="after")
    def _unfused_writes_back_every_step(self) -> Self:
        if not self.fuse_update and self.writeback_interval not in (None, 1):
            text = (
                f"writeback_interval must be 1 when fuse_update is false, got {self.writeback_interval}; leave it out "
                "or set fuse_update to true"
            )
            raise rule_error(text, field="writeback_interval")
        return self


class CheckpointConfig(ConfigModel):
    """How checkpoints are written."""

    asynchronous: bool = False
    """Write in the background while training goes on. Host memory meanwhile: for ZO at most one more copy of the
    streamed blocks, and a copy of what lives on the device; for the others a copy of weights and optimizer state. An
    error of the writer is raised at the end of the next `engine.step()`, which has made its step."""

    trajectory: bool = False
    """ZO: also log every step's seed and coefficient, from which any step's weights can be replayed."""

    trajectory_dir: str | None = Field(None, min_length=1)
    """Folder of that log; null: the folder that a run saves to, or, until its first save, the one it loaded from."""

    keep_last: int | None = Field(None, ge=1, le=1_000_000)
    """Complete checkpoints to keep in a folder, those of most steps; null: all. `latest` and the one just saved always
    stay."""


class DsZoConfig(ConfigModel):
    """Everything of ours that is not an optimizer parameter."""

    backend: BackendName | None = None
    """Selects a backend without an `optimizer` block, for scripts that build their own optimizer object."""

    params: dict[str, Any] | None = None
    """With `backend`: its `optimizer.params`, but for `lr` and `weight_decay`, which the script's optimizer has."""

    stream: StreamConfig = Field(default_factory=StreamConfig)
    """Block streaming."""

    rounding: Literal["stochastic", "nearest", "kahan"] = "stochastic"
    """How an update meets 16-bit or 8-bit storage; nearest loses most small updates. kahan (LOMO and AdaLOMO on the
    device): nearest, and what it drops is kept for the next update, in as much memory as the weights take."""

    cuda_graphs: bool = True
    """ZO: replay small blocks as CUDA graphs where weights stay on the device. What can't be recorded runs as usual."""

    compile_blocks: bool = False
    """LOMO, AdaLOMO and LSP: torch.compile every block, all of a kind as one graph. Faster after a first step that
    compiles; equal to rounding, not in bits; the gradients of one block are alive at a time in place of one
    parameter's."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints."""

    @field_validator("backend", mode="before")
    @classmethod
    def _any_letter_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value
