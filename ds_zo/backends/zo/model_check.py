"""Checks before every step that the model is the one that was placed, and applies changed groups and flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

from torch import nn

from ds_zo.backends.common.plain_copies import own_forward
from ds_zo.backends.common.random_state import own_generators
from ds_zo.backends.zo.cuda_graphs import BlockGraphs
from ds_zo.backends.zo.store import ZOStore

ParamGroups = Sequence[Mapping[str, Any]]


class Structure:
    """A module tree and an optimizer's groups, as they are when this is made. Comparing them finds additions, removals,
    replacements, also of forwards, resizes, freezes and regrouping. It is much faster than walking the tree, for which
    the first kernel of a step would wait."""

    def __init__(self, module: nn.Module, param_groups: ParamGroups) -> None:
        self._held = [(held, tuple(held.values())) for m in module.modules() for held in (m._modules, m._parameters)]
        self._forwards = [(vars(m), vars(m).get("forward")) for m in module.modules()]
        self._parameters = [(p, p.shape, p.requires_grad) for p in module.parameters()]
        self._groups = [tuple(group["params"]) for group in param_groups]

    def is_unchanged(self, param_groups: ParamGroups) -> bool:
        """Whether the module tree and these groups are the same as when this was made."""
        return (
            all(len(held) == len(kept) and all(map(is_, held.values(), kept)) for held, kept in self._held)
            and all(attributes.get("forward") is kept for attributes, kept in self._forwards)
            and all(p.shape == shape and p.requires_grad is flag for p, shape, flag in self._parameters)
            and len(param_groups) == len(self._groups)
            and all(
                len(group["params"]) == len(kept) and all(map(is_, group["params"], kept))
                for group, kept in zip(param_groups, self._groups, strict=True)
            )
        )


class ModelCheck:
    """Compares the model and the optimizer's groups with those that were placed."""

    def __init__(
        self,
        module: nn.Module,
        store: ZOStore,
        param_groups: ParamGroups,
        *,
        graphs: BlockGraphs | None,
        on_regrouping: Callable[[], None],
    ) -> None:
        """`on_regrouping` is called after steps have been made and the set of trained parameters has changed."""
        self._module = module
        self._store = store
        self._graphs = graphs
        self._on_regrouping = on_regrouping
        self._with_generators: list[nn.Module] = []
        """The modules that hold random generators."""
        blocks = [unit.module for unit in store.blocks.placement.blocks]
        owners = [m for m in module.modules() if any(p is not None for p in m._parameters.values())]
        self._forwards = {m: own_forward(m) for m in (*blocks, *owners)}
        """The forwards of blocks and of modules that own parameters, at `deepspeed.initialize`."""
        self._structure: Structure | None = None
        """The module tree and the groups when `check` last looked; None before the first check."""
        self._groups_and_flags = self._find_groups_and_flags(param_groups)
        self.trained = self._find_trained()
        """Ids of the trained parameters."""
        self._regrouped = False
        """Groups or `requires_grad` flags changed after the last step, so `check_at_step` checks them again. The flags
        at `step` count, not the flags that the last forward saw: a reference pass under PEFT's `disable_adapter`
        freezes adapters while it lasts."""

    def _find_groups_and_flags(self, param_groups: ParamGroups) -> dict[int, tuple[int, bool]]:
        """For each placed parameter, by its id: its optimizer group, and whether it is trained."""
        group_of = {id(p): index for index, group in enumerate(param_groups) for p in group["params"]}
        placed = [p.parameter for unit in self._store.blocks.placement.units for p in unit.placed]
        return {id(p): (group_of.get(id(p), 0), p.requires_grad and id(p) in group_of) for p in placed}

    def _find_trained(self) -> frozenset[int]:
        return frozenset(key for key, (_, is_trained) in self._groups_and_flags.items() if is_trained)

    @property
    def generators(self) -> list[Any]:
        """The random generators that the model holds. Users replace them during a run."""
        return [generator for m in self._with_generators for generator in own_generators(m)]

    def check(self, param_groups: ParamGroups) -> None:
        """Applies changed groups and `requires_grad` flags. Raises if parameters or forwards were added, removed,
        resized or replaced after `deepspeed.initialize`."""
        if self._structure is not None and self._structure.is_unchanged(param_groups):
            return
        self._structure = None
        self._check_parameters(param_groups)
        self._with_generators = [m for m in self._module.modules() if own_generators(m)]
        if self._graphs is not None:
            self._graphs.forget()
        self._structure = Structure(self._module, param_groups)

    def _check_forwards(self) -> None:
        """Raises if a module of which ZO knows how it uses its weights has another forward."""
        for path, m in self._module.named_modules():
            if m in self._forwards and own_forward(m) != self._forwards[m]:
                raise ValueError(
                    f"the forward of module {path} was replaced after deepspeed.initialize, where ZO does not know how "
                    "it uses the weights: replace it before deepspeed.initialize"
                )

    def check_at_step(self, param_groups: ParamGroups) -> None:
        if self._regrouped:
            self.check(param_groups)
            self._regrouped = False

    def _check_parameters(self, param_groups: ParamGroups) -> None:
        log, units = self._store.log, self._store.blocks.placement.units
        placed_shapes = {id(p.parameter): p.shape for unit in units for p in unit.placed}
        for name, parameter in self._module.named_parameters():
            if placed_shapes.get(id(parameter)) != parameter.shape:
                raise ValueError(
                    f"parameter {name} is not the one that deepspeed.initialize placed, and the placement is fixed: "
                    "add, resize or replace parameters before deepspeed.initialize, and load weights without "
                    "assign=True"
                )
        self._check_forwards()
        here = {id(p) for p in self._module.parameters()}
        for name in (p.name for unit in units for p in unit.placed if id(p.parameter) not in here):
            raise ValueError(
                f"parameter {name} was removed from the model, or another one was put in its place, after "
                "deepspeed.initialize, and the placement is fixed: remove and tie parameters before "
                "deepspeed.initialize"
            )
        if len(param_groups) != log.num_groups:
            raise ValueError(
                f"the optimizer had {log.num_groups} parameter groups when deepspeed.initialize ran and has "
                f"{len(param_groups)} now: add groups before initialize"
            )
        found = self._find_groups_and_flags(param_groups)
        if found == self._groups_and_flags:
            return
        placed = [(part, p) for unit in units for part in unit.parts for p in part.placed]
        for part, p in placed:
            if part.frozen and found[id(p.parameter)][1]:
                raise ValueError(
                    f"parameter {p.name} was frozen when deepspeed.initialize ran, and its storage cannot be trained: "
                    "unfreeze it before initialize, and give it to an optimizer group"
                )
        self._store.materialiser.fold_now(*units)
        for part, p in placed:
            p.group, p.trainable = found[id(p.parameter)]
            part.forget_tables()
        for unit in units:
            unit.folded(log.length)  # also a unit that was frozen: no earlier update applies to it
        self._groups_and_flags, self._regrouped = found, True
        self.trained = self._find_trained()
        if log.length:
            self._on_regrouping()
