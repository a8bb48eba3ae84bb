"""The case format of the speed suites: the harness's parameters make the same case again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import checkpoint_speed, lomo_cases, lomo_speed, lsp_cases, lsp_speed, zo_case, zo_presets
from benchmarks.slower_link import slower_link
from benchmarks.training_case import TrainingCase
from ds_zo.bench.runner import Case
from ds_zo.bench.shapes import materialise

CASES: dict[str, tuple[type[TrainingCase], list[Case]]] = {
    "benchmarks.zo_case:run_case": (zo_case.ZOCase, zo_presets.everything()),
    "benchmarks.lomo_cases:speed": (lomo_cases.LOMOCase, lomo_speed.cases_of("all")),
    "benchmarks.lomo_cases:memory": (lomo_cases.MemoryCase, lomo_speed.cases_of("all")),
    "benchmarks.lsp_cases:speed": (
        lsp_cases.LSPCase,
        [c for name in lsp_speed.PRESETS for c in lsp_speed.cases_of(name)],
    ),
    "benchmarks.checkpoint_speed:run_case": (checkpoint_speed.CheckpointCase, checkpoint_speed.cases(folder=".")),
}


@pytest.mark.parametrize("target", CASES)
def test_parameters_of_the_harness_make_the_same_case_again(target: str) -> None:
    kind, cases = CASES[target]
    found = [case for case in cases if case.target == target]
    assert found
    for case in found:
        made = kind(**case.params)
        assert kind(**made.settings()) == made
        assert {"shape", "method", "batch", "length"} <= made.settings().keys(), "a row names its model and input"


def test_defaults_are_left_out_and_unknown_fields_refused() -> None:
    case = TrainingCase("opt-tiny", "zo", stream={}, params={"zo_eps": 1e-3}, warmup=3)
    assert case.settings() == {
        "shape": "opt-tiny",
        "method": "zo",
        "batch": 1,
        "length": 2048,
        "stream": {},
        "params": {"zo_eps": 1e-3},
    }
    with pytest.raises(TypeError, match="wire_dtype"):
        TrainingCase("opt-tiny", "zo", wire_dtype="fp8")  # type: ignore[call-arg]


def test_bloom_attends_in_pieces_as_it_does_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bloom_attention._NUM_HEADS", 3)
    case = TrainingCase("bloom-tiny", "zo", length=24, dtype="fp32")
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    padded = torch.ones_like(ids).index_fill_(1, torch.tensor([0, 1, 2]), 0)
    found = []
    for attention in (None, "pieces"):
        model = materialise(replace(case, attention=attention).lazy_model(torch.device("cpu"))).eval()
        with torch.no_grad():
            found.append([model(input_ids=ids, attention_mask=mask).logits[:, 3:] for mask in (None, padded)])
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole)
    assert not torch.equal(found[0][0], found[0][1]), "the mask must matter"


def test_a_slower_link_holds_up_copies_between_devices_alone() -> None:
    waits: list[float] = []
    plain: Any = torch.Tensor.copy_
    with slower_link(10.0, sleep=waits.append):
        torch.zeros(4).copy_(torch.ones(4))
        torch.zeros(1000, device="meta").copy_(torch.ones(1000))  # as to a GPU
        assert waits == [pytest.approx(4000 / 10e9)]
    assert torch.Tensor.copy_ is plain
    with slower_link(None):
        assert torch.Tensor.copy_ is plain
