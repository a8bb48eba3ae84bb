"""A plan's arithmetic: what fits, the papers' equations, the schedule it prices, several GPUs."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from ds_zo import planner
from ds_zo.config.resolve import resolve
from ds_zo.config.section import StreamConfig
from ds_zo.planner import Limits, Plan, Rates, contenders, load_rates, plan, render, scale
from ds_zo.planner.lomo import estimate_lomo
from ds_zo.planner.lsp import lsp_step_s
from ds_zo.planner.models import Dtype
from ds_zo.planner.stock import FullBucket, full_buckets, zero_step_s
from ds_zo.planner.timeline import Gradient
from ds_zo.planner.zo import estimate_zo
from ds_zo.streaming.budget import MARGIN_NBYTES
from tests.planner.planned_models import planned


@pytest.fixture(scope="module")
def tiny_plan() -> Plan:
    return plan(planned("llama", dtype="bf16"))


def test_every_contender_is_there_and_its_parts_add_up(tiny_plan: Plan) -> None:
    assert [e.contender for e in tiny_plan.estimates] == list(contenders())
    for estimate in tiny_plan.estimates:
        shown = json.loads(json.dumps(estimate.to_json()))
        assert shown["device_nbytes"] == sum(shown["device"].values()) > 0
        assert shown["host_nbytes"] == sum(shown["host"].values()) > 0
        assert shown["step_s"] > 0 and shown["fits"]


@pytest.mark.parametrize("backend", ["zo", "lomo", "adalomo", "lsp"])
@pytest.mark.parametrize("offload", [False, True])
def test_the_json_of_a_plan_is_accepted(backend: str, offload: bool) -> None:
    """By the same code that `deepspeed.initialize` runs."""
    found = plan(planned("llama", dtype="bf16"), backends=[backend], offload=offload, device_memory_gb=1)
    config = dict(found[backend].config)
    resolved = resolve(config)
    assert resolved.backend == backend
    assert resolved.stream is offload


def test_less_memory_streams_more_and_never_overruns() -> None:
    model = planned("opt", dtype="bf16", num_hidden_layers=8, hidden_size=64, ffn_dim=256, word_embed_proj_dim=64)
    least = estimate_zo(model, Limits(), stream=StreamConfig(resident_blocks=0), offload=True).device_nbytes
    whole = estimate_zo(model, Limits(), offload=False).device_nbytes
    seen = []
    for budget in range(least, whole + 1, max(1, (whole - least) // 12)):
        found = estimate_zo(model, Limits(device_nbytes=budget + MARGIN_NBYTES), offload=True)
        assert found.fits_device and found.device_nbytes <= budget
        seen.append(found.host.get("weights", 0))
    assert seen == sorted(seen, reverse=True) and len(set(seen)) > 3
    too_small = estimate_zo(model, Limits(device_nbytes=least), offload=True)
    assert not too_small.fits_device


def test_streaming_is_chosen_where_the_device_is_too_small() -> None:
    """The blocks that stay on the device are in host memory until the first step has shown which do."""
    model = planned("llama", dtype="bf16", num_hidden_layers=12)
    resident = estimate_lomo(model, Limits())
    assert resident.up_nbytes == 0 and "offload_param" not in resident.config["zero_optimization"]
    tight = Limits(device_nbytes=resident.device_nbytes + MARGIN_NBYTES - 1)
    streamed = estimate_lomo(model, tight)
    assert streamed.up_nbytes > 0 and "offload_param" in streamed.config["zero_optimization"]
    settled, peak = streamed.host_nbytes, streamed.host_peak_nbytes
    assert peak - settled == estimate_lomo(model, Limits(), offload=True).host["weights"] - streamed.host["weights"] > 0
    assert estimate_lomo(model, replace(tight, host_nbytes=peak)).fits
    assert not estimate_lomo(model, replace(tight, host_nbytes=peak - 1)).fits


def test_host_memory_decides_too() -> None:
    found = plan(planned("llama"), host_memory_gb=0.5, backends=["zero-offload"])
    assert not found["zero-offload"].fits_host and found["zero-offload"].fits_device
    assert "no: host" in render(found)


def test_a_stored_form_that_fits_is_suggested() -> None:
    arguments: dict[str, Any] = {"backends": ["zo"], "batch": 2, "seq": 16}
    model = planned("llama", dtype="bf16")
    narrow = plan(model, stream={"frozen_dtype": "nf4"}, **arguments)["zo"]
    note = plan(model, offload=True, host_memory_gb=narrow.host_peak_nbytes / 1e9, **arguments)["zo"].notes[-1]
    assert note.startswith('does not fit; with {"frozen_dtype": "nf4"} in ds_zo.stream and LoRA adapters it would: ')
    whole = plan(model, stream={"master": "wire"}, offload=True, **arguments)["zo"]
    note = plan(model, offload=True, host_memory_gb=whole.host_peak_nbytes / 1e9, **arguments)["zo"].notes[-1]
    assert note.startswith('does not fit; with {"master": "wire"} in ds_zo.stream it would: '), "the widest that fits"
    assert not plan(model, offload=True, host_memory_gb=1.0, **arguments)["zo"].notes
    both = plan(
        model, offload=True, host_memory_gb=narrow.host_peak_nbytes / 1e9, **arguments | {"backends": ["zo", "lomo"]}
    )
    assert 'zo does not fit; with {"frozen_dtype": "nf4"} in' in render(both), "also beside other backends"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("offload", [None, False])
def test_a_form_that_is_refused_leaves_nothing_out(dtype: Dtype, offload: bool | None) -> None:
    """The GPU has room for the whole model, so that nothing streams. The host is too small for any form, and forms that
    need streaming are refused without it."""
    found = plan(planned("llama", dtype=dtype), host_memory_gb=1.0, offload=offload, backends=["zo", "adapter"])
    assert not found.left_out
    assert [e.fits_host for e in found.estimates] == [False, False]


def test_inputs_on_the_host_and_lossless_bases_are_suggested_first() -> None:
    arguments: dict[str, Any] = {"backends": ["adapter"], "batch": 64, "seq": 512, "offload": True}
    model = planned("llama", dtype="bf16", batch=64, seq=512, num_hidden_layers=24)
    less = plan(model, stream={"offload_activations": True}, **arguments)["adapter"]
    enough = (less.device_peak_nbytes + MARGIN_NBYTES) / 1e9
    note = plan(model, device_memory_gb=enough, **arguments)["adapter"].notes[-1]
    assert note.startswith('does not fit; with {"offload_activations": true} in ds_zo.stream it would: ')
    bf12 = plan(model, stream={"frozen_dtype": "bf12"}, **arguments)["adapter"]
    note = plan(model, host_memory_gb=bf12.host_peak_nbytes / 1e9, **arguments)["adapter"].notes[-1]
    assert note.startswith('does not fit; with {"frozen_dtype": "bf12"} in ds_zo.stream and LoRA adapters it would: ')


@pytest.mark.parametrize(("backend", "tiles", "stay"), [("lomo", 1, 2), ("lomo", 8, 2), ("adapter", 1, 3)])
def test_inputs_of_two_blocks_are_on_the_device(backend: str, tiles: int, stay: int) -> None:
    """Where adapters are trained, the first block's input needs no gradient and stays there too. The peak is in the
    backward pass of the last block, so that the inputs of all blocks are needed."""
    wide = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 512}
    found = []
    for on_host in (False, True):
        stream = {"resident_blocks": 0, "offload_activations": on_host, "tiles": tiles}
        model = planned("llama", dtype="bf16", batch=8, seq=128, **wide)
        found.append(plan(model, backends=[backend], offload=True, stream=stream)[backend])
    inputs = 2 * 8 * 128 * 64
    assert found[0].device["activations"] - found[1].device["activations"] == (6 - stay) * inputs
    assert found[1].host["activations"] == 6 * inputs


def test_large_blocks_in_nf4_are_decoded_by_matrix() -> None:
    """OPT-175B, LoRA by AdamW: the figures of docs/adapters.md."""
    found = {}
    for device_gb in (13.0, 24.0):
        limits = {"device_memory_gb": device_gb, "host_memory_gb": 128.0}
        stream = {"frozen_dtype": "nf4", "offload_activations": True, "resident_blocks": 0}
        arguments: dict[str, Any] = {"backends": ["adapter"], "batch": 1, "seq": 2048, "stream": stream}
        found[device_gb] = plan("random:opt-175b", **limits, **arguments)["adapter"]
    by_matrix, whole = found[13.0], found[24.0]
    assert by_matrix.device["scratch"] == 2 * 4 * 12288**2
    assert whole.device["scratch"] == 2 * 12 * 12288**2
    assert by_matrix.fits and "decoded matrix by matrix" in by_matrix.setting and "matrix" not in whole.setting
    assert round(by_matrix.device_nbytes / 1e9, 1) == 12.1 and round(whole.device_nbytes / 1e9, 1) == 14.5
    assert by_matrix.step_s > whole.step_s


def test_equation_1_on_the_papers_machine() -> None:
    """LLaMA-7B on its workstation: 32 layers of 1.7 and 3.5 ms, an update of 1.92 s, 14 GB over 15 GB/s."""
    model = planned("llama", dtype="bf16")
    scale_up = 7e9 / model.numel
    model.rates = Rates(link_up_gbps=15 / scale_up, link_down_gbps=15 / scale_up, cpu_adam_gparams=7 / 1.92 / scale_up)
    assert zero_step_s(model, 32 * 1.7e-3, 32 * 3.5e-3) == pytest.approx(0.0544 + 14 / 15 + 1.92, rel=1e-6)


def test_equation_4_takes_one_layer_off_the_critical_path() -> None:
    step_s = lsp_step_s(0.166, down_s=0.032, up_s=0.032, update_s=0.064, num_layers=32)
    assert step_s == pytest.approx(0.166 + 0.128 / 32)
    assert lsp_step_s(0.166, down_s=0.1, up_s=0.1, update_s=1.92, num_layers=32) == 1.92


def test_low_rank_memory_is_table_2(tiny_plan: Plan) -> None:
    """Beside the weights, in elements: LoRA beta (m + n) r, GaLore (m + beta n) r, with beta = 3 for Adam."""
    model = planned("llama", dtype="bf16")
    for method, count in (("lora", lambda m, n: 3 * (m + n)), ("galore", lambda m, n: min(m, n) + 2 * max(m, n))):
        elements = sum(count(m, n) for m, n in model.matrices) * 16
        parts = tiny_plan[method].device
        assert parts["projectors"] // 2 + parts["states"] // 4 == elements


def test_a_slow_link_makes_streaming_slow_and_residency_worth_it() -> None:
    model = planned("llama", dtype="bf16", num_hidden_layers=6)
    model.rates = Rates(link_up_gbps=1e-5, link_down_gbps=1e-5, link_both_gbps=1e-5)
    streamed = estimate_zo(model, Limits(), stream=StreamConfig(resident_blocks=0, master="wire"), offload=True)
    half = estimate_zo(model, Limits(), stream=StreamConfig(resident_blocks=3, master="wire"), offload=True)
    assert streamed.step_s == pytest.approx((streamed.up_nbytes + streamed.down_nbytes) / 1e4, rel=0.05)
    assert half.step_s == pytest.approx(streamed.step_s / 2, rel=0.05)


def test_what_crosses_the_wire_between_ranks() -> None:
    small, large = (plan(planned("llama", hidden_size=size), backends=["zo", "lomo", "lsp"]) for size in (16, 32))
    wire = [{s.contender: s.wire_nbytes for s in scale(p, gpus=8, nodes=64)} for p in (small, large)]
    assert wire[0]["zo"] == wire[1]["zo"] < 16
    weights = 4 * small.num_parameters
    assert wire[0]["lomo"] == 2 * 511 * weights // 512
    assert wire[1]["lomo"] > 2 * wire[0]["lomo"]


def test_stage_3_keeps_one_store_a_machine() -> None:
    found = plan(planned("llama"), backends=["zo"], stream={"resident_blocks": 0}, offload=True)
    (scaled,) = scale(found, gpus=4)
    store = found["zo"].host["weights"] + found["zo"].host.get("low_plane", 0)
    assert scaled.host_nbytes - scaled.sharded_host_nbytes == 3 * store


def test_machines_share_the_update_of_divided_states() -> None:
    """ZeRO's CPU Adam is not charged in full to every machine."""
    found = plan(planned("llama"), backends=["zero-offload"])
    (scaled,) = scale(found, gpus=1, nodes=4)
    trace = planned("llama").backward_trace(checkpointing=True)
    update_s = found["zero-offload"].step_s - trace.forward.seconds - trace.backward.seconds
    assert scaled.step_s == pytest.approx(found["zero-offload"].step_s - 0.75 * update_s + scaled.reduce_s)


