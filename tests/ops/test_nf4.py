"""NF4: packed bytes, `absmax` and values have the bits of bitsandbytes, with nested scales and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ds_zo import ops
from ds_zo.ops import nested, nf4
from ds_zo.streaming.quantised_checkpoints import read_quantised

VECTORS = Path(__file__).with_name("nf4_vectors.safetensors")


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype is theirs.dtype
    assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def assert_equal_to(vectors: dict[str, torch.Tensor]) -> None:
    cases = sorted({name.partition(".")[0] for name in vectors})
    assert len(cases) == 18
    for case in cases:
        of = {name.removeprefix(f"{case}."): value for name, value in vectors.items() if name.startswith(f"{case}.")}
        packed, absmax = nf4.quantise(of["values"])
        assert_same_bits(packed, of["weight"])
        if case.endswith("single"):
            assert_same_bits(absmax, of["weight.absmax"])
        stored = read_quantised(of.__getitem__, "weight")
        assert stored.shape == of["values"].shape
        out = torch.empty(of["values"].numel(), dtype=of["values"].dtype)
        ops.dequantise_nf4_(out, stored.packed, stored.absmax.view(-1))
        assert_same_bits(out, of["dequantised"])
        if case.endswith("double"):
            assert_same_bits(nested.quantise(of["values"])[1], stored.absmax)
            assert_same_bits(stored.values().to(out.dtype), out)


def test_bits_are_those_that_bitsandbytes_wrote() -> None:
    assert_equal_to(load_file(VECTORS))


@pytest.mark.parametrize(
    ("field", "replaced", "line"),
    [
        ("weight", lambda t: t[:-1], "weight has 255 packed bytes .* needs 256"),
        ("weight.absmax", lambda t: t[:-1], "7 scales"),
        ("weight.quant_state.bitsandbytes__nf4", lambda t: t[:-1], "quant_state.* must be JSON"),
        ("weight.quant_map", lambda t: 2 * t, r"quant_map must be the code book of NF4, got \[-2\.0, .*: quantise"),
        (
            "weight.absmax",
            None,
            r"weight.absmax must be among the parts of NF4 weight weight: the checkpoint is damaged",
        ),
        ("weight.nested_absmax", None, "nested_absmax must be among the parts"),
        ("weight.nested_absmax", lambda t: t[:0], r"nested_absmax must have a scale for each 256 of 8 scales, got 0"),
        ("weight.nested_quant_map", lambda t: 2 * t, r"nested_quant_map must be the code book of double quantisation"),
    ],
)
def test_a_truncated_checkpoint_is_refused(
    field: str, replaced: Callable[[torch.Tensor], torch.Tensor] | None, line: str
) -> None:
    """`replaced` None: the tensor is missing."""
    of = {name.removeprefix("whole-float32-double."): value for name, value in load_file(VECTORS).items()}
    value = of.pop(field)
    if replaced is not None:
        of[field] = replaced(value)
    with pytest.raises(ValueError, match=line):
        read_quantised(of.__getitem__, "weight")


def test_bits_are_those_of_the_installed_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")
    from tests.ops.write_nf4_vectors import vectors

    assert_equal_to(vectors())


def test_values_beyond_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    packed, absmax = nf4.quantise(values)
    outs = [torch.empty(1000), torch.empty(1000)]
    for out, chunk in zip(outs, (1 << 20, 128), strict=True):
        monkeypatch.setattr(nf4, "_CHUNK_NUMEL", chunk)
        ops.dequantise_nf4_(out, packed, absmax)
    assert torch.equal(*outs)
    assert (values - outs[0]).abs().max() < 0.16 * absmax.max()


def test_planes_of_the_wrong_size_are_refused() -> None:
    packed, absmax = nf4.quantise(torch.ones(128))
    with pytest.raises(ValueError, match=r"scales must be .* with 2 elements, got .*\(1,\)"):
        ops.dequantise_nf4_(torch.empty(128), packed, absmax[:1])
    packed, scales = nested.quantise(torch.ones(128))
    with pytest.raises(ValueError, match=r"scales must be .*uint8 with 24 elements, got .*\(12,\)"):
        ops.dequantise_nf4_(torch.empty(2, 64), packed, scales)


def test_nested_scales_follow_their_formula() -> None:
    """Sizes around groups of 64 and blocks of 256 of them. The nearest of 256 numbers, by trying them all."""
    assert len(nested.CODE) == 256 and bool((nested.CODE[1:] > nested.CODE[:-1]).all())
    for numel in (1, 63, 65, 700, 64 * 256, 64 * 256 + 1, 3 * 64 * 256 - 5):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) ** 3
        packed, absmax = nf4.quantise(values)
        packed_too, row = nested.quantise(values)
        assert torch.equal(packed, packed_too)
        num_blocks = -(-len(absmax) // 256)
        assert len(row) == ops.NF4_NESTED.num_scales(numel) == 4 + 4 * num_blocks + -(-len(absmax) // 4) * 4
        offset, *largest = row[: 4 + 4 * num_blocks].view(torch.float32)
        assert offset == absmax.double().mean().float()
        expanded = nested.expand(row[None], numel)
        for block, (own, factor) in enumerate(zip(absmax.split(256), largest, strict=True)):
            assert factor == (own - offset).abs().max()
            index = ((own - offset)[:, None] - nested.CODE * factor).abs().argmin(dim=1)
            step = nested.CODE[index] * factor
            found = expanded[256 * block : 256 * block + len(own)]
            torch.testing.assert_close(found, step + offset, rtol=0, atol=float(factor) * 1e-6)


def test_a_stack_has_the_rows_of_its_matrices() -> None:
    """Decoded at once and one by one, and the bytes of a weight."""
    stack = torch.randn(6, 64 * 300, generator=torch.Generator().manual_seed(0))
    parts = [nested.quantise(matrix) for matrix in stack]
    packed, rows = (torch.cat(planes) for planes in zip(*parts, strict=True))
    found = torch.empty_like(stack)
    ops.dequantise_nf4_(found, packed, rows)
    for matrix, (its_packed, row) in zip(found, parts, strict=True):
        alone = torch.empty_like(matrix)
        ops.dequantise_nf4_(alone, its_packed, row)
        assert_same_bits(matrix, alone)
    assert ops.NF4_NESTED.num_scales(4096 * 4096) / 4096**2 + 0.5 == pytest.approx(0.51587, abs=1e-5)


def test_torchs_defaults_change_no_values_of_a_file() -> None:
    of = {name.removeprefix("whole-float32-double."): value for name, value in load_file(VECTORS).items()}
    expected = read_quantised(of.__getitem__, "weight").values()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = read_quantised(of.__getitem__, "weight").values()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_a_code_book_that_another_cpu_has_rounded_is_read() -> None:
    of = {name.removeprefix("whole-float32-double."): value for name, value in load_file(VECTORS).items()}
    expected = read_quantised(of.__getitem__, "weight").values()
    book = of["weight.nested_quant_map"]
    of["weight.nested_quant_map"] = torch.nextafter(book, 2 * book)
    assert torch.equal(read_quantised(of.__getitem__, "weight").values(), expected)


def test_torchs_default_dtype_changes_no_bits() -> None:
    values = torch.randn(5 * 64, generator=torch.Generator().manual_seed(0))
    before = nf4.quantise(values), nested.quantise(values)
    torch.set_default_dtype(torch.bfloat16)
    try:
        after = nf4.quantise(values), nested.quantise(values)
        out = torch.empty(values.numel(), dtype=torch.float32)
        ops.dequantise_nf4_(out, *after[1])
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(after, before, strict=True):
        assert all(map(torch.equal, ours, theirs))
    expected = torch.empty_like(out)
    ops.dequantise_nf4_(expected, *before[1])
    assert torch.equal(out, expected)
