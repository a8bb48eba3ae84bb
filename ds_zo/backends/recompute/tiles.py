"""Tiles: slices of the batch over which a recomputed block runs one after another.

[Note: batch tiles] A block's activations then exist for the samples of one tile at a time. The forward runs the block
on each tile and writes the outputs to whole tensors. The recomputation takes the same tiles, with the random state of
each, and runs the inner backward of a tile before the next one. Otherwise a router could choose other experts, or
dropout other elements. While several tiles run, leaves take the place of the block's trained weights. They sum
gradients in float32, and no hook runs for a single tile. At the end each weight gets its sum in one piece.

[Note: which blocks are tiled] No list of models says which blocks may be tiled and which arguments have a batch
dimension. The first training forward of a block tries it, on the first and the last sample of its batch. The samples
together must give the outputs that each gives alone. A sample's outputs must not depend on the other sample, also if
that one is NaN or repeats one token, which would fill up an expert's capacity. Gradients of zero must give zeros: some
routers add an auxiliary loss in their backward pass, which would be added for each tile. Dropout is off in this trial;
modules stay in training, where alone some routers have a capacity. Blocks that fail it, change their state, draw other
random numbers, have hooks inside or get arguments of unknown types run on the whole batch. The trial cannot see a
capacity in tokens that two samples do not fill. A resumed run tries again, on its own first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from ds_zo.backends.common.module_state import SavedState
from ds_zo.backends.common.random_state import RandomState
from ds_zo.backends.recompute.context import BlockProfile
from ds_zo.backends.recompute.output_check import coarsest_eps, rows_that_differ

_MAX_FLIPS = 8
"""Arguments of which the search tries whether one alone has, or lacks, a batch dimension."""
_MAX_SHARE = 1 / 8
"""The share of tokens whose outputs may differ between one sample alone and two, where a router rounds differently and
chooses another expert."""
_DROPOUTS = {
    torch.dropout,
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
}
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)

Outputs = tuple[list[torch.Tensor], Any]
"""A block's output tensors, and the other leaves of its output."""
Run = Callable[[Sequence[torch.Tensor]], Outputs]
"""Runs a block on input tensors."""


