"""Forwards of linear modules and embeddings that add the noise of members outside the weights. See [Note: members].

For a member's rows x, a linear module returns `x W^T + b + sign * zo_eps * (x . v) u`, which equals a product with
`W + sign * zo_eps * u v^T`. The factors u and v are the numbers of which the update makes z.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo import ops
from ds_zo.backends.common.plain_copies import StandIn, own_forward
from ds_zo.backends.zo.member_check import MemberCheck
from ds_zo.backends.zo.members import MemberRows
from ds_zo.config import ConfigError
from ds_zo.streaming.placement import Placement
from ds_zo.streaming.units import Unit


class MemberForwards:
    """Stands in for the forwards of all modules that own trained matrices."""

    def __init__(
        self, module: nn.Module, placement: Placement, *, num_members: int, device: torch.device, at: str
    ) -> None:
        """`num_members`: of this rank. `at`: the path of the optimizer's params in the JSON, for error messages."""
        self._placement = placement
        self._num_members = num_members
        self._device = device
        self._scale = 0.0
        """The scale of the noise of + rows."""
        self._rows: MemberRows | None = None
        """The rows of the forward that is running; None outside of passes with members."""
        self._num_tokens = 0
        """Tokens of all rows, in the newest input with three dimensions."""
        self._check: MemberCheck | None = None
        """What looks at each call, in passes of the check of the first step."""
        self._factors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """(u [member, row], v [member, column]) of each trained matrix, by parameter id. Other units overwrite the
        numbers once a unit is not materialised any more."""
        self._placed: dict[int, tuple[bool, list[ops.SegmentTable], list[torch.Tensor]]] = {}
        """By the unit's id: whether it is pass-long, its tables, and the memory of the factors of each."""
        self.num_moves = 0
        """How often factors got other addresses."""
        self._at, nbytes = self._plan_scratch()
        """Where in the scratch the factors of each unit outside the blocks begin, by the unit's id."""
        self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._own_scratch: dict[int, torch.Tensor] = {}
        """Memory for the factors of each pass-long unit, by the unit's id."""
        self._owners = _owners(module, placement, at=at)
        self._stand_ins: list[StandIn] = []

    def attach(self) -> None:
        """From now until `close`, the forwards add noise."""
        for m, name in self._owners.items():
            self._stand_ins.append(StandIn.put(m, "forward", partial(self._call, name, m, m.forward)))

    def close(self) -> None:
        for stand_in in self._stand_ins:
            stand_in.remove()

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(t.numel() for t in (self._scratch, *self._own_scratch.values()))

    def replay_nbytes(self, num_pending: int) -> int:
        """Bytes of the factors of so many pending members, which a launch over a block draws again."""
        tables = (table for unit in self._placement.blocks for table in self._tables(unit))
        return num_pending * max((table.factors.numel * table.factor_dtype.itemsize for table in tables), default=0)

    def _tables(self, unit: Unit) -> list[ops.SegmentTable]:
        tables = (part.table(self._device) for part in unit.parts if not part.frozen)
        return [table for table in tables if table.factors.numel]

    def _nbytes(self, unit: Unit) -> int:
        """Bytes of the factors of a unit."""
        return sum(map(self._table_nbytes, self._tables(unit)))

    def _table_nbytes(self, table: ops.SegmentTable) -> int:
        return -(-self._num_members * table.factors.numel * table.factor_dtype.itemsize // 256) * 256

    def _plan_scratch(self) -> tuple[dict[int, int], int]:
        """Where factors of units outside the blocks lie, behind those of a block, and the bytes of all."""
        nbytes = of_block = max(map(self._nbytes, self._placement.blocks), default=0)
        found: dict[int, int] = {}
        for units in self._placement.entered_by.values():
            at = of_block
            for unit in units:
                at = found[id(unit)] = max(at, found.get(id(unit), 0))
                at += self._nbytes(unit)
                nbytes = max(nbytes, at)
        return found, nbytes

    def fill(self, unit: Unit, noise: ops.Noise) -> None:
        """Fills the factors of a unit that is being materialised. `noise`: of the rank's first member."""
        is_pass_long, tables = self._is_pass_long(unit), self._tables(unit)
        known = self._placed.get(id(unit))
        if known is None or known[0] != is_pass_long or list(map(id, known[1])) != list(map(id, tables)):
            known = self._placed[id(unit)] = is_pass_long, tables, self._place(unit, tables)
        for table, out in zip(tables, known[2], strict=True):
            ops.factors(table, noise=noise, out=out)

    def _place(self, unit: Unit, tables: list[ops.SegmentTable]) -> list[torch.Tensor]:
        """Memory for the factors of each table. Makes the views that forwards read. Slicing costs more than launching a
        small block's kernels."""
        self.num_moves += 1
        scratch = self._scratch_of(unit)
        found = []
        factors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for table in tables:
            numel = self._num_members * table.factors.numel
            out = scratch[: numel * table.factor_dtype.itemsize].view(table.factor_dtype).view(self._num_members, -1)
            found.append(out)
            factors |= table.factors.views(out)
            scratch = scratch[self._table_nbytes(table) :]
        for placed in unit.placed:
            if placed.trainable and placed.offset in factors:
                self._factors[id(placed.parameter)] = factors[placed.offset]
            else:
                self._factors.pop(id(placed.parameter), None)
        return found

    def _is_pass_long(self, unit: Unit) -> bool:
        return any(unit is other for other in self._placement.pass_long)

    def _scratch_of(self, unit: Unit) -> torch.Tensor:
        if self._is_pass_long(unit):
            scratch, nbytes = self._own_scratch.get(id(unit)), self._nbytes(unit)
            if scratch is None or len(scratch) < nbytes:  # parameters of it may be trained later
                scratch = self._own_scratch[id(unit)] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            return scratch
        return self._scratch if unit.is_block else self._scratch[self._at[id(unit)] :]

    @contextmanager
    def adding_noise(self, rows: MemberRows, *, scale: float) -> Iterator[None]:
        """Context of a forward over these rows, to which the members' noise is added at this scale."""
        self._rows, self._scale, self._num_tokens = rows, scale, 0
        try:
            yield
        finally:
            self._rows = None

    @contextmanager
    def checked(self, rows: MemberRows) -> Iterator[MemberCheck]:
        """Context of the passes of the check of the first step."""
        weights = {id(m._parameters["weight"]): f"{name}.weight" for m, name in self._owners.items()}
        self._check = MemberCheck(rows, weights)
        try:
            yield self._check
        finally:
            self._check = None

    @property
    def state(self) -> Hashable | None:
        """What else decides which kernels a forward launches. None: a forward must call its modules."""
        return None if self._check is not None else (self._rows, self._scale)

    def note_tokens(self, x: torch.Tensor) -> None:
        """Notes the number of tokens of an input with three dimensions."""
        if self._rows is not None and x.ndim >= 3 and len(x) == self._rows.num_rows:
            self._num_tokens = x.shape[:-1].numel()

    def _call(self, name: str, module: Any, forward: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows, check, weight = self._rows, self._check, module._parameters["weight"]
        with nullcontext() if check is None else check.using(weight):
            output: torch.Tensor = forward(*args, **kwargs)
        factors = None if rows is None and check is None else self._factors.get(id(weight))
        if rows is not None and factors is not None:
            x = args[0] if args else next(iter(kwargs.values()))
            is_embedding = isinstance(module, nn.Embedding)
            self._check_rows(name, x, rows, is_ids=is_embedding)
            add = _add_to_embedding if is_embedding else _add_to_product
            u, v = factors if isinstance(module, (nn.Linear, nn.Embedding)) else factors[::-1]
            if output.dtype is not u.dtype:
                raise ValueError(
                    f'noise "rank1" needs outputs in the dtype of weights, {u.dtype}, got {output.dtype} at {name}: '
                    'set bf16.enabled in place of torch.autocast, or use noise "mezo" (optimizer.params.noise)'
                )
            output = add(output, x, u, v, scale=self._scale, rows=rows)
        if check is not None and factors is not None:
            check.saw(name, output, weight, factors[0][0], factors[1][0])
        return output

    def _check_rows(self, name: str, x: torch.Tensor, rows: MemberRows, *, is_ids: bool) -> None:
        """Raises unless the module's input has the rows of the batch, or the tokens of all rows one after the other, or
        ids that all rows share, such as positions."""
        self.note_tokens(x)
        allowed = (1, rows.num_rows) if is_ids else (rows.num_rows, self._num_tokens if x.ndim == 2 else -1)
        if x.ndim < 2 or len(x) not in allowed:
            raise ValueError(
                f'noise "rank1" needs a row of the batch in each row of a module\'s input, got {tuple(x.shape)} at '
                f'{name} with {rows.num_rows} rows: freeze the weight of {name}, or use noise "mezo"'
            )


def _add_to_product(
    output: torch.Tensor, x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, *, scale: float, rows: MemberRows
) -> torch.Tensor:
    """Adds the noise to the output of a linear module, in place."""
    along_v = torch.bmm(x.reshape(rows.num_members, -1, x.shape[-1]), v[:, :, None])
    _add(output, along_v, u, scale=scale, rows=rows)
    return output


def _add_to_embedding(
    output: torch.Tensor, ids: torch.Tensor, u: torch.Tensor, v: torch.Tensor, *, scale: float, rows: MemberRows
) -> torch.Tensor:
    """The output of an embedding with the noise. Ids that all rows share get a row for each."""
    if len(ids) != rows.num_rows:
        ids, output = (t.expand(rows.num_rows, *t.shape[1:]).contiguous() for t in (ids, output))
    coefficients = u.gather(1, ids.reshape(rows.num_members, -1).long())
    _add(output, coefficients[:, :, None], v, scale=scale, rows=rows)
    return output


def _add(
    output: torch.Tensor, coefficients: torch.Tensor, vectors: torch.Tensor, *, scale: float, rows: MemberRows
) -> None:
    """Adds `scale * coefficient * vector` to each token's output, and subtracts it in - rows. Each member has its own
    vector. `coefficients`: [member, token, 1], which are changed. Few operations: small modules wait for launches."""
    if rows.antithetic:
        coefficients.view(rows.num_members, 2, -1)[:, 1].neg_()
    by_member = output.view(rows.num_members, -1, output.shape[-1])
    by_member.baddbmm_(coefficients.to(output.dtype), vectors[:, None, :], alpha=scale)


def _owners(module: nn.Module, placement: Placement, *, at: str) -> dict[nn.Module, str]:
    """The modules that own trained matrices, with their names. Raises if there is one whose forward is not known."""
    trained = {
        id(p.parameter): p.name
        for unit in placement.units
        for p in unit.placed
        if p.trainable and p.parameter.dim() >= 2
    }
    found = {}
    for name, m in module.named_modules():
        for key, p in m._parameters.items():
            if p is None or id(p) not in trained:
                continue
            if key != "weight" or p.dim() != 2 or not _is_known(m):
                raise ConfigError(
                    f'noise "rank1" trains the weights of nn.Linear, nn.Embedding and Conv1D, got {trained[id(p)]} of '
                    f'{type(m).__name__}; freeze it before deepspeed.initialize, or use noise "mezo"',
                    at=f"{at}.noise",
                )
            found[m] = name
    return found


def _is_known(module: nn.Module) -> bool:
    """Whether the module's forward is that of a linear layer or of an embedding."""
    forward = getattr(own_forward(module), "__func__", None)
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    if getattr(module, "max_norm", None) is not None:  # such an embedding writes to its weights
        return False
    return forward in (nn.Linear.forward, nn.Embedding.forward) or (is_conv1d and forward is type(module).forward)
