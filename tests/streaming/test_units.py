"""Units: which parameters form one, how they lie in memory, and that what is stored comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_zo import ops
from ds_zo.ops import nested, nf4
from ds_zo.streaming.host_store import PAGE, HostStore
from ds_zo.streaming.placement import Placement, evenly_spaced, place_units, plan_units
from ds_zo.streaming.units import Part, PlacedParameter, Unit
from tests.helpers.tiny_models import tiny_model

CPU = torch.device("cpu")
ALIGNMENT_NBYTES = 256
SHAPES = [(3, 5), (256,), (1,), (7, 64), (1000,), ()]


def make_unit(*, dtype: torch.dtype, wire: torch.dtype, split: bool, seed: int = 0) -> tuple[Unit, list[torch.Tensor]]:
    """Two parts, the second frozen and stored as it is, in fresh homes that hold random values."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float32) * 3.0 for shape in SHAPES]
    placed, offset = [], 0
    for i, value in enumerate(values):
        parameter = nn.Parameter(torch.zeros(value.shape, dtype=dtype), requires_grad=i % 3 != 2)
        placed.append(PlacedParameter(f"p{i}", parameter, offset, 0, parameter.requires_grad))
        offset += value.numel()
    parts = [
        Part([p for p in placed if p.trainable], dtype, wire, split=split and wire.itemsize < 4, frozen=False),
        Part([p for p in placed if not p.trainable], dtype, dtype, split=False, frozen=True),
    ]
    unit = Unit("u", nn.Module(), parts, index=0, is_block=True)
    low = torch.empty(unit.low_nbytes, dtype=torch.uint8) if unit.low_nbytes else None
    unit.assign_buffers(HostStore(CPU, pin=False).take(unit.nbytes), low, streamed=True, low_streamed=True)
    unit.store(lambda p: values[int(p.name[1:])])
    return unit, [values[int(p.name[1:])] for p in unit.placed]


def test_nf4_is_stored_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(7, 143, generator=torch.Generator().manual_seed(0))
    planes = []
    for chunk in (1 << 24, 128):
        monkeypatch.setattr(ops, "CHUNK_NUMEL", chunk)
        placed = PlacedParameter("p", nn.Parameter(value), 0, 0, False)
        part = Part([placed], torch.float32, ops.NF4.dtype, split=False, frozen=True)
        unit = Unit("u", nn.Module(), [part], index=0, is_block=True)
        unit.assign_buffers(torch.zeros(unit.nbytes, dtype=torch.uint8), None, streamed=True, low_streamed=False)
        unit.store(lambda p: value)
        planes.append(unit.store_buffer)
    packed, absmax = nf4.quantise(value)
    assert torch.equal(planes[0][: packed.numel()], packed)
    assert torch.equal(planes[0][512 : 512 + 4 * absmax.numel()].view(torch.float32), absmax)
    assert torch.equal(*planes)


@pytest.mark.parametrize(("width", "num_rows"), [(64, 6), (24, 1)])
def test_experts_have_the_nested_scales_of_their_own_matrices(width: int, num_rows: int) -> None:
    """Gate and up of one tensor are two matrices. Matrices that are not of whole groups count as one."""
    values = {"mlp.gate_up_proj": torch.randn(3, 2 * 5, width), "mlp.down_proj": torch.randn(3, width, 5)}
    placed = [PlacedParameter(name, nn.Parameter(v.bfloat16()), 0, 0, False) for name, v in values.items()]
    part = Part(placed, torch.bfloat16, ops.NF4_NESTED.dtype, split=False, frozen=True)
    unit = Unit("u", nn.Module(), [part], index=0, is_block=True)
    unit.assign_buffers(torch.zeros(unit.nbytes, dtype=torch.uint8), None, streamed=True, low_streamed=False)
    unit.store(lambda p: values[p.name])
    [planes] = unit.planes(unit.store_buffer)
    assert planes.scales is not None
    out = torch.full((part.numel,), -1.0, dtype=torch.bfloat16)
    part.decode_(out, planes)
    for p, rows in zip(placed, (num_rows, 3 if width == 64 else 1), strict=True):
        found = [nested.quantise(matrix) for matrix in p.parameter.detach().view(rows, -1)]
        assert torch.equal(part.stored(p, planes.storage).view(torch.uint8), torch.cat([each for each, _ in found]))
        assert torch.equal(planes.scales[part.scales_of(p)], torch.cat([row for _, row in found]))
        value = nested.NestedValues(*map(torch.cat, zip(*((a, r[None]) for a, r in found), strict=True)), p.shape)
        assert torch.equal(p.view(out), value.values().bfloat16())
        memory = torch.empty(part.decoded_nbytes(p), dtype=torch.uint8)
        assert torch.equal(part.decode_one_(memory, planes, p), p.view(out))


