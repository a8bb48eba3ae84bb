"""Memory and time of one pass of a model: its sections one after the other, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum


@dataclass(frozen=True)
class LiveBytes:
    """Bytes that are alive at one moment of a pass, parameters aside."""

    total: int = 0
    logits: int = 0
    """Bytes of tensors whose last dimension is the vocabulary."""
    gradients: int = 0
    """Bytes of complete gradients of parameters that are kept."""

    @property
    def activations(self) -> int:
        return self.total - self.logits - self.gradients

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by part, under the names that estimates show."""
        return {"gradients": self.gradients, "activations": self.activations, "logits": self.logits}

    def __add__(self, other: LiveBytes) -> LiveBytes:
        return LiveBytes(self.total + other.total, self.logits + other.logits, self.gradients + other.gradients)


@dataclass(frozen=True)
class Cost:
    """FLOPs of a part of a pass, seconds of its kernels on the device, and seconds of their launches on the host."""

    flops: float = 0.0
    kernel_s: float = 0.0
    launch_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The device runs kernels while the host launches the next ones, so the slower of the two decides."""
        return max(self.kernel_s, self.launch_s)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(
            self.flops - other.flops, max(0.0, self.kernel_s - other.kernel_s), max(0.0, self.launch_s - other.launch_s)
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.kernel_s + other.kernel_s, self.launch_s + other.launch_s)

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.flops * factor, self.kernel_s * factor, self.launch_s * factor)


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter at the moment when it is complete."""

    numel: int
    alive: int
    """Bytes that are alive then, parameters aside and this gradient included, if all earlier gradients were dropped."""


@dataclass(frozen=True)
class Trace:
    """Memory and time of a whole pass."""

    peak: LiveBytes
    """The peak if each gradient is dropped as soon as it is complete, as LOMO and LSP do."""
    peak_keeping: LiveBytes
    """The peak if gradients are kept to the end of the backward pass."""
    paused_nbytes: int
    """The most bytes that are alive when a block begins. ZO's passes wait there for one another, so each further pass
    adds as much."""
    block: tuple[Cost, ...]
    """Cost of the forward pass of each block."""
    non_blocks: Cost
    """Cost of the forward pass outside the blocks, loss included."""
    backward: Cost
    """Cost of the backward pass, recomputation included; zero for a pass without gradients."""
    block_input_nbytes: int
    """Bytes of the largest block input, which is what a recomputed block keeps."""
    gradients: tuple[Gradient, ...] = ()
    """Gradients of parameters, in the order in which they are complete."""
    peak_from_first_gradient: int = 0
    """The most bytes that are alive after the first gradient is complete, if gradients are dropped as in `peak`."""
    sections: tuple[PassSection, ...] = field(default=(), compare=False, repr=False)
    """What was added up."""

    @property
    def forward(self) -> Cost:
        return sum(self.block, self.non_blocks)


class PassPhase(Enum):
    FORWARD = "inside a block"
    BACKWARD = "from a block's output gradient to that of the block before"
    AROUND = "before the first block, between two, or after the last"


@dataclass(frozen=True)
class PassSection:
    """A part of a pass, from one hook to the next. Its bytes, kept gradients included, are counted from its begin
    on."""

    phase: PassPhase
    block: int | None
    """Index of the block that the section is inside of, behind of, or the backward pass of. None: before all blocks."""
    cost: Cost
    at_end: LiveBytes
    at_peak: LiveBytes | None
    """Bytes at the peak if gradients are dropped. None: the section allocated nothing."""
    at_peak_keeping: LiveBytes | None
    """Bytes at the peak if gradients are kept. None: the section allocated nothing."""
    gradients: tuple[Gradient, ...] = ()


class OrderDiffersError(ValueError):
    """Raised where a model runs its blocks in another order for the samples of one tile than for the whole batch."""


def in_tiles(
    whole: Trace, tile: Trace, *, num_tiles: int, share: float, sums_nbytes: Sequence[int]
) -> tuple[PassSection, ...]:
    """The sections of a pass whose blocks run over tiles of the batch one after another. `whole` is the trace of the
    whole batch, `tile` that of one tile. `share`: samples of the batch for each one of a tile. `sums_nbytes`: for each
    block, the sums of its gradients over tiles. Outputs, and gradients of inputs, exist for the whole batch."""
    if [(s.phase, s.block) for s in whole.sections] != [(s.phase, s.block) for s in tile.sections]:
        raise OrderDiffersError(
            f"{num_tiles} tiles can't be planned, because the model runs its blocks in another order for a smaller "
            """batch: plan with --stream '{"tiles": 1}'"""
        )
    outputs_nbytes = whole.block_input_nbytes - tile.block_input_nbytes

    def of_block(ours: PassSection, its: PassSection) -> PassSection:
        if ours.block is None or ours.phase is PassPhase.AROUND:
            return ours
        sums = sums_nbytes[ours.block] if ours.phase is PassPhase.BACKWARD else 0
        more = LiveBytes(outputs_nbytes + sums)
        return replace(
            ours,
            cost=Cost(its.cost.flops * share, its.cost.kernel_s * share, its.cost.launch_s * num_tiles),
            at_peak=None if its.at_peak is None else its.at_peak + more,
            at_peak_keeping=None if its.at_peak_keeping is None else its.at_peak_keeping + more,
        )

    return tuple(of_block(ours, its) for ours, its in zip(whole.sections, tile.sections, strict=True))


def add_up(
    sections: Sequence[PassSection],
    *,
    num_blocks: int,
    block_input_nbytes: int,
    inputs_on_device: int | None = None,
) -> Trace:
    """`inputs_on_device`: how many inputs of blocks are on the device at once. None: those of all blocks that are still
    to be recomputed."""
    now = peak = peak_keeping = LiveBytes()
    paused_nbytes = peak_from_first = on_host = 0
    gradients: list[Gradient] = []
    around = backward = Cost()
    blocks = [Cost()] * num_blocks
    for section in sections:
        if section.phase is PassPhase.AROUND:
            around += section.cost
        elif section.phase is PassPhase.BACKWARD:
            backward += section.cost
        elif section.block is not None:
            blocks[section.block] += section.cost
            paused_nbytes = max(paused_nbytes, now.total)
        if inputs_on_device is not None:
            now += LiveBytes(on_host)
            on_host = max(0, _num_inputs(section, num_blocks) - inputs_on_device) * block_input_nbytes
            now += LiveBytes(-on_host)
        dropping = now.total - now.gradients
        gradients += [Gradient(g.numel, dropping + g.alive) for g in section.gradients]
        if section.at_peak is not None:
            there = now + section.at_peak
            peak = max(peak, LiveBytes(there.total - there.gradients, there.logits), key=_total)
            if gradients:
                peak_from_first = max(peak_from_first, there.total - there.gradients)
        if section.at_peak_keeping is not None:
            peak_keeping = max(peak_keeping, now + section.at_peak_keeping, key=_total)
        now += section.at_end
    return Trace(
        peak,
        peak_keeping,
        paused_nbytes,
        tuple(blocks),
        around,
        backward,
        block_input_nbytes,
        tuple(gradients),
        peak_from_first,
        tuple(sections),
    )


def _num_inputs(section: PassSection, num_blocks: int) -> int:
    """Inputs of blocks that a section finds, that of its own block included."""
    if section.block is not None:
        return section.block + 1
    return num_blocks if section.phase is PassPhase.BACKWARD else 0


def _total(peak: LiveBytes) -> int:
    return peak.total
