"""The case format of the speed suites: the harness's parameters make the same case again."""

from __future__ import annotations

import pytest

from benchmarks import checkpoint_speed, lomo_cases, lomo_speed, lsp_cases, lsp_speed, zo_case, zo_presets
from benchmarks.training_case import TrainingCase
from ds_zo.bench.runner import Case

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
