"""Models that speed suites change: BLOOM's attention in chunks, and a slower link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.slower_link import slower_link
from benchmarks.training_case import TrainingCase
from ds_zo.bench.shapes import materialise
from ds_zo.streaming.streams import InlineStream
from tests.helpers.timed_streams import Line, TimedStreams


def test_bloom_attends_in_chunks_as_it_does_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bloom_attention._NUM_HEADS", 3)
    case = TrainingCase("bloom-tiny", "zo", length=24, dtype="fp32")
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    padded = torch.ones_like(ids).index_fill_(1, torch.tensor([0, 1, 2]), 0)
    found = []
    for attention in (None, "chunks"):
        model = materialise(replace(case, attention=attention).lazy_model(torch.device("cpu"))).eval()
        with torch.no_grad():
            found.append([model(input_ids=ids, attention_mask=mask).logits[:, 3:] for mask in (None, padded)])
    for whole, chunks in zip(*found, strict=True):
        torch.testing.assert_close(chunks, whole)
    assert not torch.equal(found[0][0], found[0][1]), "the mask must matter"


def test_a_slower_link_holds_up_copies_between_devices_alone() -> None:
    waits: list[float] = []
    plain: Any = torch.Tensor.copy_
    with slower_link(10.0, current=InlineStream, sleep=waits.append):
        torch.zeros(4).copy_(torch.ones(4))
        torch.zeros(1000, device="meta").copy_(torch.ones(1000))  # as to a GPU
        assert waits == [pytest.approx(4000 / 10e9)]
    assert torch.Tensor.copy_ is plain
    with slower_link(None):
        assert torch.Tensor.copy_ is plain


class OnDevice(torch.nn.Parameter):
    """Host memory that passes for a GPU's."""

    device = torch.device("cuda")


def ends_of_copies() -> list[float]:
    """When two uploads and a download, of a second each and on a stream each, have ended."""
    streams = TimedStreams()
    host, device = torch.zeros(1000), OnDevice(torch.zeros(1000), requires_grad=False)
    pairs = {"first up": (device, host), "second up": (device, host), "down": (host, device)}
    lines = [streams.another(name) for name in pairs]

    def sleep(seconds: float) -> None:
        streams.copying.now_s += seconds

    with slower_link(host.nbytes / 1e9, current=lambda: streams.copying, sleep=sleep):
        for line, (target, source) in zip(lines, pairs.values(), strict=True):
            with line.issuing():
                target.copy_(source, non_blocking=True)
    return [line.now_s for line in lines]


def test_copies_of_one_direction_share_a_slower_link(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends_of_copies() == [1.0, 2.0, 1.0]
    monkeypatch.setattr(Line, "wait", lambda *_: None)
    assert ends_of_copies() == [1.0, 1.0, 1.0], "without the queue each stream has the link to itself"
