"""Units: parameters that come and go together, laid out flat.

A block is a unit, and so is each module outside the blocks that owns parameters (the edge). A unit's bytes stand in one
buffer, its home, on the host (streamed) or on the device (resident): for each storage dtype a flat plane, every
parameter starting at a multiple of `ALIGN` elements. Between visits a unit's parameters are views of its home, or
placeholders where the storage cannot be viewed in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_zo import ops
from ds_zo.ops.formats import FORMATS
from ds_zo.streaming.intercepted import intercept, stop_intercepting

ALIGN = ops.SEGMENT_ALIGNMENT
"""Elements: a parameter starts 256-byte aligned whatever the dtype, and no scale group spans two parameters."""


@dataclass
class PlacedParameter:
    """One parameter and where it stands."""

    name: str
    parameter: nn.Parameter
    offset: int
    """Of its first element among all the model's parameters: what its noise is a function of."""
    group: int
    """Its optimizer group (0 for a parameter of none, which is never updated)."""
    trainable: bool
    still: tuple[int, int] = (0, 0)
    """Its elements [first, end) get no noise: the row of an embedding at `padding_idx`, which has no gradient."""
    start: int = 0
    """Of its first element in its plane."""

    def __post_init__(self) -> None:
        self.numel, self.shape = self.parameter.numel(), self.parameter.shape

    def view(self, plane: torch.Tensor) -> torch.Tensor:
        return plane[self.start : self.start + self.numel].view(self.shape)


@dataclass
class Planes:
    """One part's tensors inside some buffer."""

    storage: torch.Tensor
    exponents: torch.Tensor | None = None
    low: torch.Tensor | None = None