def decoded(unit: Unit) -> list[torch.Tensor]:
    """Every parameter's stored value in float32, in `placed` order."""
    found = []
    for part, planes in zip(unit.parts, unit.planes(unit.store_buffer, unit.low_buffer), strict=True):
        plane = ops.decode(planes.storage, planes.low, planes.scales)
        found += [placed.view(plane) for placed in part.placed]
    return found


BF12 = torch.uint8
HALF_ULP = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float8_e4m3fn: 2.0**-4,
    BF12: 2.0**-9,
}
"""Relative, of the widest step."""
WIRES = list(HALF_ULP)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_stored_comes_back(dtype: torch.dtype, wire: torch.dtype, split: bool) -> None:
    """To half a step of the format; with low planes to 2**-16 of that. Frozen ones to their own dtype."""
    unit, values = make_unit(dtype=dtype, wire=wire, split=split)
    steps = HALF_ULP[wire] * (2.0**-15 if unit.parts[0].split else 2.0)
    for placed, value, found in zip(unit.placed, values, decoded(unit), strict=True):
        if not placed.trainable:
            assert torch.equal(found, value.to(dtype).float())
            continue
        smallest = float(value.abs().max()) * 2.0**-16  # near zero the step of fp8 and fp16 no longer shrinks
        torch.testing.assert_close(found, value, rtol=max(steps, 2.0**-23), atol=max(steps, 2.0**-23) * smallest * 64)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_planes_are_aligned_and_disjoint(wire: torch.dtype) -> None:
    unit, _ = make_unit(dtype=torch.float32, wire=wire, split=True)
    assert unit.store_buffer.data_ptr() % PAGE == 0
    taken = torch.zeros(unit.nbytes, dtype=torch.int32)
    for part, planes in zip(unit.parts, unit.planes(unit.store_buffer), strict=True):
        for placed in part.placed:
            view = placed.view(planes.storage)
            assert view.shape == placed.parameter.shape and view.is_contiguous()
            assert view.data_ptr() % ALIGNMENT_NBYTES == 0
            at = view.data_ptr() - unit.store_buffer.data_ptr()
            taken[at : at + view.numel() * part.wire.itemsize] += 1
        if planes.scales is not None:
            at = planes.scales.data_ptr() - unit.store_buffer.data_ptr()
            taken[at : at + planes.scales.numel() * planes.scales.itemsize] += 1
    assert int(taken.max()) == 1


def test_scratch_has_a_plane_for_each_trainable_part_only() -> None:
    unit, values = make_unit(dtype=torch.bfloat16, wire=torch.float8_e4m3fn, split=False)
    scratch = torch.zeros(unit.scratch_nbytes, dtype=torch.uint8)
    outs = unit.outs(scratch)
    assert [out is None for out in outs] == [False, True]
    views = unit.views(unit.planes(unit.store_buffer), outs)
    for placed, view, value in zip(unit.placed, views, values, strict=True):
        assert view.dtype is torch.bfloat16 and view.shape == placed.parameter.shape
        # Of the buffer it lies in: how an allocator aligns that buffer is the allocator's own (64 bytes on the CPU).
        buffer = scratch if placed.trainable else unit.store_buffer
        assert (view.data_ptr() - buffer.data_ptr()) % ALIGNMENT_NBYTES == 0
        if not placed.trainable:
            assert torch.equal(view, value.bfloat16())


