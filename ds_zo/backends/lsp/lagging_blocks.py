"""Which blocks' weights may lag behind the last step until the block is called.

[Note: blocks that are called] A block's update is applied when its forward begins, beside the computing of the blocks
before it. That is right only where nothing uses the block's weights earlier: a model may call the modules inside a
block, or take a weight, without calling the block. So a forward is watched. A block that was called before its weights
were used waits for its call from then on. All others are brought up to date before each forward of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from ds_zo.backends.common.stray_weights import StrayWeightDetector
from ds_zo.backends.lsp.host_group import GroupPhase, HostGroup
from ds_zo.backends.recompute.compiled_blocks import is_compiled_by_user
from ds_zo.logs import show


class LaggingBlocks:
    """See [Note: blocks that are called]."""

    def __init__(
        self,
        groups: Sequence[HostGroup],
        *,
        watches: bool,
        on_stray: Callable[[HostGroup], None],
    ) -> None:
        """`on_stray`: told of groups whose weights are used without their block being called."""
        self._unseen = list(groups)
        """Neither seen to be called nor to be used without a call."""
        self._called: set[int] = set()
        self._on_stray = on_stray
        self._watches = watches and bool(groups)
        """The next forward is watched."""
        self.entered: set[int] = set()
        """Groups whose modules were called in the present forward, by id."""

    def waits_for_module(self, group: HostGroup) -> bool:
        return id(group) in self._called

    def step_made(self) -> None:
        """Groups that were skipped when a forward was watched may be in use now."""
        self._watches = self._watches or any(group.moment is GroupPhase.DUE for group in self._unseen)

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Around a forward of `module`. Code that a user has compiled cannot be watched: its blocks never lag."""
        if not self._watches or is_compiled_by_user(module):
            yield
            return
        self.entered.clear()
        holders = {id(slot.parameter): (id(group), slot.name) for group in self._unseen for slot in group.slots}
        watch = StrayWeightDetector(holders, self.entered)
        with watch:
            yield
        self._watches = False
        self._called |= {id(group) for group in self._unseen} & self.entered - watch.strays.keys()
        strays = [group for group in self._unseen if id(group) in watch.strays]
        for group in strays:
            self._on_stray(group)
        if strays:
            show(
                f"ds_zo: {', '.join(group.name for group in strays)}: weights are used outside the forward of their "
                "block, so their updates are applied before each forward and overlap less with it: name the list whose "
                "entries are called whole (ds_zo.stream.blocks)"
            )
        self._unseen = [g for g in self._unseen if id(g) not in self._called and id(g) not in watch.strays]