def test_stage_3_divides_blocks_that_stay_on_gpus() -> None:
    model = planned("llama", num_hidden_layers=8)
    found = plan(model, backends=["lomo"], offload=False)
    whole, halves = (scale(found, gpus=1, nodes=nodes)[0] for nodes in (1, 2))
    blocks = 4 * sum(p.numel() for block in model.blocks for p in block.parameters())
    around = 4 * model.numel - blocks
    assert whole.sharded_device_nbytes - halves.sharded_device_nbytes == blocks // 2
    assert halves.device_nbytes == found["lomo"].device_nbytes
    assert halves.sharded_wire_nbytes == (3 * blocks + 2 * around) // 2


def _number(word: str) -> float | str:
    return float(word.replace(",", "").removesuffix("%")) if word[:1].isdigit() else word


@pytest.mark.slow
def test_several_gpus_are_planned_as_documented(run_python: Callable[..., str]) -> None:
    """Documented commands, in a process of their own: what other tests leave behind is no part of a plan. Those of 65B,
    and all where `tools/random.sh` runs this."""
    page = (Path(planner.__file__).parent / "SCALING.md").read_text()
    found = re.findall("^`ds-zo (plan .*?)`\n\n```\n(.*?)```", page, flags=re.MULTILINE | re.DOTALL)
    commands = [shlex.split(command) for command, _ in found]
    assert len(commands) == 4 and all("--gpus" in command for command in commands)
    if "DS_ZO_RANDOM_TIMES" not in os.environ:
        found = [(command, table) for command, table in found if "random:llama-65b" in command]
        commands = [shlex.split(command) for command, _ in found]
        assert len(commands) == 2
    run_all = "import json, sys; from ds_zo.cli import main; [main(command) for command in json.loads(sys.argv[1])]"
    shown = run_python(run_all, json.dumps(commands))
    lines = iter(shown.splitlines())
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text()
    # A plan counts the operations of the installed model code: the page has those of the pinned version.
    tolerance = 0.0 if f"transformers=={transformers.__version__};" in pinned else 0.01
    for _, table in found:
        head, *rows = table.splitlines()
        assert head in lines
        for row in rows:
            words, expected = next(lines).split(), row.split()
            assert [_number(word) for word in words] == [
                pytest.approx(_number(word), rel=tolerance) if word[:1].isdigit() else word for word in expected
            ]
    papers_65b = found[-1][1].splitlines()[-1]
    assert "--device-memory-gb 24" in found[-1][0] and float(papers_65b.split()[6]) < 24, papers_65b