def test_a_parameter_at_home_is_a_view_or_a_placeholder() -> None:
    same, values = make_unit(dtype=torch.bfloat16, wire=torch.bfloat16, split=True)
    same.bind_stored()
    for placed, value in zip(same.placed, values, strict=True):
        torch.testing.assert_close(placed.parameter.data, value.bfloat16(), rtol=2.0**-7, atol=0.0)
        inside = placed.parameter.data_ptr() - same.store_buffer.data_ptr()
        assert 0 <= inside < same.nbytes
    other, _ = make_unit(dtype=torch.bfloat16, wire=torch.float8_e4m3fn, split=True)
    flags = [p.parameter.requires_grad for p in other.placed]
    other.bind_stored()
    for placed, flag in zip(other.placed, flags, strict=True):
        p = placed.parameter
        assert p.dtype is torch.bfloat16 and p.requires_grad is flag
        if placed.trainable:
            assert p.untyped_storage().nbytes() <= 2, "a placeholder holds no memory"


def test_one_parameter_can_be_stored_alone() -> None:
    unit, values = make_unit(dtype=torch.bfloat16, wire=torch.float8_e4m3fn, split=True)
    target = list(unit.placed)[2]
    unit.store_one(target, torch.full(target.parameter.shape, 40.0))
    for placed, value, found in zip(unit.placed, values, decoded(unit), strict=True):
        expected = torch.full_like(value, 40.0) if placed is target else value
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_a_value_of_another_shape_is_refused() -> None:
    unit, _ = make_unit(dtype=torch.float32, wire=torch.float32, split=False)
    with pytest.raises(ValueError, match=r"p0 has shape \(3, 5\), got \(5, 3\)"):
        unit.store_one(next(iter(unit.placed)), torch.zeros(5, 3))


def planned(model: nn.Module, **options: object) -> Placement:
    groups = [{"params": list(model.parameters())}]
    return plan_units(model, groups, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [True, False])
def test_offsets_count_every_parameter_once_in_the_models_order(tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    model.model.layers[1].requires_grad_(False)
    placement = planned(model)
    offsets, offset = {}, 0
    for name, p in model.named_parameters():
        offsets[name] = offset
        offset += p.numel()
    assert {p.name: p.offset for unit in placement.units for p in unit.placed} == offsets
    assert placement.numel == offset


def test_a_tied_weight_is_one_unit_that_two_modules_enter() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    placement = planned(model)
    (unit,) = (u for u in placement.leaf_units if any(p.name == "model.embed_tokens.weight" for p in u.placed))
    assert placement.entered_by[model.model.embed_tokens] == placement.entered_by[model.lm_head] == [unit]


def test_adapters_in_a_frozen_block_stay_on_the_device() -> None:
    model = tiny_model("llama")
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.requires_grad_(True)
    placement = planned(model)
    resident = {p.name for unit in (*placement.leaf_units, *placement.pass_long) for p in unit.placed}
    adapters = {n for n, p in model.named_parameters() if p.requires_grad}
    assert adapters <= resident
    assert all(not p.trainable for unit in placement.blocks for p in unit.placed)
    for layer, block in zip(model.model.layers, placement.blocks, strict=True):
        beside = placement.nested_at[id(layer.self_attn.q_proj)]
        (adapter,) = placement.entered_by[layer.self_attn.q_proj]
        assert beside >= block.scratch_nbytes and beside + adapter.scratch_nbytes <= placement.scratch_nbytes


def test_a_parameter_of_a_module_with_children_is_pass_long() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 3)

    placement = planned(Root())
    assert [[p.name for p in u.placed] for u in placement.pass_long] == [["scale"]]
    assert [[p.name for p in u.placed] for u in placement.leaf_units] == [["inner.weight", "inner.bias"]]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 24])
