"""The projectors on a GPU: the checks of the interpreter, and what only a GPU can show."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ds_zo.projectors import (
    Compression,
    FitGraphRecorder,
    MatrixUpdate,
    apply_all_,
    batches,
    compress,
    compress_all,
    fit,
    workspace,
)
from tests.projectors.projector_cases import gradient, matrix, pair
from tests.projectors.projector_checks import compare_rounded, moved, updated

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1024, 2048, 512, 4), (1376, 512, 256, 16), (2048, 1000, 128, 5), (100, 260, 64, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_large_matrices_match_the_reference(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Every tiling that real shapes select, not only the small ones."""
    P, Q = pair(*shape)
    P_device, Q_device = moved(P, "cuda"), moved(Q, "cuda")
    G = matrix(*shape[:2], dtype)
    S = compress(G, P, Q)
    torch.testing.assert_close(compress(G.cuda(), P_device, Q_device).cpu(), S, rtol=1e-5, atol=1e-4)
    W = matrix(*shape[:2], dtype, seed=1)
    given: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "seed": 3, "step": 7, "offset": 4096}
    found = updated(W.cuda(), S.cuda(), P_device, Q_device, **given)
    compare_rounded(found.cpu(), updated(W, S, P, Q, **given))


def test_products_give_the_same_bits_every_time() -> None:
    P, Q = (moved(x, "cuda") for x in pair(2048, 2048, 512, 4))
    G = matrix(2048, 2048, torch.bfloat16).cuda()
    S = compress(G, P, Q)
    W = updated(G, S, P, Q, lr=0.1)
    for _ in range(5):
        assert torch.equal(compress(G, P, Q), S)
        assert torch.equal(updated(G, S, P, Q, lr=0.1), W)


def test_launches_prepared_in_growing_batches_write_to_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_NUMEL", 1 << 18)
    workspace.release()
    shapes = [(256, 512), (256, 4096), (256, 16384)]
    pairs = [[moved(x, "cuda") for x in pair(*shape, 128, 4, seed=i)] for i, shape in enumerate(shapes)]
    grads = [matrix(*shape, torch.bfloat16, seed=i).cuda() for i, shape in enumerate(shapes)]
    outs = [torch.zeros(128, 128, device="cuda").t() for _ in shapes]
    prepared = compress_all([Compression(G, P, Q, out) for G, (P, Q), out in zip(grads, pairs, outs, strict=True)])
    assert prepared is not None and prepared.is_valid()
    others = [torch.full((numel,), 7.0, device="cuda") for numel in (1 << 15, 1 << 16, 1 << 19, 1 << 20) * 4]
    for out in outs:
        out.zero_()
    prepared.launch()
    from ds_zo.ops import triton_launch

    assert triton_launch._is_direct and triton_launch._compiled
    assert all(bool((other == 7.0).all()) for other in others)
    assert all(torch.equal(out, compress(G, *both)) for G, both, out in zip(grads, pairs, outs, strict=True))


def test_a_layers_products_together_are_the_same_bits() -> None:
    shapes = [(2048, 2048)] * 4 + [(5504, 2048)] * 2 + [(2048, 5504)]
    pairs = [[moved(x, "cuda") for x in pair(*shape, 512, 4, seed=i)] for i, shape in enumerate(shapes)]
    weights = [matrix(*shape, torch.bfloat16, seed=i).cuda() for i, shape in enumerate(shapes)]
    alone = [compress(W, *projectors) for W, projectors in zip(weights, pairs, strict=True)]
    outs = [torch.empty(512, 512, device="cuda").t() for _ in shapes]
    compress_all([Compression(W, P, Q, out) for W, (P, Q), out in zip(weights, pairs, outs, strict=True)])
    assert all(torch.equal(out, S) for out, S in zip(outs, alone, strict=True))
    expected = [
        updated(W, S, *both, lr=0.1, weight_decay=0.1, step=3, offset=1024 * i)
        for i, (W, S, both) in enumerate(zip(weights, alone, pairs, strict=True))
    ]
    prepared = apply_all_(
        [
            MatrixUpdate(W, out, P, Q, 0.1, 0.1, offset=1024 * i)
            for i, (W, out, (P, Q)) in enumerate(zip(weights, outs, pairs, strict=True))
        ],
        step=3,
    )
    assert all(torch.equal(W, one) for W, one in zip(weights, expected, strict=True))
    assert prepared is not None
    prepared.launch(lr=0.2, decay=0.9, step=2**31 + 4)  # by the compiled kernels
    for i, (W, S, both, one) in enumerate(zip(weights, alone, pairs, expected, strict=True)):
        again = updated(one, S, *both, lr=0.2, weight_decay=0.5, step=2**31 + 4, offset=1024 * i)
        assert torch.equal(W, again)


