"""What a pass of a model comes to: its stretches, one after the other, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Peak:
    """What was alive, besides the parameters, when most was."""

    total: int = 0
    logits: int = 0
    """Tensors as wide as the vocabulary."""
    gradients: int = 0
    """Of parameters, complete ones that are kept."""

    @property
    def activations(self) -> int:
        return self.total - self.logits - self.gradients

    def __add__(self, other: Peak) -> Peak:
        return Peak(self.total + other.total, self.logits + other.logits, self.gradients + other.gradients)


@dataclass(frozen=True)
class Cost:
    """Work that ran one after the other."""

    flops: float = 0.0
    kernel_s: float = 0.0
    launch_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The device works off what the host launches; the slower of them decides."""
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
    """A parameter's, when it is complete."""

    numel: int
    alive: int
    """Bytes beside the parameters, this gradient's among them, all that were complete before dropped."""


@dataclass(frozen=True)
class Trace:
    """What a pass came to."""

    peak: Peak
    """With each parameter's gradient gone as soon as it is complete, as LOMO and LSP have it."""
    peak_keeping: Peak
    """With gradients kept to the end of the backward pass."""
    paused: int
    """Most that a pass keeps alive while it waits at a block: what each further pass in lockstep adds."""
    block: tuple[Cost, ...]
    """Forward of each block."""
    edge: Cost
    """Forward of everything else, loss included."""
    backward: Cost
    """Recomputation included; nothing for a pass without gradients."""
    boundary: int
    """Bytes of one block's input: what is kept of a block that is recomputed."""
    gradients: tuple[Gradient, ...] = ()
    """Of parameters, in the order in which they are complete."""
    peak_from_first_gradient: int = 0
    """Most that is alive from then on, as `peak` has it."""

    @property
    def forward(self) -> Cost:
        return sum(self.block, self.edge)


class PassPhase(Enum):
    FORWARD = "inside a block"
    BACKWARD = "from a block's output gradient to that of the block before"
    AROUND = "before the first block, between two, or after the last"


@dataclass(frozen=True)
class Stretch:
    """Of a pass, from one mark to the next. Its bytes, kept gradients among them, are counted from where it began."""

    phase: PassPhase
    block: int | None
    """The one it is inside or behind, or whose backward it is; None: no block yet."""
    cost: Cost
    at_end: Peak
    at_peak: Peak | None
    """With gradients dropped; None: nothing was allocated."""
    at_peak_keeping: Peak | None
    """With gradients kept."""
    gradients: tuple[Gradient, ...] = ()


def add_up(stretches: Sequence[Stretch], *, num_blocks: int, boundary: int) -> Trace:
    now = peak = peak_keeping = Peak()
    paused = peak_from_first = 0
    gradients: list[Gradient] = []
    around = backward = Cost()
    blocks = [Cost()] * num_blocks
    for stretch in stretches:
        if stretch.phase is PassPhase.AROUND:
            around += stretch.cost
        elif stretch.phase is PassPhase.BACKWARD:
            backward += stretch.cost
        elif stretch.block is not None:
            blocks[stretch.block] += stretch.cost
            paused = max(paused, now.total)
        dropping = now.total - now.gradients
        gradients += [Gradient(g.numel, dropping + g.alive) for g in stretch.gradients]
        if stretch.at_peak is not None:
            there = now + stretch.at_peak
            peak = max(peak, Peak(there.total - there.gradients, there.logits), key=_total)
            if gradients:
                peak_from_first = max(peak_from_first, there.total - there.gradients)
        if stretch.at_peak_keeping is not None:
            peak_keeping = max(peak_keeping, now + stretch.at_peak_keeping, key=_total)
        now += stretch.at_end
    return Trace(
        peak, peak_keeping, paused, tuple(blocks), around, backward, boundary, tuple(gradients), peak_from_first
    )


def _total(peak: Peak) -> int:
    return peak.total
