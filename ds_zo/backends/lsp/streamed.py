"""LSP with blocks on the host: the next time that a block is on the device, its pending update is applied.

[Note: updates of streamed blocks] A block's weights are on the device only during its forward and its backward
([Note: recomputed blocks]). The backward compresses the block's gradients and needs nothing else of them. Adam's
direction is applied the next time that the block is on the device, for any purpose, before any computation. The changed
weights are then copied back to the host. So a block is uploaded twice a step and downloaded once.

The weights equal those of a resident run bit for bit, if that run's Adam is on the CPU too (a GPU rounds differently).
Projectors, sums and other states of the block's parameters stay on the device. A whole parameter's gradient is moved
from `.grad` to `MatrixState.held_gradient`, because `.grad` must not outlive the weights' time on the device. Adam of a
streamed block's vectors runs on the CPU too, because their weights are streamed with the block.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_zo.streaming.units import Unit
from ds_zo.streaming.use import Preparation, Use


class PendingUpdate(Preparation):
    """Applies a block's pending update in each use of the block ([Note: updates of streamed blocks]). An applied
    direction cannot be applied again, so the weights are copied back also if the use fails later."""

    def __init__(self, apply: Callable[[Unit], bool]) -> None:
        """`apply` brings the weights of a unit on the device to the last step. True: it has changed them."""
        self.apply = apply

    def prepare(self, use: Use) -> None:
        super().prepare(use)
        if self.apply(use.unit):
            use.commit()
