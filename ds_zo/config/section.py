"""Models of the `ds_zo` section. The text under each field is its meaning in `docs/keys.md`."""

from __future__ import annotations

from typing import Any, Literal, NewType

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from ds_zo.config.base import ConfigModel
from ds_zo.config.errors import rule_error, shown

FrozenDtype = Literal["auto", "bf12", "fp8", "nf4", "mxfp4"]
"""A format of frozen matrices; auto: as the model's files hold them, or else the model's dtype."""
BackendName = NewType("BackendName", str)
"""The name of a registered backend, in lower case."""

NEED_STREAMING = ("device_memory_gb", "resident_blocks", "wire_dtype", "frozen_dtype", "offload_activations")
"""Keys of `ds_zo.stream` that have no effect unless blocks stream."""


class StreamConfig(ConfigModel):
    """Streaming of blocks between host and device, when `zero_optimization.offload_param.device` is "cpu"."""

    device_memory_gb: float | None = Field(None, gt=0, le=100_000)
    """Device memory that the run may use, in GB of 10**9 bytes; null: the free memory, less activations and a
    margin."""

    resident_blocks: int | None = Field(None, ge=0, le=1_000_000)
    """Number of blocks that stay on the device; null: as many as fit into its memory."""

    device_slots: int = Field(2, ge=2, le=64)
    """Number of device buffers for streamed blocks: one block is computed while the others are copied."""

    wire_dtype: Literal["auto", "fp32", "bf16", "fp16", "bf12", "fp8"] = "auto"
    """Dtype in which the host stores blocks and copies them to the device; auto: the model's dtype. A wider one (fp32
    for a bf16 model) keeps a master copy on the host. bf12 is bf16 in 12 bits: the same mantissa, and an exponent
    shared by 256 values. fp8 takes half the bytes of bf16."""

    frozen_dtype: FrozenDtype = "auto"
    """Format in which frozen matrices of blocks are stored (ZO and Adapter), such as the base model under LoRA; auto:
    the model's dtype, or the four bits in which the files of `ds_zo.load_pretrained` hold a matrix. nf4 is the four-bit
    format of bitsandbytes, in groups of 64 values: 0.5625 bytes a weight. mxfp4 is that of gpt-oss, for matrices that
    the files hold so: 0.53125 bytes a weight. Frozen vectors keep the model's dtype, and trained parameters are stored
    as `wire_dtype` says."""

    offload_activations: bool = False
    """Adapter: keep the inputs of blocks, from which the backward pass recomputes the blocks, in pinned host memory. It
    saves the device one hidden state for each block."""

    master: Literal["split", "wire"] = "split"
    """split: the host keeps the low bits of float32 weights in a second buffer. wire: weights exist only in
    `wire_dtype`, and each update is rounded to it."""

    writeback_interval: int | None = Field(None, ge=1, le=64)
    """Steps between write-backs of a block to the host (ZO replays pending updates); null: chosen by the engine."""

    blocks: str | list[str] | None = None
    """Dotted path of the module list with the blocks, or a list of paths; []: no blocks; null: found in the model."""

    overlap: bool = True
    """Copy blocks while others are computed. Set false only to measure the effect."""

    reuse_buffers: bool = True
    """Allocate the device buffers once. Set false only to measure the effect."""

    fuse_update: bool = True
    """Update a block while it is on the device for its forward. Set false only to measure the effect."""

    @field_validator("blocks", mode="before")
    @classmethod
    def _dotted_paths(cls, value: Any) -> Any:
        if value is None:
            return None
        paths = value if isinstance(value, list) else [value]
        if not all(isinstance(path, str) and all(path.split(".")) for path in paths):
            text = (
                f"blocks must be a dotted path such as model.layers or a list of them, got {shown(value)}; leave it "
                "out to have the blocks found"
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
    """Settings of checkpoints."""

    asynchronous: bool = False
    """Write checkpoints in the background while training continues. Host memory during a save: for ZO at most one more
    copy of the streamed blocks and a copy of the weights on the device; for other backends a copy of weights and
    optimizer state. An error of the writer is raised at the end of the next `engine.step()`, after its update."""

    trajectory: bool = False
    """ZO: also record the seed and coefficients of every step, from which the weights of any step can be replayed."""

    trajectory_dir: str | None = Field(None, min_length=1)
    """Folder of the trajectory; null: the folder that the run saves to, and until its first save the folder that it
    loaded from."""

    keep_last: int | None = Field(None, ge=1, le=1_000_000)
    """Number of complete checkpoints to keep in a folder, those with the most steps; null: all. The checkpoint that
    `latest` names and the one just saved are always kept."""


class DsZoConfig(ConfigModel):
    """Settings of this package that are not optimizer parameters."""

    backend: BackendName | None = None
    """Selects a backend without an `optimizer` block, for scripts that make their own optimizer object."""

    params: dict[str, Any] | None = None
    """With `backend`: the keys of its `optimizer.params`, except `lr` and `weight_decay`, which come from the script's
    optimizer."""

    stream: StreamConfig = Field(default_factory=StreamConfig)
    """Block streaming: see `ds_zo.stream`."""

    rounding: Literal["stochastic", "nearest", "kahan"] = "stochastic"
    """How an updated weight is rounded to 16-bit or 8-bit storage. nearest loses most small updates. kahan (LOMO and
    AdaLOMO, weights on the device) rounds to nearest and adds the rounding error to the next update; it takes as much
    memory again as the weights."""

    cuda_graphs: bool = True
    """ZO: record small blocks as CUDA graphs and replay them, where weights stay on the device. Blocks that can't be
    recorded run as usual."""

    compile_blocks: bool = False
    """LOMO, AdaLOMO and LSP: torch.compile every block, with one graph for all blocks of a kind. Steps after the first,
    which compiles, are faster. Results are equal up to rounding, not in bits. The gradients of one block are in memory
    at a time, in place of those of one parameter."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints: see `ds_zo.checkpoint`."""

    @field_validator("backend", mode="before")
    @classmethod
    def _any_letter_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value