def test_lsp_that_streams_is_planned_for_one_rank_only() -> None:
    found = plan(planned("llama", dtype="bf16"), backends=["lsp"], offload=True)
    assert [scale(found, gpus=gpus)[0].fits for gpus in (1, 2)] == ["yes", "no: streams on one rank only"]


def test_buckets_of_gradients_are_reduced_when_the_next_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_zo.planner.stock._REDUCE_BUCKET_NUMEL", 10)
    gradients = [Gradient(numel, alive) for numel, alive in ((4, 900), (6, 800), (3, 700), (12, 600), (5, 500))]
    trace = replace(planned("llama").backward_trace(checkpointing=True), gradients=tuple(gradients))
    assert list(full_buckets(trace)) == [
        FullBucket(alive=700, largest_numel=6, copied_numel=10, oversize_numel=0),
        FullBucket(alive=600, largest_numel=3, copied_numel=0, oversize_numel=0),
        FullBucket(alive=500, largest_numel=12, copied_numel=0, oversize_numel=12),
        FullBucket(alive=0, largest_numel=5, copied_numel=0, oversize_numel=0),
    ]


def test_rates_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text('[2026] a line of a logger\n{"rates": {"link_up_gbps": 12.5}, "checks": []}')
    assert load_rates(path) == Rates(link_up_gbps=12.5)
    path.write_text('{"link_gbps": 12.5}')
    with pytest.raises(ValueError, match=r"unknown rate 'link_gbps'.*link_up_gbps.*rates\.json"):
        load_rates(path)
    path.write_text('{"link_up_gbps": 0}')
    with pytest.raises(ValueError, match=r"> 0, got 0.*link_up_gbps"):
        load_rates(path)


def test_a_model_that_cannot_be_found_or_traced_says_what_can() -> None:
    with pytest.raises(ValueError, match=r"random:SHAPE.*opt-6\.7b.*got 'no-such-model'"):
        plan("no-such-model")
    with pytest.raises(ValueError, match=r"fails in fp32: try --dtype bf16 \(Expected inputs of BF16"):
        plan(planned("mixtral"), backends=["zo"])
    model = planned("llama")
    model.module.model.norm.register_forward_hook(lambda *args: args[2].nonzero())
    with pytest.raises(ValueError, match=r"depends on values, .* and a plan has no values \(.*nonzero"):
        plan(model, backends=["zo"])
