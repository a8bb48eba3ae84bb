"""Models of the `ds_zo` section. The text under each field is its meaning in `docs/keys.md`.

A field's marks say which backends read the key, and what it needs: see `ds_zo/config/marks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NewType, get_args

from pydantic import Field, field_validator
from pydantic_core import PydanticKnownError

from ds_zo.config.base import ConfigModel
from ds_zo.config.errors import rule_error, shown
from ds_zo.config.marks import MODEL_DTYPE, MayDiffer, Needs, ReadBy, Trait

FrozenDtype = Literal["auto", "bf12", "fp8", "nf4", "nf4_nested", "mxfp4"]
"""A format of frozen matrices; auto: as the model's files hold them, or else the model's dtype."""
FROZEN_DTYPES: list[str] = list(get_args(FrozenDtype))
"""The values of `frozen_dtype`. `streaming.placement.register_format` adds one."""
FormatName = NewType("FormatName", str)
"""One of `FROZEN_DTYPES`."""
BackendName = NewType("BackendName", str)
"""The name of a registered backend, in lower case."""

KAHAN_REMOVAL = "kahan is for LOMO and AdaLOMO with whole weights on the device; the default is stochastic"


def _replayed(accepted: Any) -> ReadBy:
    """The mark of a key that is about replaying updates, which has this effect under other backends."""
    refusal = "{path} belongs to {readers}, whose updates can be replayed, got {value} under {backend}; leave it out"
    return ReadBy(Trait.REPLAYS_UPDATES, without=(accepted,), refusal=refusal)


_MEASURED = "remove it; `python -m benchmarks.speed zo-paper-alone --only no_{}` in a clone measures its effect"
_SWITCHES = {key: ("every run has it", _MEASURED.format(key)) for key in ("overlap", "reuse_buffers", "fuse_update")}
"""Keys of earlier versions that switched a feature off: as in `ConfigModel.retired`."""


class StreamConfig(ConfigModel):
    """Streaming of blocks between host and device, when `zero_optimization.offload_param.device` is "cpu"."""

    retired, always_on = _SWITCHES, frozenset(_SWITCHES)

    device_memory_gb: Annotated[float | None, Needs.STREAMING, MayDiffer()] = Field(None, gt=0, le=100_000)
    """Device memory that the run may use, in GB of 10**9 bytes; null: the free memory, less activations and a
    margin."""

    resident_blocks: Annotated[int | None, Needs.STREAMING, MayDiffer()] = Field(None, ge=0, le=1_000_000)
    """Number of blocks that stay on the device; null: as many as fit into its memory."""

    device_slots: Annotated[int, Needs.COPIES, MayDiffer()] = Field(2, ge=2, le=64)
    """Number of device buffers for streamed blocks: one block is computed while the others are copied."""

    wire_dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "bf12", "fp8"],
        Needs.STREAMING,
        ReadBy(
            Trait.STORES_OTHER_DTYPES,
            without=(MODEL_DTYPE,),
            refusal="wire_dtype must be auto or the model's {model} under {backend}, which updates weights in the "
            "model's dtype, got {value}; leave it out",
        ),
    ] = "auto"
    """Dtype in which the host stores blocks and copies them to the device; auto: the model's dtype. A wider one (fp32
    for a bf16 model) keeps a master copy on the host. bf12 is bf16 in 12 bits: the same mantissa, and an exponent
    shared by 256 values. fp8 takes half the bytes of bf16."""

    frozen_dtype: Annotated[
        FormatName, Needs.STREAMING, ReadBy(Trait.STORES_OTHER_DTYPES | Trait.STORES_FROZEN_DTYPES)
    ] = FormatName("auto")
    """Format in which frozen matrices of blocks are stored ({readers}), such as the base model under LoRA; auto:
    the model's dtype, or the four bits in which the files of `ds_zo.load_pretrained` hold a matrix. nf4 is the four-bit
    format of bitsandbytes, in groups of 64 values: 0.5625 bytes a weight. nf4_nested is its double quantisation, with
    scales in 8 bits: 0.516 bytes a weight. mxfp4 is that of gpt-oss, for matrices that the files hold so: 0.53125 bytes
    a weight. Frozen vectors keep the model's dtype, and trained parameters are stored as `wire_dtype` says."""

    offload_activations: Annotated[bool, Needs.STREAMING, ReadBy(Trait.OFFLOADS_ACTIVATIONS, without=(False,))] = False
    """{readers}: keep the inputs of blocks, from which the backward pass recomputes the blocks, in pinned host memory.
    It saves the device one hidden state for each block."""

    tiles: Annotated[int | None, Needs.COPIES, ReadBy(unless=Trait.ZEROTH_ORDER, without=(1,))] = Field(
        None, ge=1, le=65536
    )
    """{readers}: slices of the batch over which each block runs, one after another, so that its activations exist for
    one slice at a time; null: the fewest with which the first batch fits the device, and 1 on a CPU without
    `device_memory_gb`. Later batches may be larger: name a number then. A resumed run keeps the number. Raise the
    micro-batch, and leave `gradient_accumulation_steps` at 1. Gradients are summed over slices in float32. A block that
    mixes samples, or changes its buffers, runs on the whole batch, as a log line says."""

    master: Annotated[
        Literal["split", "wire"],
        ReadBy(
            Trait.STORES_OTHER_DTYPES,
            without=("wire",),
            refusal="master split belongs to {readers}, got it under {backend}, which stores no low bits; leave it "
            "out, and choose the rounding of updates by ds_zo.rounding",
        ),
    ] = "split"
    """split: the host keeps the low bits of float32 weights in a second buffer. wire: weights exist only in
    `wire_dtype`, and each update is rounded to it."""

    writeback_interval: Annotated[int | None, _replayed(1)] = Field(None, ge=1, le=64)
    """Steps between write-backs of a block to the host ({readers} replays pending updates); null: chosen by the
    engine."""

    blocks: str | list[str] | None = None
    """Dotted path of the module list with the blocks, or a list of paths; []: no blocks; null: found in the model."""

    @field_validator("frozen_dtype", mode="before")
    @classmethod
    def _registered(cls, value: Any) -> Any:
        if value not in FROZEN_DTYPES:
            *others, last = map(repr, FROZEN_DTYPES)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
        return value

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


