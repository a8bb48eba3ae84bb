"""NF4: packed bytes, `absmax` and values have the bits of bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ds_zo import ops
from ds_zo.ops import nf4
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
        ops.dequantise_nf4_(out, stored.packed, stored.absmax)
        assert_same_bits(out, of["dequantised"])


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
    with pytest.raises(ValueError, match=r"absmax must be .* with 2 elements, got .*\(1,\)"):
        ops.dequantise_nf4_(torch.empty(128), packed, absmax[:1])