def test_residents_are_spread_evenly(num_blocks: int) -> None:
    for num_resident in range(num_blocks + 1):
        chosen = sorted(evenly_spaced(num_blocks, num_resident))
        assert len(chosen) == num_resident and all(0 <= i < num_blocks for i in chosen)
        runs = [b - a for a, b in zip([-1, *chosen], [*chosen, num_blocks], strict=True)]
        assert not num_resident or max(runs) <= -(-num_blocks // num_resident) + 1


def test_settling_keeps_every_value_and_frees_the_originals() -> None:
    model = tiny_model("opt")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    placement = planned(model)
    store = HostStore(CPU, pin=True)
    stays = {id(placement.blocks[1])}
    place_units(
        placement,
        store,
        CPU,
        resident=lambda unit: id(unit) in stays,
        read=lambda placed: placed.parameter.data,
    )
    assert [u.streamed for u in placement.blocks] == [True, False, True]
    assert store.nbytes == placement.blocks[0].nbytes + placement.blocks[2].nbytes
    for name, p in model.named_parameters():
        assert torch.equal(p.data, before[name])
        home = next(u.store_buffer for u in placement.units for q in u.placed if q.parameter is p)
        assert 0 <= p.data_ptr() - home.data_ptr() < home.numel()


def test_only_weights_that_checkpoints_quantise_are_stored_in_fewer_bits() -> None:
    """Linear layers, GPT-2's too, and stacks of experts; no embedding, convolution or single parameter."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.positions, self.mixed = nn.Linear(64, 64), nn.Embedding(4, 64), nn.Conv1d(8, 8, 4)
            self.as_in_gpt2 = Conv1D(64, 64)
            self.A_log, self.decay = nn.Parameter(torch.ones(64, 16)), nn.Parameter(torch.ones(1, 1, 64))
            self.experts = nn.Parameter(torch.ones(4, 64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # else its submodules would be the blocks
            return x

    model = nn.ModuleDict({"b": nn.ModuleList([Block(), Block()])}).requires_grad_(False)
    units = plan_units(model, [], block_paths="b", frozen_wire=nf4.NF4.dtype).blocks
    narrow = {placed.name for unit in units for part in unit.parts if not part.direct for placed in part.placed}
    assert narrow == {f"b.{i}.{name}" for i in (0, 1) for name in ("linear.weight", "as_in_gpt2.weight", "experts")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rank1_noise_of_a_unit_is_an_outer_product_in_each_matrix(dtype: torch.dtype) -> None:
    shapes, placed, offset = [(7, 40), (30,), (2, 3, 8), (), (4, 0)], [], 0
    for i, shape in enumerate(shapes):
        placed.append(PlacedParameter(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype)), offset, 0, True))
        offset += placed[-1].numel
    part = Part(placed, dtype, dtype, split=False, frozen=False)
    table, noise = part.table(CPU), ops.Noise(5, step=3, direction=4, distribution="rank1", rounding="nearest")
    factors, out = torch.empty(1, table.factors.numel, dtype=dtype), torch.zeros(part.numel)
    ops.factors(table, noise=noise, out=factors)
    planes = ops.Planes(torch.zeros(part.numel, dtype=dtype))
    ops.replay_perturb(planes, table=table, noise=noise, copies=ops.Copies(out, scale=1.0))
    views = table.factors.views(factors.float())
    assert views.keys() == {placed[0].offset, placed[2].offset}
    for p in placed:
        u, v = views.get(p.offset, (torch.zeros(1, p.numel), torch.ones(1, 1)))
        assert torch.equal(p.view(out), torch.outer(u[0], v[0]).view(p.shape))
