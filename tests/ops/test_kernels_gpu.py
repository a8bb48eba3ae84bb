"""The kernel against the reference on CUDA."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import importlib

from ds_zo import ops
from ds_zo.ops import nf4
from tests.helpers.interpreted_kernels import MODULES

pytestmark = pytest.mark.gpu


CHECKS = {name: check for module in MODULES for name, check in importlib.import_module(module).CHECKS.items()}


@pytest.mark.parametrize("check", CHECKS)
def test_kernel_matches_reference(check: str) -> None:
    CHECKS[check]("cuda")


def test_nf4_is_quantised_to_the_same_bits_on_both_devices() -> None:
    values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(nf4.quantise(values.cuda()), nf4.quantise(values), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("distribution", ["normal", "rademacher"])
@pytest.mark.parametrize("offset", [0, 3, 2**35 - 4096])
def test_noise_is_the_same_function_on_both_devices(distribution: ops.Distribution, offset: int) -> None:
    at = (2**63 - 1, 2**31 + 7, 1, offset, 1_000_003, distribution)
    torch.testing.assert_close(ops.noise(*at, "cuda").cpu(), ops.noise(*at), rtol=1e-6, atol=1e-6)


def test_seeds_steps_and_scales_do_not_recompile() -> None:
    from ds_zo.ops.triton_ops import _replay_perturb_kernel

    numel = 8192
    table = ops.build_table([ops.Segment(start=0, numel=numel, offset=0)], "cuda")
    theta = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    planes, out, log = ops.Planes(theta), torch.empty_like(theta), torch.zeros(8, 3, device="cuda")

    def num_compiled() -> int:
        return sum(len(cache[0]) for cache in _replay_perturb_kernel.device_caches.values())

    counts = []
    for seed, step, entries, scale in ((0, 1, 1, 1.0), (2**63 - 1, 2**31 + 1, 8, 1e-3), (2**32, 16, 2, -1e-3)):
        ops.replay_perturb(
            planes,
            table=table,
            noise=ops.Noise(seed, step),
            pending=ops.Pending(log, first_entry=entries, num_entries=entries),
            store=ops.Store(planes),
            copies=ops.Copies(out, scale=scale),
        )
        counts.append(num_compiled())
    assert counts[0] == counts[1] == counts[2]
