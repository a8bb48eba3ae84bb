"""The interval that measured speeds lead to."""

from __future__ import annotations

from dataclasses import replace

from ds_zo.engines.tempo import Tempo

GB = 10**9
TEMPO = Tempo(
    up_nbytes_per_s=54.5 * GB, down_nbytes_per_s=55.2 * GB, both_nbytes_per_s=100.8 * GB, compute_s=0.1, draw_s=0.008
)
"""About OPT-6.7B, one sequence, on an H200."""


def best(tempo: Tempo, *, streamed_gb: float, low_gb: float = 0.0) -> int:
    return tempo.best_interval(streamed_nbytes=int(streamed_gb * GB), low_nbytes=int(low_gb * GB))


def test_a_slow_link_folds_rarely_and_slow_blocks_fold_often() -> None:
    assert best(TEMPO, streamed_gb=12.9) >= 6  # 237 ms of uploads hide every draw
    assert best(replace(TEMPO, compute_s=0.35), streamed_gb=12.9) <= 2  # the link waits for the blocks
    assert 2 <= best(TEMPO, streamed_gb=9.8) <= best(TEMPO, streamed_gb=12.9)  # bf12: 180 ms
    assert 1 < best(TEMPO, streamed_gb=6.4) < 6  # fp8: 118 ms against 100 ms and the draws


def test_a_low_plane_makes_folds_dearer() -> None:
    assert best(TEMPO, streamed_gb=12.9, low_gb=12.9) > best(TEMPO, streamed_gb=12.9)


def test_no_interval_is_expected_to_be_faster_than_the_one_chosen() -> None:
    for compute_s in (0.02, 0.1, 0.2, 0.5):
        for streamed_gb in (0.5, 6.4, 12.9, 60.0):
            tempo = replace(TEMPO, compute_s=compute_s)
            sizes = {"streamed_nbytes": int(streamed_gb * GB), "low_nbytes": 0}
            chosen = tempo.step_s(tempo.best_interval(**sizes), **sizes)
            assert all(chosen <= 1.0021 * tempo.step_s(k, **sizes) for k in (1, 2, 4, 8, 16, 32))