class Untiled(Exception):
    """Why a block is not tiled. `is_final`: other ways to slice its arguments need not be tried."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_final = reason, is_final


@dataclass(frozen=True)
class Tile:
    """Consecutive samples of a batch. `rows`, in its methods: the rows of a tensor that belong to one sample; 0: the
    tensor is not sliced."""

    start: int
    stop: int
    batch: int

    def cut(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """The tile's part of a whole tensor."""
        return tensor.narrow(0, rows * self.start, rows * (self.stop - self.start)) if rows else tensor

    @torch.no_grad()
    def put(self, whole: torch.Tensor | None, part: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """Writes the tile's part of a tensor to the whole one, which the first part makes. Returns the whole one."""
        if not rows:
            return part
        if part is None:
            return whole
        if whole is None:
            whole = part.new_zeros((rows * self.batch, *part.shape[1:])).requires_grad_(part.requires_grad)
        self.cut(whole, rows).copy_(part)
        return whole


@dataclass(frozen=True)
class Tiles:
    """The tiles of one call of a block."""

    batch: int = 1
    num_tiles: int = 1
    inputs: tuple[int, ...] = ()
    """For each input tensor, its rows for one sample, or 0. Empty: no tensor is sliced."""

    def __iter__(self) -> Iterator[Tile]:
        """Tiles of equal size, or the first ones larger by one sample."""
        size, rest = divmod(self.batch, self.num_tiles)
        for i in range(self.num_tiles):
            start = i * size + min(i, rest)
            yield Tile(start, start + size + (i < rest), self.batch)

    @property
    def are_several(self) -> bool:
        return self.num_tiles > 1

    def rows_of_inputs(self, tensors: Sequence[Any]) -> Sequence[int]:
        return self.inputs or (0,) * len(tensors)

    def rows_of_gradients(self, grads: Sequence[torch.Tensor | None]) -> Sequence[int]:
        """The rows of each output's gradient for one sample, or 0."""
        return [0 if g is None or not self.are_several else len(g) // self.batch for g in grads]

    def put_outputs(
        self, block: str, tile: Tile, wholes: Sequence[torch.Tensor | None], parts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Writes the outputs of a tile to the whole ones, of which there are none before the first tile. Raises if they
        are not as in the trial."""
        if not self.are_several:
            return list(parts)
        size = tile.stop - tile.start
        wholes = wholes or [None] * len(parts)
        fit = len(wholes) == len(parts) and all(t.ndim > 0 and len(t) % size == 0 for t in parts)
        rows = [len(t) // size for t in parts] if fit else []
        if not fit or any(w is not None and len(w) != k * self.batch for w, k in zip(wholes, rows, strict=True)):
            raise ValueError(
                f"the outputs of block {block} have a batch dimension in some of its calls, got "
                f"{[tuple(t.shape) for t in parts]} for {size} samples: set ds_zo.stream.tiles to 1"
            )
        return [tile.put(*found) for found in zip(wholes, parts, rows, strict=True)]


WHOLE = Tiles()
"""One tile: the whole batch."""


class TileSearch:
    """Finds the tiles of each call of one block. See [Note: which blocks are tiled]."""

    def __init__(self, profile: BlockProfile, *, report: Callable[[str], None]) -> None:
        """`report` is called with the reason where a block is not tiled."""
        self._profile, self._report = profile, report
        self._found: list[tuple[Any, Sequence[bool]]] = []
        """For each structure of arguments seen so far: the structure, and which tensors are sliced; none: the whole
        batch is one tile."""

    def tiles(
        self, run: Run, tensors: Sequence[torch.Tensor], *, others: Sequence[Any], spec: Any, num_tiles: int
    ) -> Tiles:
        """`others`, `spec`: the other leaves of the arguments, and their structure."""
        if num_tiles == 1:
            return WHOLE
        lead = _lead(tensors)
        batch = 0 if lead is None else len(tensors[lead])
        try:
            self._check_block(others)
            if lead is None:
                raise Untiled("it has no floating-point input with a batch dimension")
            if batch < 2:
                raise Untiled("this batch has one sample")
        except Untiled as found:
            self._report(found.reason)
            return WHOLE
        rows = tuple(_rows(t, batch) for t in tensors)
        kinds = [x if isinstance(x, (bool, str)) else type(x) for x in others]
        shapes = [(t.ndim, t.dtype, min(k, 2)) for t, k in zip(tensors, rows, strict=True)]
        key = (lead, spec, kinds, shapes, [m.training for m in self._profile.modules])
        sliced = next((sliced for known, sliced in self._found if known == key), None)
        if sliced is None:
            sliced = self._searched(run, tensors, rows, lead)
            self._found.append((key, sliced))
        if not sliced:
            return WHOLE
        inputs = tuple(k if is_sliced else 0 for k, is_sliced in zip(rows, sliced, strict=True))
        return Tiles(batch, min(num_tiles, batch), inputs)

    def _check_block(self, others: Sequence[Any]) -> None:
        if self._profile.has_hooks_inside():
            raise Untiled("a module inside it has a hook, which would run for each tile")
        if self._profile.keeps_weights_in_lists:
            raise Untiled("a module inside it keeps its weights in a list of its own")
        unknown = next((x for x in others if not isinstance(x, _CONSTANTS)), None)
        if unknown is not None:
            raise Untiled(f"an argument is a {type(unknown).__name__}, which may hold values of single samples")

    def _searched(self, run: Run, tensors: Sequence[torch.Tensor], rows: Sequence[int], lead: int) -> Sequence[bool]:
        """Tries ways to slice the arguments. Returns which tensors are sliced. If all ways are refuted, reports the
        reason against the first one, and returns nothing."""
        reasons: list[str] = []
        has_raised = False
        # Slices of a lookup table would be read outside of their bounds, which ends a process on CUDA. So tensors that
        # may be tables of as many tokens as there are samples stay whole at first, and tensors with several rows for
        # each sample are sliced only where the block needs it to run at all.
        is_square = tensors[lead].ndim > 1 and tensors[lead].shape[1] == len(tensors[lead])
        tables = {i for i, t in enumerate(tensors) if is_square and t.ndim < 3 and i != lead}
        for sliced in _hypotheses(rows, lead, tables=tables):
            if reasons and not has_raised and any(k > 1 for k in sliced):
                continue
            try:
                _Trial(self._profile, run, tensors, sliced, lead).check()
                return [k > 0 for k in sliced]
            except Untiled as found:
                reasons.append(found.reason)
                if found.is_final:
                    break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                has_raised = True
                reasons.append(
                    f"it raises {type(error).__name__} for single samples ({str(error).partition(chr(10))[0]})"
                )
        self._report(reasons[0])
        return []


def _lead(tensors: Sequence[torch.Tensor]) -> int | None:
    """The index of the tensor whose first dimension is the batch, if there is one."""
    dense = [i for i, t in enumerate(tensors) if t.layout is torch.strided and t.ndim and t.is_floating_point()]
    return next((i for i in dense if tensors[i].requires_grad), dense[0] if dense else None)


def _rows(tensor: torch.Tensor, batch: int) -> int:
    """The rows of a tensor for each sample, if it has a batch dimension; 0: it has none."""
    is_dense = tensor.layout is torch.strided and tensor.ndim > 0
    return len(tensor) // batch if is_dense and len(tensor) % batch == 0 else 0


def _hypotheses(rows: Sequence[int], lead: int, *, tables: Collection[int]) -> Iterator[list[int]]:
    """Which tensors may be sliced: those with one row for each sample, these without one of them, all that can be, and
    the first ones with another one. `tables`: tensors that are whole in the very first way."""
    first = [k if k == 1 else 0 for k in rows]
    if any(first[i] for i in tables):
        yield [0 if i in tables else k for i, k in enumerate(first)]
    yield first
    for i in [i for i, k in enumerate(first) if k and i != lead][:_MAX_FLIPS]:
        yield [0 if i == j else k for j, k in enumerate(first)]
    several = [i for i, k in enumerate(rows) if k > 1]
    if several:
        yield list(rows)
    for i in several[:_MAX_FLIPS] if len(several) > 1 else ():
        yield [rows[j] if i == j else k for j, k in enumerate(first)]


class _Trial:
    """The trial of one way to slice the arguments of a block, on two samples of its batch."""

    def __init__(
        self, profile: BlockProfile, run: Run, tensors: Sequence[torch.Tensor], rows: Sequence[int], lead: int
    ) -> None:
        self._profile, self._run, self._rows, self._lead = profile, run, rows, lead
        self._two = [torch.cat((t[:k], t[-k:])).detach() if k else t for t, k in zip(tensors, rows, strict=True)]
        self._needed = [t.requires_grad or i == lead for i, t in enumerate(tensors)]

    @torch.no_grad()
    def check(self) -> None:
        """Raises `Untiled` if an output has no batch dimension, or if the samples depend on each other."""
        with _undone(self._profile) as changes, ExitStack() as stack:
            both, others = self._run(self._two)
            changes.check_first_run()
            if changes.has_drawn():
                stack.enter_context(_WithoutDropout())
                changes.reset_random()
                both, others = self._run(self._two)
                if changes.has_drawn():
                    raise Untiled("it draws random numbers besides dropout", is_final=True)
            alone = [self._run([_half(t, k, i) for t, k in zip(self._two, self._rows, strict=True)]) for i in (0, 1)]
            if any(not _are_constants(others, found) for _, found in alone):
                raise Untiled("its outputs have values that differ with the number of samples")
            if any(len(found) != len(both) for found, _ in alone):
                raise Untiled("the number of its outputs differs with the number of samples")
            rows = [self._rows_of_output(*found) for found in zip(both, *(t for t, _ in alone), strict=True)]
            for i in (0, 1):
                mine = [_half(t, k, i) for t, k in zip(both, rows, strict=True)]
                self._compare(
                    alone[i][0],
                    mine,
                    share=_MAX_SHARE,
                    reason="a sample alone has other outputs than beside another one",
                )
                for other in (self._with_nan(1 - i), self._flooded(1 - i)):
                    found = self._run(other)[0]
                    theirs = [_half(t, k, i) for t, k in zip(found, rows, strict=True)]
                    self._compare(theirs, mine, share=0.0, reason="one sample changes the outputs of another")
            self._check_backward()
            changes.check_every_run()

    def _check_backward(self) -> None:
        """Raises if the backward pass makes gradients of inputs from gradients of zero."""
        one = [_half(t, k, 0) for t, k in zip(self._two, self._rows, strict=True)]  # no more memory than a tile's
        inputs = [t.detach().requires_grad_(needed) for t, needed in zip(one, self._needed, strict=True)]
        with ExitStack() as stack:
            for p in self._profile.parameters:
                if p.requires_grad:
                    stack.callback(p.requires_grad_, True)
                    p.requires_grad_(False)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
            outputs = [t for t in self._run(inputs)[0] if t.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.zeros_like(t) for t in outputs])
        if any(t.grad is not None and bool(t.grad.count_nonzero()) for t in inputs):
            raise Untiled("its backward pass adds gradients of its own", is_final=True)

    @staticmethod
    def _rows_of_output(both: torch.Tensor, *alone: torch.Tensor) -> int:
        rows = len(both) // 2 if both.ndim else 0
        if not rows or any(t.shape != (rows, *both.shape[1:]) for t in alone) or len(both) != 2 * rows:
            raise Untiled("one of its outputs has no batch dimension")
        return rows

    def _with_nan(self, sample: int) -> list[torch.Tensor]:
        """The two samples with NaN for one of them."""
        found = []
        for t, k in zip(self._two, self._rows, strict=True):
            if k and t.is_floating_point():
                _half(t := t.clone(), k, sample).fill_(torch.nan)
            found.append(t)
        return found

    def _flooded(self, sample: int) -> list[torch.Tensor]:
        """The two samples with one token of the other sample for all tokens of one."""
        found = list(self._two)
        lead = found[self._lead] = found[self._lead].clone()
        token = lead[1 - sample]
        if token.ndim > 1:
            token = token[len(token) // 2]
        lead[sample] = token
        return found

    def _compare(
        self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, share: float, reason: str
    ) -> None:
        """Raises for `reason` if outputs differ by more than rounding, in more than a share of their rows."""
        module = self._profile.module
        for t, other in zip(found, expected, strict=True):
            if not t.is_floating_point():
                is_same = torch.equal(t, other)
            else:
                is_same = torch.equal(t.isnan(), other.isnan())
                differ = rows_that_differ(t, other, eps=coarsest_eps(module, [t.dtype], t.device))
                is_same = is_same and int(differ.sum()) <= share * differ.numel()
            if not is_same:
                raise Untiled(f"it mixes samples: {reason}")


def _half(tensor: torch.Tensor, rows: int, sample: int) -> torch.Tensor:
    """The part of a tensor of two samples that belongs to one of them."""
    return tensor.narrow(0, rows * sample, rows) if rows else tensor


def _are_constants(others: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether the leaves are plain values, and the same ones."""
    return list(others) == list(found) and all(isinstance(x, _CONSTANTS) for x in others)


class _Changes:
    """What forwards have changed besides their outputs."""

    def __init__(self, profile: BlockProfile) -> None:
        self._profile = profile
        self._first, self._every = SavedState.of(profile.module), SavedState.of(profile.module)
        self._random, self._python = profile.random.get_state(), RandomState.python_state()

    def check_first_run(self) -> None:
        self._check(self._first)

    def check_every_run(self) -> None:
        self._check(self._every)

    def _check(self, state: SavedState) -> None:
        """Raises `Untiled` if the state of modules, or the generators of Python and numpy, have changed."""
        changed = state.keep_changed()
        if len(changed):
            in_buffers = any(is_buffer for *_, is_buffer in changed.values)
            raise Untiled(f"it changes its {'buffers' if in_buffers else 'attributes'}", is_final=True)
        if not RandomState.equal_python_states(self._python, RandomState.python_state()):
            raise Untiled("it draws from the random generators of Python or numpy", is_final=True)

    def has_drawn(self) -> bool:
        before, now = tree_flatten(self._random)[0], tree_flatten(self._profile.random.get_state())[0]
        return not all(np.array_equal(a, b) for a, b in zip(before, now, strict=True))

    def reset_random(self) -> None:
        self._profile.random.set_state(self._random)

    def undo(self) -> None:
        """Restores the state of modules and the random states."""
        self._every.restore()
        self.reset_random()
        RandomState.set_python_state(self._python)


@contextmanager
def _undone(profile: BlockProfile) -> Iterator[_Changes]:
    """Context of forwards that leave the state of modules and the random states as they were."""
    changes = _Changes(profile)
    try:
        yield changes
    finally:
        changes.undo()


class _WithoutDropout(TorchFunctionMode):
    """Mode in which dropout returns its input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            place = 4  # of `dropout_p`
            args, kwargs = (*args[:place], *(0.0 for _ in args[place : place + 1]), *args[place + 1 :]), {**kwargs}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
