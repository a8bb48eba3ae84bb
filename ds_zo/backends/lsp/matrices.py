"""Which parameters LSP projects, trains whole or freezes, and the state that it keeps of each.

[Note: projected and whole parameters] Weights of `nn.Linear` and of GPT-2's `Conv1D` are projected if d x d is smaller
than the weight. Embeddings and the language-model head follow the setting `edge`: projected, frozen or whole. All other
parameters train whole: matrices no larger than d x d, norms, biases, convolutions. With `offload_optimizer` on the CPU,
Adam of every matrix runs there, projected or whole. Vectors are too small to be worth a transfer, so their Adam runs on
the device.

[Note: size of an update] Let the entries of D be independent. Then the root mean square of P D Q^T is that of D times
||P|| ||Q|| / sqrt(m n). This factor is 1 for drawn projectors and about d / sqrt(m n) for fitted ones. Updates are
divided by it, so that a matrix of any shape learns at AdamW's learning rate. The division is in the values of
`Q_update`: it takes no further kernel and leaves gradients, moments and weight decay as they are.
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
from ds_zo.streaming.placement import is_linear
from ds_zo.streaming.units import Unit

_MAX_PARAMETERS = 2**16
"""Number of parameters that one draw of projectors reserves random streams for, two streams each."""


@dataclass
class Subspace:
    """A matrix's projectors P and Q, and how often they have been drawn."""

    P: SparseProjector
    Q: SparseProjector
    num_draws: int = 1
    Q_update: ProjectorRows = field(init=False)
    """Q with scaled values, which updates use in place of Q ([Note: size of an update])."""

    def __post_init__(self) -> None:
        self.Q_update = ProjectorRows(self.Q.indices, self.Q.values.clone(), self.Q.dim)
        self.refresh_()

    @torch.no_grad()
    def refresh_(self) -> None:
        """Scales `Q_update` again after P or Q has changed, in place: prepared kernel launches hold its address."""
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
    """Projectors that are being fitted and may replace the present ones ([Note: calibration gradients])."""

    subspace: Subspace
    num_batches: int = 0
    """Number of gradients that the projectors have been fitted to."""
    total: torch.Tensor | None = None
    """P^T T Q, on the host, where T is the sum of these gradients as far as the projectors captured it. None before the
    first fit."""
    gain: float | None = None
    """Mean square of P^T G Q divided by that of the present projectors, for a G that neither was fitted to. None: the
    candidate has not been tested."""

    def state_dict(self) -> dict[str, Any]:
        own = {"num_batches": self.num_batches, "total": self.total, "gain": self.gain}
        return {**self.subspace.state_dict(), **own}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Candidate | None:
        """None for a state without a sum, as older versions saved it: the fit cannot be continued."""
        if "num_batches" not in state:
            return None
        subspace = Subspace.from_state(state, device)
        return cls(subspace, int(state["num_batches"]), state["total"], state["gain"])


@dataclass(eq=False)
class MatrixState:
    """What LSP keeps of one trained parameter, a matrix or a vector, besides Adam's moments."""

    name: str
    parameter: nn.Parameter
    index: int
    """Position among the model's parameters. It selects the random streams of the projectors."""
    offset: int
    """First element of the parameter in the stream of rounding bits (`Dither.offset`)."""
    subspace: Subspace | None = None
    """None: the parameter trains whole."""
    candidate: Candidate | None = None
    """Projectors that may replace the present ones; None outside a calibration."""
    total: torch.Tensor | None = None
    """Sum of the transposes of P^T G Q since the last step. None for a whole parameter, which sums in `.grad`."""
    has_total: bool = False
    """A gradient has come since the last step, so that `total` or `.grad` is valid."""
    is_streamed: bool = False
    """The parameter's block is streamed: its weights are on the device in its forward and backward only."""
    held_gradient: torch.Tensor | None = None
    """The gradient of a streamed whole parameter while its block is not on the device; otherwise None."""
    gradient_left: tuple[int, int] | None = None
    """Address and version counter of `.grad` when its hook had run. None: this object has changed `.grad` since."""
    is_fitted: bool = False
    """The first calibration is over, or projectors are not fitted at all."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the gradient that Adam gets. A projected gradient is stored as the transpose of P^T G Q, as the
        products read and write it."""
        if self.subspace is None:
            return tuple(self.parameter.shape)
        return self.subspace.Q.dim, self.subspace.P.dim

    @property
    def whole_gradient(self) -> torch.Tensor | None:
        """The gradient of a whole parameter; None before it has come."""
        return self.parameter.grad if self.held_gradient is None else self.held_gradient

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient that Adam gets: the projected sum, or the whole gradient."""
        found = self.whole_gradient if self.total is None else self.total
        assert found is not None
        return found

    def new_gradient(self) -> torch.Tensor:
        """Contiguous zeros of the parameter's shape, for a rank that has no gradient."""
        return torch.zeros_like(self.parameter, memory_format=torch.contiguous_format)

    def restore_gradient(self, grad: torch.Tensor, *, device: torch.device) -> None:
        """Sets a whole parameter's gradient again, after an undone update or from a checkpoint."""
        self.gradient_left = None
        grad = grad.to(device, self.parameter.dtype)
        if self.is_streamed:
            self.held_gradient = grad
        else:
            self.parameter.grad = grad

    def drop_gradient(self) -> None:
        self.parameter.grad = self.held_gradient = self.gradient_left = None

    def leave_gradient(self) -> None:
        """Called when the hook of a whole parameter has run. See `has_changed_gradient`."""
        self.gradient_left = _identity(self.parameter.grad)

    @property
    def has_changed_gradient(self) -> bool:
        """Whether a script has changed or replaced the gradient of a whole parameter."""
        grad = self.parameter.grad
        return self.gradient_left is not None and grad is not None and _identity(grad) != self.gradient_left

    def clear(self) -> None:
        """Drops the gradients since the last step."""
        self.has_total = False
        self.drop_gradient()


