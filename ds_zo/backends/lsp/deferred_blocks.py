"""Which blocks' pending updates may be deferred until the block is called.

[Note: updates deferred to the block's call] A block's update is applied when the block's forward begins. So its upload
overlaps with the computation of earlier blocks. This is right only if nothing uses the block's weights before. A model
may call the modules inside a block, or use a weight directly, without calling the block. So one forward is watched. If
a block was called before its weights were used, its updates are deferred to its call from then on. All other updates
are applied before each forward of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from ds_zo.backends.common.stray_weights import StrayWeightDetector
from ds_zo.backends.lsp.host_group import GroupPhase, HostGroup
from ds_zo.backends.recompute.compiled_blocks import is_compiled_by_user
from ds_zo.logs import show


class DeferredBlocks:
    """Decides which groups are deferred. See [Note: updates deferred to the block's call]."""

    def __init__(
        self,
        groups: Sequence[HostGroup],
        *,
        watches: bool,
        on_stray: Callable[[HostGroup], None],
    ) -> None:
        """`watches`: forwards are watched at all. `on_stray` is called with each group whose weights are used without a
        call of its block."""
        self._undecided = list(groups)
        """Groups that no watched forward has used."""
        self._deferred: set[int] = set()
        """Ids of the groups whose updates are deferred to the call of their block."""
        self._on_stray = on_stray
        self._watches = watches and bool(groups)
        """The next forward is to be watched."""
        self.called: set[int] = set()
        """Ids of the groups whose block was called in the present forward."""

    def is_deferred(self, group: HostGroup) -> bool:
        return id(group) in self._deferred

    def after_step(self) -> None:
        """Requests another watched forward if a group that no watched forward used is now in use."""
        self._watches = self._watches or any(group.phase is GroupPhase.UPDATE_PENDING for group in self._undecided)

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Around a forward of `module`. A module that the user has compiled cannot be watched: no update is
        deferred."""
        if not self._watches or is_compiled_by_user(module):
            yield
            return
        self.called.clear()
        holders = {
            id(matrix.parameter): (id(group), matrix.name) for group in self._undecided for matrix in group.matrices
        }
        detector = StrayWeightDetector(holders, self.called.__contains__)
        with detector:
            yield
        self._watches = False
        self._deferred |= {id(group) for group in self._undecided} & self.called - detector.strays.keys()
        strays = [group for group in self._undecided if id(group) in detector.strays]
        for group in strays:
            self._on_stray(group)
        if strays:
            show(
                f"ds_zo: {', '.join(group.name for group in strays)}: weights are used outside the forward of their "
                "block, so their updates are applied before each forward and overlap less with it: name the list whose "
                "entries the model calls as wholes (ds_zo.stream.blocks)"
            )
        self._undecided = [g for g in self._undecided if id(g) not in self._deferred and id(g) not in detector.strays]