class CheckpointConfig(ConfigModel):
    """Settings of checkpoints."""

    asynchronous: Annotated[bool, MayDiffer()] = False
    """Write checkpoints in the background while training continues. Host memory during a save: for ZO at most one more
    copy of the streamed blocks and a copy of the weights on the device; for other backends a copy of weights and
    optimizer state. An error of the writer is raised at the end of the next `engine.step()`, after its update."""

    trajectory: Annotated[bool, _replayed(False)] = False
    """{readers}: also record the seed and coefficients of every step, from which the weights of any step can be
    replayed."""

    trajectory_dir: Annotated[str | None, ReadBy(Trait.REPLAYS_UPDATES, refusal=None), MayDiffer()] = Field(
        None, min_length=1
    )
    """Folder of the trajectory; null: the folder that the run saves to, and until its first save the folder that it
    loaded from."""

    keep_last: Annotated[int | None, MayDiffer()] = Field(None, ge=1, le=1_000_000)
    """Number of complete checkpoints to keep in a folder, those with the most steps; null: all. The checkpoint that
    `latest` names and the one just saved are always kept."""


class DsZoConfig(ConfigModel):
    """Settings of this package that are not optimizer parameters."""

    backend: BackendName | None = None
    """Selects a backend without an `optimizer` block, for scripts that make their own optimizer object."""

    params: Annotated[dict[str, Any] | None, MayDiffer()] = None
    """With `backend`: the keys of its `optimizer.params`, except `lr` and `weight_decay`, which come from the script's
    optimizer."""

    stream: StreamConfig = Field(default_factory=StreamConfig)
    """Block streaming: see `ds_zo.stream`."""

    rounding: Annotated[
        Literal["stochastic", "nearest", "kahan"],
        ReadBy(
            Trait.ROUNDS_UPDATES,
            without=("nearest", "kahan"),
            refusal=None,
            removal="16-bit weights of {type} are rounded from float32 masters",
        ),
        ReadBy(
            Trait.ROUNDS_BY_KAHAN,
            value="kahan",
            refusal="kahan rounding belongs to {readers}, got it under {backend}; write stochastic",
            removal=KAHAN_REMOVAL,
        ),
    ] = "stochastic"
    """How an updated weight is rounded to 16-bit or 8-bit storage. nearest loses most small updates. kahan ({readers},
    weights on the device) rounds to nearest and adds the rounding error to the next update; it takes as much
    memory again as the weights."""

    cuda_graphs: Annotated[bool, ReadBy(Trait.ZEROTH_ORDER, without=(False,), refusal=None), MayDiffer()] = True
    """{readers}: record small blocks as CUDA graphs and replay them, where weights stay on the device. Blocks that
    can't be recorded run as usual."""

    compile_blocks: Annotated[
        bool,
        ReadBy(
            Trait.COMPILES_BLOCKS,
            without=(False,),
            removal="{type} does not compile blocks",
        ),
        MayDiffer(),
    ] = False
    """{readers}: torch.compile every block, with one graph for all blocks of a kind. Steps after the first,
    which compiles, are faster. Results are equal up to rounding, not in bits. The gradients of one block are in memory
    at a time, in place of those of one parameter."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints: see `ds_zo.checkpoint`."""

    @field_validator("backend", mode="before")
    @classmethod
    def _any_letter_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value
