"""Which parameters LSP projects, which it trains whole, which not at all, and what is kept of each.

[Note: what trains how] Weights of `nn.Linear` and of GPT-2's `Conv1D` are projected where d x d is smaller than they
are. Embeddings and head follow `edge`: projected too, frozen, or whole. Everything else trains whole: matrices no
larger than d x d, norms, biases, convolutions. With `offload_optimizer` on the CPU, Adam of every matrix runs there,
projected or whole; vectors are too small for a trip and stay on the device.

[Note: size of an update] Where D's entries are independent, P D Q^T has ||P|| ||Q|| / sqrt(m n) of their root mean
square: 1 for projectors as they are drawn, about d / sqrt(m n) for fitted ones. Updates are divided by it, so that
every shape learns at AdamW's rate. They are made with a Q of their own, which takes no more launches, and leaves
gradients, moments and weight decay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_zo.config import LSPParams
from ds_zo.optim import OFFSET_ALIGNMENT
from ds_zo.projectors import ProjectorRows, SparseProjector, choose_dims
from ds_zo.streaming.blocks import find_blocks, reached_elsewhere
from ds_zo.streaming.units import Unit

_MAX_PARAMETERS = 2**16
"""Random streams that one draw of all projectors takes, for two sides."""


@dataclass
class Subspace:
    """A matrix's projectors, and how often they have been drawn."""

    P: SparseProjector
    Q: SparseProjector
    num_draws: int = 1
    Q_update: ProjectorRows = field(init=False)
    """What updates are made with in the place of Q ([Note: size of an update])."""

    def __post_init__(self) -> None:
        self.Q_update = ProjectorRows(self.Q.indices, self.Q.values.clone(), self.Q.dim)
        self.refresh_()

    @torch.no_grad()
    def refresh_(self) -> None:
        """After P or Q have taken other values. In place: launches are prepared with its address."""
        P, Q = self.P.values, self.Q.values
        norms = torch.linalg.vector_norm(P) * torch.linalg.vector_norm(Q)
        self.Q_update.values.copy_(Q * (math.sqrt(self.P.num_rows * self.Q.num_rows) / norms))

    @property
    def num_bytes(self) -> int:
        return self.P.num_bytes + self.Q.num_bytes + self.Q_update.values.nbytes

    def state_dict(self) -> dict[str, Any]:
        return {"P": self.P.state_dict(), "Q": self.Q.state_dict(), "num_draws": self.num_draws}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Subspace:
        P, Q = (SparseProjector.from_state(state[key], device) for key in ("P", "Q"))
        return cls(P, Q, int(state["num_draws"]))


@dataclass
class Candidate:
    """Projectors that are fitted beside the present ones ([Note: calibration gradients])."""

    subspace: Subspace
    num_batches: int = 0
    """Gradients that they have been fitted to."""
    total: torch.Tensor | None = None
    """P^T T Q, on the host: T is the sum of these gradients, as far as the projectors kept it."""
    gain: float | None = None
    """Mean square of P^T G Q relative to that of the present projectors, for a G that neither was fitted to. None: the
    candidate has not been tested."""

    def state_dict(self) -> dict[str, Any]:
        own = {"num_batches": self.num_batches, "total": self.total, "gain": self.gain}
        return {**self.subspace.state_dict(), **own}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Candidate | None:
        """None: a state without sums, which cannot be continued."""
        if "num_batches" not in state:
            return None
        subspace = Subspace.from_state(state, device)
        return cls(subspace, int(state["num_batches"]), state["total"], state["gain"])


@dataclass(eq=False)
class MatrixState:
    """What is kept of a parameter besides itself and Adam's moments."""

    name: str
    parameter: nn.Parameter
    index: int
    """Among the model's parameters; chooses its projectors' random streams."""
    offset: int
    """Of its rounding bits."""
    subspace: Subspace | None = None
    candidate: Candidate | None = None
    """Projectors that may take the place of the present ones."""
    total: torch.Tensor | None = None
    """Where the transpose of P^T G Q is summed; a whole parameter's gradients add up in its own `.grad`."""
    has_total: bool = False
    """A gradient has come since the last step."""
    comes_and_goes: bool = False
    """Its weights are on the device while it is visited ([Note: settled where it is visited])."""
    kept: torch.Tensor | None = None
    """Then: a whole parameter's gradient so far, between visits."""
    is_fitted: bool = False
    """Its first calibration is over (or its projectors are not to be fitted)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what Adam sees: of a projected matrix the transpose of P^T G Q, as the products read and write it."""
        if self.subspace is None:
            return tuple(self.parameter.shape)
        return self.subspace.Q.dim, self.subspace.P.dim

    @property
    def whole_gradient(self) -> torch.Tensor | None:
        return self.parameter.grad if self.kept is None else self.kept

    @property
    def gradient(self) -> torch.Tensor:
        found = self.whole_gradient if self.total is None else self.total
        assert found is not None
        return found

    def put_back(self, grad: torch.Tensor, *, device: torch.device) -> None:
        """A whole parameter's gradient is still to be used."""
        grad = grad.to(device, self.parameter.dtype)
        if self.comes_and_goes:
            self.kept = grad
        else:
            self.parameter.grad = grad

    def drop_gradient(self) -> None:
        self.parameter.grad = self.kept = None

    def forget(self) -> None:
        self.has_total = False
        self.drop_gradient()


@dataclass(eq=False)
class Group:
    """Parameters that travel together: a block's, or those of one module outside of blocks."""

    name: str
    is_block: bool
    slots: list[MatrixState] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    """Whose forward is the first to see them."""


