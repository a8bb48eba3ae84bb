"""When the pending updates of host groups are applied to the weights.

[Note: updates deferred to the block's call] A block's update is applied when the block's forward begins. So its upload
overlaps with the computation of earlier blocks. This is right only if nothing uses the block's weights before. A model
may call the modules inside a block, or use a weight directly, without calling the block. So one forward is watched. If
a block was called before its weights were used, its updates are deferred to its call from then on. All other updates
are applied before each forward of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_zo.backends.common.plain_copies import weakly
from ds_zo.backends.common.stray_weights import StrayWeightDetector
from ds_zo.backends.lsp.groups import LSPGroups
from ds_zo.backends.lsp.host_group import GroupPhase, HostGroup
from ds_zo.backends.lsp.matrices import MatrixGroup, owners
from ds_zo.backends.recompute.compiled_blocks import is_compiled_by_user
from ds_zo.backends.recompute.model_blocks import ModelBlocks
from ds_zo.logs import show
from ds_zo.streaming.units import Unit


class PendingUpdates:
    """Applies pending updates before their weights are used, and hooks the modules that use them."""

    def __init__(
        self,
        module: nn.Module,
        groups: LSPGroups,
        matrix_groups: Sequence[MatrixGroup],
        *,
        blocks: ModelBlocks,
        watches: bool,
    ) -> None:
        """`watches`: updates may be deferred, so forwards are watched."""
        self._module, self._groups, self._blocks = module, groups, blocks
        self._undecided = [group for group in groups.on_host if group.is_block and group.unit is None]
        """Groups that no watched forward has used."""
        self._deferred: set[int] = set()
        """Ids of the groups whose updates are deferred to the call of their block."""
        self._watches = watches and bool(self._undecided)
        """The next forward is to be watched."""
        self._called: set[int] = set()
        """Ids of the groups whose block was called in the present forward."""
        self.handles = self._hook_modules(matrix_groups)

    # Application

    def _pending(self) -> Iterator[HostGroup]:
        return (group for group in self._groups.on_host if group.phase is GroupPhase.UPDATE_PENDING)

    def exist(self) -> bool:
        return any(True for _ in self._pending())

    @torch.inference_mode(False)
    def apply_all(self, *hooked: Any) -> None:
        """Brings every weight to the last step.

        Inference mode is switched off: training goes on with tensors that an evaluation's forward creates here."""
        for group in self._pending():
            if group.unit is not None:
                with self._blocks.use(group.unit):  # which applies it
                    pass
            else:
                self._apply(group)

    def _apply(self, group: HostGroup) -> bool:
        """True: the update was pending."""
        was_pending = group.phase is GroupPhase.UPDATE_PENDING
        if was_pending:
            group.apply_pending_update()
            self._groups.prefetch()
        return was_pending

    def apply_to_unit(self, unit: Unit) -> bool:
        """Applies the pending update of a block whose weights are on the device. True: its weights have changed."""
        return any(self._apply(group) for group in self._groups.on_host if group.unit is unit)

    def units(self) -> list[Unit]:
        """Streamed blocks that have a pending update."""
        return [group.unit for group in self._pending() if group.unit is not None]

    # Hooks

    def _hook_modules(self, matrix_groups: Sequence[MatrixGroup]) -> list[RemovableHandle]:
        """Registers the hooks that apply a pending update before its weights are used or copied.

        A block that is known to be called as a whole applies its update in its own forward. The root module's forward
        applies all other updates, because these weights may be used without a call of the module that holds them."""
        by_name = {group.name: group for group in self._groups.on_host if group.unit is None}
        handles: list[RemovableHandle] = []
        for matrix_group in matrix_groups:
            if matrix_group.name in by_name:
                handles += self._hook_forwards(by_name[matrix_group.name], matrix_group.modules)
        if self._groups.on_host:
            handles.append(self._module.register_forward_pre_hook(weakly(self._before_forward)))
        deferred = {id(matrix.parameter) for group in self._groups.on_host for matrix in group.matrices}
        for m in self._module.modules():  # `state_dict()` of a submodule does not call the hooks of its parents
            if any(id(p) in deferred for p in m._parameters.values()):
                handles.append(m.register_state_dict_pre_hook(weakly(self.apply_all)))
                handles.append(m.register_load_state_dict_pre_hook(weakly(self.apply_all)))
        return handles

    def _hook_forwards(self, group: HostGroup, modules: Sequence[nn.Module]) -> list[RemovableHandle]:
        return [m.register_forward_pre_hook(weakly(self._before_module_call, group)) for m in modules]

    @torch.inference_mode(False)
    def _before_module_call(self, group: HostGroup, *hooked: Any) -> None:
        self._called.add(id(group))
        self._apply(group)

    @torch.inference_mode(False)
    def _before_forward(self, *hooked: Any) -> None:
        """Applies the updates that a forward of the whole module needs."""
        for group in self._groups.on_host:
            if group.unit is None and id(group) not in self._deferred:
                group.apply_pending_update()
        self._groups.prefetch()

    # [Note: updates deferred to the block's call]

    def after_step(self) -> None:
        """Requests another watched forward if a group that no watched forward used is now in use."""
        self._watches = self._watches or any(group.phase is GroupPhase.UPDATE_PENDING for group in self._undecided)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a forward of the module. A module that the user has compiled cannot be watched: no update is
        deferred."""
        if not self._watches or is_compiled_by_user(self._module):
            yield
            return
        self._called.clear()
        holders = {
            id(matrix.parameter): (id(group), matrix.name) for group in self._undecided for matrix in group.matrices
        }
        detector = StrayWeightDetector(holders, self._called.__contains__)
        with detector:
            yield
        self._watches = False
        strays = [group for group in self._undecided if id(group) in detector.strays]
        self._deferred |= {id(group) for group in self._undecided} & self._called - detector.strays.keys()
        self._undecided = [g for g in self._undecided if id(g) not in self._deferred and g not in strays]
        for group in strays:  # a user may run a part of the model by itself, without a call of the block
            using = {owner for matrix in group.matrices for owner in owners(self._module, matrix.parameter)}
            self.handles += self._hook_forwards(group, list(using))
        if strays:
            show(
                f"ds_zo: {', '.join(group.name for group in strays)}: weights are used outside the forward of their "
                "block, so their updates are applied before each forward and overlap less with it: name the list whose "
                "entries the model calls as wholes (ds_zo.stream.blocks)"
            )