def test_streams_do_not_share_scratch() -> None:
    """Two streams at once, on a matrix small enough that their kernels would meet in one buffer."""
    P, Q = (moved(x, "cuda") for x in pair(512, 512, 256, 4))
    gradients = [matrix(512, 512, seed=s).cuda() for s in range(2)]
    expected = [compress(G, P, Q) for G in gradients]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(compress(gradients[i], P, Q))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(S, expected[i]) for S in found[i])


def test_nothing_large_is_allocated_after_the_first_call() -> None:
    P, Q = (moved(x, "cuda") for x in pair(2048, 2048, 512, 4))
    G, S = matrix(2048, 2048, torch.bfloat16).cuda(), torch.empty(512, 512, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compress(G, P, Q, out=S)
        updates_peak = torch.cuda.max_memory_allocated() - before
    assert updates_peak < 1 << 16
    assert workspace.num_bytes() > 0
    workspace.release()
    assert workspace.num_bytes() == 0


def test_fit_agrees_with_the_cpu() -> None:
    G = gradient(512, 256, batch=1)
    reports = []
    for device in ("cpu", "cuda"):
        P, Q = (moved(x, device) for x in pair(512, 256, 96, 4))
        reports.append(fit(G.to(device), P, Q, steps=20, lr=0.1))
    assert reports[1].bias_after == pytest.approx(reports[0].bias_after, abs=5e-3)


@pytest.mark.parametrize("nonzeros", [4, 64])
def test_recorded_steps_of_a_fit_are_the_same_bits(nonzeros: int) -> None:
    """One recorder for several matrices, as in a backward pass, and its memory goes back."""
    recorder = FitGraphRecorder()
    for m, n in [(1536, 576), (576, 1536), (1536, 576)]:
        G = gradient(m, n, batch=1).to("cuda")
        found = []
        for one in (None, recorder):
            P, Q = (moved(x, "cuda") for x in pair(m, n, 512, nonzeros))
            report = fit(G, P, Q, steps=23, lr=0.3, recorder=one)
            found.append((report.bias_before, report.bias_after, report.steps, P.values, Q.values))
        assert not recorder._gave_up and recorder._graph is not None
        assert found[0][:3] == found[1][:3] and found[1][1] < found[1][0]
        assert all(torch.equal(a, b) for a, b in zip(found[0][3:], found[1][3:], strict=True))
    recorder.release()
    assert recorder._graph is None


def test_recordings_share_their_memory() -> None:
    G, (P, Q) = gradient(1536, 576, batch=1).to("cuda"), pair(1536, 576, 512, 4)
    recorder, reserved = FitGraphRecorder(), []
    for _ in range(5):
        fit(G, moved(P, "cuda"), moved(Q, "cuda"), steps=3, lr=0.3, recorder=recorder)
        reserved.append(torch.cuda.memory_reserved())
    assert recorder._graph is not None and reserved[1] == reserved[4]
    recorder.release()
    assert torch.cuda.memory_reserved() < reserved[4]


def test_a_recording_finds_room_where_freed_memory_fills_the_cap() -> None:
    G, (P, Q) = gradient(1536, 576, batch=1).to("cuda"), (moved(x, "cuda") for x in pair(1536, 576, 512, 4))
    fit(G, P, Q, steps=3, lr=0.3)  # the allocator has what the steps need that are not recorded
    held = [torch.empty(32 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    recorder = FitGraphRecorder()
    try:
        del held
        fit(G, P, Q, steps=3, lr=0.3, recorder=recorder)
        assert recorder._graph is not None and not recorder._gave_up
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        recorder.release()


def test_nothing_is_collected_while_a_step_is_recorded() -> None:
    x, seen = torch.zeros(4, device="cuda"), []

    def work() -> None:
        seen.append(gc.isenabled())
        x.add_(1)

    work()
    replay = FitGraphRecorder().record(work, x.device)
    replay()
    replay()
    assert seen == [True, False] and gc.isenabled() and x.tolist() == [3.0] * 4


def test_all_goes_on_after_a_recording_that_failed() -> None:
    """The allocator gives memory back, random numbers are drawn, and others can be recorded."""
    x, aside = torch.zeros(4, device="cuda"), torch.cuda.Stream()

    def work() -> None:
        x.add_(1).sum().item()

    work()
    recorder = FitGraphRecorder()
    assert recorder.record(work, x.device) is work and recorder._gave_up
    lent = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    lent.record_stream(aside)
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    del lent
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] <= before - 64 * 2**20
    assert torch.nn.functional.dropout(torch.ones(4096, device="cuda")).count_nonzero() < 4096
    replay = FitGraphRecorder().record(lambda: x.add_(1), x.device)
    replay()
    assert replay is not work and x.tolist() == [2.0] * 4