def find_slots(module: nn.Module, settings: LSPParams, *, device: torch.device) -> list[MatrixState]:
    """One for each parameter that is trained, tied ones once; `edge: freeze` freezes here."""
    edge, projectable = _edge_parameters(module), _matrix_parameters(module)
    slots: list[MatrixState] = []
    offset = 0
    for index, (name, p) in enumerate(module.named_parameters()):
        if id(p) in edge and settings.edge == "freeze":
            p.requires_grad_(False)
        elif p.requires_grad and p.is_floating_point() and p.numel():
            projects = p.ndim == 2 and (settings.edge == "lsp" if id(p) in edge else id(p) in projectable)
            subspace = first_projectors(p, index, settings, device=device) if projects else None
            slots.append(MatrixState(name, p, index, offset, subspace, is_fitted=settings.projector != "learned"))
        offset += -(-p.numel() // OFFSET_ALIGNMENT) * OFFSET_ALIGNMENT
    return slots


def first_projectors(p: nn.Parameter, index: int, settings: LSPParams, *, device: torch.device) -> Subspace | None:
    """None: the matrix trains whole."""
    num_rows, num_cols = p.shape
    if settings.projector == "none" or choose_dims(num_rows, num_cols, settings.subspace_dim) is None:
        return None
    return draw(p, index, settings, num_draws=1, device=device)


def draw(p: nn.Parameter, index: int, settings: LSPParams, *, num_draws: int, device: torch.device) -> Subspace:
    """Fresh positions and values, a pure function of the seed, the parameter and how often it was drawn before."""
    rows, cols = p.shape
    dims = choose_dims(rows, cols, settings.subspace_dim)
    assert dims is not None
    made = [
        SparseProjector.draw(
            num_rows,
            dim,
            min(settings.nonzeros_per_row, dim),
            seed=settings.seed,
            stream=((num_draws - 1) * _MAX_PARAMETERS + index) * 2 + side,
            device=device,
        )
        for side, (num_rows, dim) in enumerate(zip(p.shape, dims, strict=True))
    ]
    return Subspace(made[0], made[1], num_draws)


def group_slots(module: nn.Module, slots: list[MatrixState], blocks: str | list[str] | None) -> list[Group]:
    """Groups in the order that a forward pass meets them, as far as the model's own order tells."""
    block_of = _only_blocks(module, find_blocks(module, blocks))
    groups: dict[str, Group] = {}
    for slot in slots:
        found = block_of.get(id(slot.parameter))
        if found is None:
            owner = slot.name.rpartition(".")[0]
            group = groups.setdefault(owner, Group(owner, is_block=False))
            group.modules += [m for m in owners(module, slot.parameter) if m not in group.modules]
        else:
            group = groups.setdefault(found[0], Group(found[0], is_block=True, modules=[found[1]]))
        group.slots.append(slot)
    return list(groups.values())


def _only_blocks(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[int, tuple[str, nn.Module]]:
    """By parameter: the block that has it, unless somebody else does too and may use it first."""
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    inside -= reached_elsewhere(module, blocks.values())
    outside = {id(p) for m in module.modules() if id(m) not in inside for p in m._parameters.values()}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, block in blocks.items():
        for p in block.parameters():
            _, first = found.setdefault(id(p), (name, block))
            if first is not block:
                outside.add(id(p))
    return {key: value for key, value in found.items() if key not in outside}


def apart_from_visitors(groups: list[Group], unit_of: Mapping[int, Unit]) -> list[Group]:
    """Parameters in blocks that come and go are told so; others of these blocks, which stay on the device because they
    are used elsewhere too, make groups of their own."""
    found = []
    for group in groups:
        visitors = [slot for slot in group.slots if id(slot.parameter) in unit_of]
        for slot in visitors:
            slot.comes_and_goes = True
        if visitors:
            found.append(Group(group.name, True, visitors, group.modules))
        staying = [slot for slot in group.slots if not slot.comes_and_goes]
        if staying:
            name = f"{group.name} (shared)" if visitors else group.name
            found.append(Group(name, False, staying, group.modules))
    return found


def owners(module: nn.Module, p: nn.Parameter) -> Iterator[nn.Module]:
    return (m for m in module.modules() if any(own is p for own in m._parameters.values()))


def _edge_parameters(module: nn.Module) -> set[int]:
    """Embeddings, and the layer that turns hidden states into vocabulary."""
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    found = {id(table) for table in tables}
    head = None
    if callable(getattr(module, "get_output_embeddings", None)):
        head = module.get_output_embeddings()  # type: ignore[operator]
    if head is not None and isinstance(getattr(head, "weight", None), nn.Parameter):
        found.add(id(head.weight))
    in_blocks = {id(p) for block in find_blocks(module).values() for p in block.parameters()}
    named = _input_table(module)  # else a classifier of two labels is taken for the head of BERT's two token types
    vocabularies = {table.shape[0] for table in (tables if named is None else [named])}
    for m in module.modules():
        if isinstance(m, nn.Linear) and id(m.weight) not in in_blocks and m.out_features in vocabularies:
            found.add(id(m.weight))
    return found


def _input_table(module: nn.Module) -> torch.Tensor | None:
    """The vocabulary's embeddings, where the model says which they are."""
    table = None
    if callable(getattr(module, "get_input_embeddings", None)):
        with suppress(NotImplementedError, AttributeError):
            table = getattr(module.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    return table if isinstance(table, torch.Tensor) else None


def _matrix_parameters(module: nn.Module) -> set[int]:
    """`Conv1D` by its name: transformers need not be installed."""
    kinds = [m for m in module.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    return {id(m.weight) for m in kinds if isinstance(m.weight, nn.Parameter)}