def _identity(grad: torch.Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (grad.data_ptr(), grad._version)


@dataclass(eq=False)
class MatrixGroup:
    """Parameters that are updated together: those of a block, or those of one module outside the blocks."""

    name: str
    is_block: bool
    matrices: list[MatrixState] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    """The modules whose forward is the first to use the parameters."""


def find_matrices(module: nn.Module, settings: LSPParams, *, device: torch.device) -> list[MatrixState]:
    """Makes a state for each trained parameter; a tied parameter has one. `edge: freeze` freezes parameters here."""
    edge, projectable = _embedding_and_head_parameters(module), _matrix_parameters(module)
    matrices: list[MatrixState] = []
    offset = 0
    for index, (name, p) in enumerate(module.named_parameters()):
        if id(p) in edge and settings.edge == "freeze":
            p.requires_grad_(False)
        elif p.requires_grad and p.is_floating_point() and p.numel():
            projects = p.ndim == 2 and (settings.edge == "lsp" if id(p) in edge else id(p) in projectable)
            subspace = first_projectors(p, index, settings, device=device) if projects else None
            matrices.append(MatrixState(name, p, index, offset, subspace, is_fitted=settings.projector != "learned"))
        offset += -(-p.numel() // OFFSET_ALIGNMENT) * OFFSET_ALIGNMENT
    return matrices


def first_projectors(p: nn.Parameter, index: int, settings: LSPParams, *, device: torch.device) -> Subspace | None:
    """The projectors that a matrix starts with; None: the matrix trains whole."""
    num_rows, num_cols = p.shape
    if settings.projector == "none" or choose_dims(num_rows, num_cols, settings.subspace_dim) is None:
        return None
    return draw(p, index, settings, num_draws=1, device=device)


def draw(p: nn.Parameter, index: int, settings: LSPParams, *, num_draws: int, device: torch.device) -> Subspace:
    """Draws new projectors: a pure function of the seed, the parameter's index and the number of the draw (from 1)."""
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


def group_matrices(module: nn.Module, matrices: list[MatrixState], blocks: str | list[str] | None) -> list[MatrixGroup]:
    """Groups parameters by block or module. The order is that of the module tree, which is usually the forward's."""
    block_of = _block_of_parameters(module, find_blocks(module, blocks))
    groups: dict[str, MatrixGroup] = {}
    for matrix in matrices:
        found = block_of.get(id(matrix.parameter))
        if found is None:
            owner = matrix.name.rpartition(".")[0]
            group = groups.setdefault(owner, MatrixGroup(owner, is_block=False))
            group.modules += [m for m in owners(module, matrix.parameter) if m not in group.modules]
        else:
            group = groups.setdefault(found[0], MatrixGroup(found[0], is_block=True, modules=[found[1]]))
        group.matrices.append(matrix)
    return list(groups.values())


def _block_of_parameters(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[int, tuple[str, nn.Module]]:
    """Name and module of the block that holds a parameter, by the parameter's id.

    Parameters that are also reachable outside their block are left out, because they may be used before its forward."""
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


def split_streamed(groups: list[MatrixGroup], unit_of: Mapping[int, Unit]) -> list[MatrixGroup]:
    """Marks the parameters of streamed blocks, and splits groups so that each is either streamed or resident.

    A block's parameters that are used outside the block too stay on the device and get a group of their own."""
    found = []
    for group in groups:
        streamed = [matrix for matrix in group.matrices if id(matrix.parameter) in unit_of]
        for matrix in streamed:
            matrix.is_streamed = True
        if streamed:
            found.append(MatrixGroup(group.name, True, streamed, group.modules))
        resident = [matrix for matrix in group.matrices if not matrix.is_streamed]
        if resident:
            name = f"{group.name} (shared)" if streamed else group.name
            found.append(MatrixGroup(name, False, resident, group.modules))
    return found


def owners(module: nn.Module, p: nn.Parameter) -> Iterator[nn.Module]:
    """The submodules that have `p` as a direct parameter."""
    return (m for m in module.modules() if any(own is p for own in m._parameters.values()))


def _embedding_and_head_parameters(module: nn.Module) -> set[int]:
    """Ids of the embeddings' weights and of the layers that map hidden states to a vocabulary."""
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    found = {id(table) for table in tables}
    head = None
    if callable(getattr(module, "get_output_embeddings", None)):
        head = module.get_output_embeddings()  # type: ignore[operator]
    if head is not None and isinstance(getattr(head, "weight", None), nn.Parameter):
        found.add(id(head.weight))
    in_blocks = {id(p) for block in find_blocks(module).values() for p in block.parameters()}
    # All tables would be too many: BERT's two token types would make a classifier of two labels a head.
    input_table = _input_table(module)
    vocabularies = {table.shape[0] for table in (tables if input_table is None else [input_table])}
    for m in module.modules():
        if isinstance(m, nn.Linear) and id(m.weight) not in in_blocks and m.out_features in vocabularies:
            found.add(id(m.weight))
    return found


def _input_table(module: nn.Module) -> torch.Tensor | None:
    """The token embeddings, or None if the model does not say which they are."""
    table = None
    if callable(getattr(module, "get_input_embeddings", None)):
        with suppress(NotImplementedError, AttributeError):
            table = getattr(module.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    return table if isinstance(table, torch.Tensor) else None


def _matrix_parameters(module: nn.Module) -> set[int]:
    """Ids of the weights of linear layers."""
    return {id(m.weight) for m in module.modules() if is_linear(m) and isinstance(m.weight, nn.Parameter)}