@dataclass
class Part:
    """The parameters of a unit that share a dtype and a way of being stored."""

    placed: list[PlacedParameter]
    dtype: torch.dtype
    wire: torch.dtype
    split: bool
    direct: bool
    """Frozen and stored in their own dtype: a visit uses the stored bytes as they are."""
    numel: int = 0
    _tables: dict[torch.device, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for placed in self.placed:
            placed.start = self.numel
            self.numel += -(-placed.numel // ALIGN) * ALIGN

    @property
    def _format(self) -> ops.Format | None:
        """None for bytes that no kernel reads: frozen ones may be of any dtype."""
        return None if self.direct else FORMATS.get(self.wire)

    def scales_of(self, placed: PlacedParameter) -> slice:
        """A parameter's part of the plane of scales."""
        assert self._format is not None
        return self._format.scales_of(placed.start, placed.start + placed.numel)

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Of the plane of scales, where the format has one."""
        return None if self._format is None else self._format.scale_dtype

    @property
    def stored_as(self) -> str:
        return str(self.wire).removeprefix("torch.") if self._format is None else self._format.name

    @property
    def viewable(self) -> bool:
        """The stored bytes are the parameter's bytes."""
        return self.wire is self.dtype

    @property
    def loses_bits(self) -> bool:
        """A fold rounds, and nothing keeps what it drops."""
        return not self.direct and not self.split and self.wire.itemsize < 4

    @property
    def nbytes(self) -> int:
        scales = 0 if self._format is None else self.numel // ALIGN * self._format.scale_nbytes
        return self.numel * self.wire.itemsize + scales

    @property
    def low_nbytes(self) -> int:
        return 2 * self.numel if self.split else 0

    def table(self, device: torch.device) -> Any:
        if device not in self._tables:
            segments = [
                ops.Segment(
                    p.start,
                    p.numel,
                    p.offset,
                    p.group,
                    p.trainable,
                    still=(p.offset + p.still[0], p.offset + p.still[1]) if any(p.still) else (0, 0),
                )
                for p in self.placed
            ]
            self._tables[device] = ops.build_table(segments, device)
        return self._tables[device]

    def forget_tables(self) -> None:
        """Groups, trainability or still rows changed."""
        self._tables.clear()


class Unit:
    """See the module's docstring. `home` and `low_buffer` are set by whoever places it."""

    def __init__(self, name: str, module: nn.Module, parts: Sequence[Part], *, index: int, is_block: bool) -> None:
        self.name = name
        self.module = module
        self.parts = list(parts)
        self._parameters = [placed.parameter for placed in self.placed]
        self.index = index
        """Its turn in staggered folding."""
        self.is_block = is_block
        self.nbytes = sum(_padded(part.nbytes) for part in self.parts)
        self.low_nbytes = sum(_padded(part.low_nbytes) for part in self.parts)
        self.scratch_nbytes = sum(_padded(p.numel * p.dtype.itemsize) for p in self.parts if not p.direct)
        self.store_buffer: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self.low_buffer: torch.Tensor | None = None
        self.streamed = False
        """Its home is on the host, and visits bring it to a slot."""
        self.low_streamed = False
        """The same for its low plane."""
        self.version = 0
        """How many updates the stored bytes include."""
        self.written_back: torch.cuda.Event | None = None
        """Recorded when the last download to `home` is done."""
        self.is_sharded = False
        """`home` is this rank's piece alone ([Note: device shards])."""
        self._stored_views: list[torch.Tensor] | None = None
        self.is_materialised = False
        """Its parameters are working copies now."""
        self._gathered_copies: dict[int, torch.Tensor] = {}
        """What parameters show between visits instead of what is stored, by id."""
        self.is_intercepted = False
        """Between visits its parameters tell who reads them ([Note: direct access to parameters])."""
        self.copies_step: int | None = None
        """Whose weights copies hold that somebody's bare read made the parameters show; None: there are none."""

    @property
    def placed(self) -> Iterator[PlacedParameter]:
        return (placed for part in self.parts for placed in part.placed)

    @property
    def trainable(self) -> bool:
        return any(placed.trainable for placed in self.placed)

    def assign_buffers(
        self,
        home: torch.Tensor,
        low_buffer: torch.Tensor | None,
        *,
        streamed: bool,
        low_streamed: bool,
        is_sharded: bool = False,
    ) -> None:
        """Gives the unit its buffers; what they hold is the caller's business."""
        self.store_buffer, self.low_buffer = home, low_buffer
        self.is_sharded = is_sharded
        self.streamed, self.low_streamed = streamed, low_streamed and low_buffer is not None
        self._stored_views = None

    def spans(self) -> Iterator[tuple[PlacedParameter, int, int]]:
        """Where each parameter begins and ends in a buffer laid out like `home`, in bytes."""
        at = 0
        for part in self.parts:
            for placed in part.placed:
                begin = at + placed.start * part.wire.itemsize
                yield placed, begin, begin + placed.numel * part.wire.itemsize
            at += _padded(part.nbytes)

    def planes(self, buffer: torch.Tensor, low: torch.Tensor | None = None) -> list[Planes]:
        """Each part's tensors in a buffer laid out like `home` (and one like `low_buffer`)."""
        found, at, low_at = [], 0, 0
        for part in self.parts:
            nbytes = part.numel * part.wire.itemsize
            storage = buffer[at : at + nbytes].view(part.wire)
            dtype = part.scale_dtype
            exponents = None if dtype is None else buffer[at + nbytes : at + part.nbytes].view(dtype)
            at += _padded(part.nbytes)
            part_low = None
            if part.split and low is not None:
                part_low = low[low_at : low_at + part.low_nbytes].view(torch.int16)
            low_at += _padded(part.low_nbytes)
            found.append(Planes(storage, exponents, part_low))
        return found

    def outs(self, scratch: torch.Tensor) -> list[torch.Tensor | None]:
        """Each part's plane of values in the parameters' own dtype; None where the stored bytes serve."""
        found: list[torch.Tensor | None] = []
        at = 0
        for part in self.parts:
            if part.direct:
                found.append(None)
                continue
            nbytes = part.numel * part.dtype.itemsize
            found.append(scratch[at : at + nbytes].view(part.dtype))
            at += _padded(nbytes)
        return found

    def views(self, planes: Sequence[Planes], outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """A tensor a parameter, in `placed` order."""
        return [
            placed.view(planes[i].storage if out is None else out)
            for i, (part, out) in enumerate(zip(self.parts, outs, strict=True))
            for placed in part.placed
        ]

    def leave_meta(self) -> None:
        """Gives parameters on the meta device, which cannot be pointed at real memory, a body that can. They stay the
        same objects."""
        for placed in self.placed:
            p = placed.parameter
            if p.is_meta:
                hollow = nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), requires_grad=p.requires_grad)
                # torch.utils.swap_tensors without its refusal of weak references, which stay right: the object stays.
                torch._C._swap_tensor_impl(p, hollow)

    def bind(self, views: Iterable[torch.Tensor]) -> None:
        """Points the parameters at `views` (in `placed` order)."""
        self._adopt_replaced_copies()
        self.is_materialised = True
        self.copies_step = None
        if self.is_intercepted:
            stop_intercepting(self._parameters)
        for placed, view in zip(self.placed, views, strict=True):
            placed.parameter.data = view

    def bind_stored(self) -> None:
        """Between visits: views of the stored bytes, or placeholders of the right shape, dtype and no memory; what was
        lent where something was."""
        if self._stored_views is None:
            self._stored_views = []
            whole = [None] * len(self.parts) if self.is_sharded else self.planes(self.store_buffer)
            for part, planes in zip(self.parts, whole, strict=True):
                for placed in part.placed:
                    if part.viewable and planes is not None:
                        self._stored_views.append(placed.view(planes.storage))
                    else:
                        hollow = torch.zeros((), dtype=part.dtype, device=self.store_buffer.device)
                        self._stored_views.append(hollow.expand(placed.parameter.shape))
        self.bind(self._stored_views)
        self.is_materialised = False
        for placed in self.placed if self._gathered_copies else ():
            if id(placed.parameter) in self._gathered_copies:
                placed.parameter.data = self._gathered_copies[id(placed.parameter)]
        if self.is_intercepted:
            self._intercept()

    def intercept(self) -> None:
        """Until `stop_intercepting`, whenever no visit has bound them."""
        self.is_intercepted = True
        if not self.is_materialised:
            self._intercept()

    def stop_intercepting(self) -> None:
        self.is_intercepted = False
        stop_intercepting(self._parameters)

    def _intercept(self) -> None:
        intercept(
            [p for p in self._parameters if id(p) not in self._gathered_copies]
            if self._gathered_copies
            else self._parameters
        )

    def show_copies(self, values: Iterable[torch.Tensor], *, step: int) -> None:
        """Parameters show copies of the weights of `step` (in `placed` order) until the next visit."""
        for placed, value in zip(self.placed, values, strict=True):
            if id(placed.parameter) not in self._gathered_copies:
                placed.parameter.data = value
        self.copies_step = step

    def show_gathered_copy(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """`parameter` shows `value` between visits, or whatever it is pointed at then, until `take_back`."""
        stop_intercepting([parameter])
        self._gathered_copies[id(parameter)] = parameter.data = value

    def gathered_copy(self, parameter: nn.Parameter) -> torch.Tensor:
        self._adopt_replaced_copies()
        return self._gathered_copies[id(parameter)]

    def drop_gathered_copy(self, parameter: nn.Parameter) -> None:
        del self._gathered_copies[id(parameter)]

    def _adopt_replaced_copies(self) -> None:
        """Somebody may have pointed a parameter elsewhere."""
        for placed in self.placed if self._gathered_copies and not self.is_materialised else ():
            lent = self._gathered_copies.get(id(placed.parameter))
            if lent is not None and lent.data_ptr() != placed.parameter.data_ptr():
                self._gathered_copies[id(placed.parameter)] = placed.parameter.data

    def store(self, read: Callable[[PlacedParameter], torch.Tensor], *, via: torch.device | None = None) -> None:
        """Fills `home` from `read(placed)`, one parameter at a time, rounding to nearest, on the device `via` if
        given."""
        via = via or self.store_buffer.device
        for part, planes in zip(self.parts, self.planes(self.store_buffer, self.low_buffer), strict=True):
            for placed in part.placed:
                self._store(part, planes, placed, read(placed), via=via)

    def store_one(self, placed: PlacedParameter, value: torch.Tensor) -> None:
        for part, planes in zip(self.parts, self.planes(self.store_buffer, self.low_buffer), strict=True):
            if any(p is placed for p in part.placed):
                self._store(part, planes, placed, value, via=value.device)

    def _store(
        self, part: Part, planes: Planes, placed: PlacedParameter, value: torch.Tensor, *, via: torch.device
    ) -> None:
        if tuple(value.shape) != tuple(placed.parameter.shape):
            raise ValueError(f"{placed.name} has shape {tuple(placed.parameter.shape)}, got {tuple(value.shape)}")
        value = value.detach()
        if part.direct or (part.viewable and value.dtype is part.dtype):  # nothing to round
            ops.copy_staged_(placed.view(planes.storage), value)
            if planes.low is not None:
                placed.view(planes.low).zero_()
            return
        end = placed.start + -(-placed.numel // ALIGN) * ALIGN
        span = slice(placed.start, end)
        padded = torch.zeros(end - placed.start, dtype=torch.float32, device=via)
        padded[: placed.numel].copy_(value.reshape(-1))
        ops.encode_(
            planes.storage[span],
            padded,
            low=None if planes.low is None else planes.low[span],
            exponents=None if planes.exponents is None else planes.exponents[part.scales_of(placed)],
        )


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
