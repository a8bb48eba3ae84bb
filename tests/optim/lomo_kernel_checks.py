"""The update kernels against the torch reference. Run by Triton's interpreter, or on a GPU."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from ds_zo.ops.triton_lomo import factored_square_sum_triton, row_and_col_square_sums_triton, update_triton
from ds_zo.optim import rules

SHAPES = [(1,), (1030,), (7, 300), (2, 5, 131), (1024, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, g = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return p, g


def factors(p: torch.Tensor) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(p.shape[:-1], generator=generator) + 0.5 if p.ndim > 1 else None
    return {"rows": rows, "cols": torch.rand((*p.shape[:-2], p.shape[-1]), generator=generator) + 0.5}


def both(p: torch.Tensor, g: torch.Tensor, device: str, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the reference and the kernel make of the same call."""
    expected = p.clone()
    rules._apply_(expected, g.clone(), **given)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    for name in {"guards", "factors"} & given.keys():
        on_device[name] = [None if tensor is None else tensor.to(device) for tensor in given[name]]
    dither = on_device.pop("dither")
    found = p.to(device, copy=True)
    where = None if dither is None else (dither.seed, dither.step, dither.offset)
    update_triton(found, g.to(device), dither=where, **on_device)
    return expected, found.cpu()


def compare(expected: torch.Tensor, found: torch.Tensor) -> None:
    if expected.dtype is torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        return
    # The same dither: a last bit of the float32 sum may still tip a rounding, once in many.
    different = (found != expected).float().mean().item()
    assert different <= max(0.002, 1.01 / expected.numel() if expected.numel() < 500 else 0), different
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-3)


def check_update(device: str) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            for dither in (None, rules.Dither(step=2**31 + 5, offset=5 * 1024, seed=2**40 + 3)):
                compare(*both(*case(shape, dtype), device, lr=0.037, decay=0.99, dither=dither))


def check_coefficient_value_clipping_and_scale(device: str) -> None:
    given = {"coef": torch.tensor(0.3), "clip_value": 0.2, "factors": rules.Factors(scale=torch.tensor(1.7))}
    for dtype in DTYPES:
        compare(*both(*case((9, 200), dtype), device, lr=0.1, decay=1.0, dither=None, **given))


def check_factors(device: str) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            p, g = case(shape, dtype)
            given = {"factors": rules.Factors(**factors(p)), "coef": torch.tensor(0.7)}
            compare(*both(p, g, device, lr=0.1, decay=0.9, dither=None, **given))


def check_square_sum(device: str) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            p, g = case(shape, dtype)
            for coef in (None, torch.tensor(0.7)):
                given = {**factors(p), "coef": coef}
                expected = rules._factored_square_sum(g, **given)
                on_device = {k: None if v is None else v.to(device) for k, v in given.items()}
                found = factored_square_sum_triton(g.to(device), **on_device)
                torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)


def check_row_and_col_square_sums(device: str) -> None:
    for shape in ((3, 5), (64, 128), (130, 260)):
        for dtype in (torch.float32, torch.bfloat16):
            _, g = case(shape, dtype)
            rows, cols = row_and_col_square_sums_triton(g.to(device))
            torch.testing.assert_close(rows.cpu(), g.float().square().sum(1), rtol=1e-5, atol=0.0)
            torch.testing.assert_close(cols.cpu(), g.float().square().sum(0), rtol=1e-5, atol=0.0)


def check_wide_direction_for_narrow_storage(device: str) -> None:
    p, _ = case((500,), torch.bfloat16)
    _, u = case((500,), torch.float32)
    compare(*both(p, u, device, lr=0.05, decay=1.0, dither=rules.Dither(step=1, offset=0)))


def check_residue(device: str) -> None:
    """Compares weight + residue: a last bit may tip a rounding, and the residue then makes up for it."""
    for dtype in DTYPES[1:]:
        for p, _ in (case((9, 200), dtype), [t.t() for t in case((200, 9), dtype)]):
            found, residues = p.to(device, copy=True), [torch.zeros(9, 200, dtype=dtype) for _ in range(2)]
            expected, theirs = p.clone(), residues[1].to(device)
            for step in range(3):
                _, g = case((9, 200), dtype, seed=step)
                rules._apply_(expected, g.clone(), lr=1e-3, decay=0.999, dither=None, residue=residues[0])
                update_triton(found, g.to(device), lr=1e-3, decay=0.999, residue=theirs)
            assert residues[0].any()
            sums = found.cpu().float() + theirs.cpu().float(), expected.float() + residues[0].float()
            torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)
            assert (found.cpu() != expected).float().mean() < 0.002


def check_guards(device: str) -> None:
    """With one that is not finite, not a bit changes, of weights nor residue; with finite ones all is as without."""
    for dtype in DTYPES:
        for values in ([math.nan], [math.inf, 0.0], [1.0, math.nan], [3.0], [1.0, 0.0]):
            p, g = case((9, 200), dtype)
            is_finite = all(map(math.isfinite, values))
            g[3, 7] = 1.0 if is_finite else math.nan
            given: dict[str, Any] = {"lr": 0.1, "decay": 0.9, "dither": None}
            if dtype is not torch.float32:
                given["residue"] = torch.ones_like(p)
            plain = both(p, g, device, **copy.deepcopy(given))
            found = both(p, g, device, guards=[torch.tensor(value) for value in values], **given)
            for unguarded, guarded in zip(plain, found, strict=True):
                assert torch.equal(guarded, unguarded if is_finite else p)
            assert is_finite or dtype is torch.float32 or (given["residue"] == 1).all()


def check_strided_parameter(device: str) -> None:
    p, g = (t.t() for t in case((40, 30), torch.float32))
    compare(*both(p, g, device, lr=0.05, decay=1.0, dither=None))


def check_version_is_bumped(device: str) -> None:
    """A graph that still needs the old weights must raise, not use the new ones."""
    p, g = (t.to(device) for t in case((10,), torch.float32))
    version = p._version
    update_triton(p, g, lr=0.1, decay=1.0)
    assert p._version > version


CHECKS: dict[str, Callable[[str], None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}
