"""Cases of LoRA over a streamed base, each once on a toy model: what is quantised, shared and measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.lora_models import repeat_first_block
from benchmarks.speed import cases_of
from ds_zo.bench.runner import WARM, Case, run_cases
from ds_zo.bench.shapes import lazy_model
from ds_zo.ops import PACKED
from ds_zo.records.rows import Row
from ds_zo.streaming.placement import WIRE
from ds_zo.streaming.units import num_matrices
from tests.helpers.clean_process import in_clean_process

pytest.importorskip("peft")
UNSHARED = "all blocks have memory of their own"


def _cases() -> list[Case]:
    """The cases of experts, one of each form, and one of them without shared memory."""
    cases = {case.name: case for case in cases_of("adapter-experts", device="cpu", tiny=True)}
    shared = cases["235b-a22b/24-blocks"]
    unshared = replace(shared, name=UNSHARED, params=shared.params | {"host_blocks": None})
    return [cases["30b-a3b/experts"], cases["gpt-oss-120b/attention"], shared, unshared]


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    options = {"out": None, "device": "cpu", "warm": (*WARM, "benchmarks.training_speed"), "min_free_host_gib": 0.5}
    return {row["case"]: row for row in in_clean_process(run_cases, _cases(), **options)}


def test_cases_of_experts_stream_them_in_groups(rows: dict[str, Row]) -> None:
    assert {name: row["error"] for name, row in rows.items() if row["status"] != "ok"} == {}
    forms = {name: row["params"]["stream"]["frozen_dtype"] for name, row in rows.items()}
    assert {*forms.values()} == {"nf4", "nf4_nested", "mxfp4"}
    for name, row in rows.items():
        assert "all 4 blocks stream" in row["placement"] and "experts in groups" in row["placement"]
        assert forms[name] in row["placement"].replace("bfloat16/", " ").replace(",", " ").split()
        assert row["finite"] and row["losses"][-1] < row["losses"][0]
        assert row["planned_device_gb"] > 0 and (row["inputs_gb"] > 0) == ("offload_activations" in str(row["stream"]))
    matrices = 4 * 4 * 2  # layers, linear layers of attention, A and B
    experts = 4 * 2 * 2  # layers, stacks, A and B
    assert f"{matrices + experts} trained tensors" in rows["30b-a3b/experts"]["placement"]
    assert f"{matrices} trained tensors" in rows["gpt-oss-120b/attention"]["placement"]


def test_blocks_that_share_host_memory_train_alike(rows: dict[str, Row]) -> None:
    shared, unshared = rows["235b-a22b/24-blocks"], rows[UNSHARED]
    assert shared["losses"] == unshared["losses"]
    assert shared["up_gb_a_step"] == unshared["up_gb_a_step"]
    assert 2 * shared["host_gb"] == unshared["host_gb"]


@pytest.mark.parametrize(
    ("shape", "form"), [("qwen3-moe-tiny", "nf4"), ("qwen3-moe-tiny", "nf4_nested"), ("gpt-oss-tiny", "mxfp4")]
)
def test_all_blocks_get_the_first_one_quantised_as_a_whole(shape: str, form: str) -> None:
    model: Any = lazy_model(f"random:{shape}", dtype=torch.bfloat16, device=torch.device("cpu"))
    draw = model._ds_zo_source
    repeat_first_block(model, form)
    source, packed = model._ds_zo_source, PACKED[WIRE[form]]
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        values, found = draw(f"model.layers.0.{name}"), source(f"model.layers.1.{name}")
        assert source.shipped_wire(f"model.layers.1.{name}") is packed.form.dtype
        if packed.takes == "matrices":
            rows = values.view(num_matrices(name, values.shape), -1)
            expected = [torch.cat(planes) for planes in zip(*map(packed.quantise, rows), strict=True)]
        else:
            expected = list(packed.quantise(values))
        assert torch.equal(found.packed, expected[0]) and torch.equal(found.absmax.view(-1), expected[1])
        assert (found.values() - values.float()).abs().max() < 0.02 and found.shape == tuple(values.shape)
    weight = source("model.layers.1.self_attn.q_proj.weight")
    assert isinstance(weight, torch.Tensor) == (form == "mxfp4")
    router = "mlp.gate.weight" if shape.startswith("qwen3") else "mlp.router.weight"
    assert torch.equal(source(f"model.layers.1.{router}"), draw(f"model.layers.0.{router}"))
