"""`ds-zo convert`, as typed."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import pytest
import torch
from transformers import AutoModelForCausalLM

import ds_zo
from ds_zo.cli import COMMANDS, main
from ds_zo.config import backend_of, resolve

REPO = Path(__file__).parents[1]
STOCK = REPO / "ds_configs" / "zero_offload.json"
Captured = pytest.CaptureFixture[str]
BUCKETS = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 500_000_000}


def written(folder: Path, config: Any) -> str:
    path = folder / "ds_config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return str(path)


def test_the_json_is_the_output_and_each_change_a_line(tmp_path: Path, capsys: Captured) -> None:
    assert main(["convert", str(STOCK), "--to", "zo"]) == 0
    said = capsys.readouterr()
    new = json.loads(said.out)
    assert backend_of(new) == "zo"
    lines = said.err.splitlines()
    assert 'optimizer.type: "AdamW" -> "ZO": the update is ZO\'s' in lines
    assert any(line.startswith("gradient_clipping: 1.0 -> removed: ZO has no gradients to clip") for line in lines)
    assert any(line.startswith("learning rate to start from: 1e-06 (for up to 7B: ") for line in lines)
    out = tmp_path / "zo.json"
    assert main(["convert", str(STOCK), "--to", "zo", "--out", str(out)]) == 0
    assert capsys.readouterr().out == "" and json.loads(out.read_text()) == new


@pytest.mark.parametrize(
    ("gb", "streams"),
    [(0.26844, True), (24.0, False)],  # the first is the margin: nothing can stay
)
def test_the_plan_chooses_streaming_for_the_card(gb: float, streams: bool, tmp_path: Path, capsys: Captured) -> None:
    stock = json.loads(STOCK.read_text()) | {"train_micro_batch_size_per_gpu": 2}
    card = ["--model", "random:llama-tiny", "--seq", "16", "--device-memory-gb", str(gb), "--host-memory-gb", "64"]
    assert main(["convert", written(tmp_path, stock), "--to", "lomo", *card]) == 0
    said = capsys.readouterr()
    new = json.loads(said.out)
    assert resolve(new).stream == streams
    assert new["zero_optimization"].get("ds_zo", {}).get("stream", {}) == ({"device_memory_gb": gb} if streams else {})
    assert f"2 x 16 tokens, bf16, one process, a GPU of {gb:g} GB" in said.err
    assert f"plan: {'streamed' if streams else 'resident'}: " in said.err and "tokens/s" in said.err
    assert "gradient_clipping adds another" in said.err
    assert ("plan: it does NOT fit the GPU's memory" in said.err) == streams
    assert new["optimizer"]["params"]["lr"] == 0.1, "the rate of a small model"


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ({"train_batch_size": 16}, 16),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, 4),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, 2),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, 1),
    ],
)
def test_the_plan_is_of_the_batch_that_one_process_trains(
    sizes: dict[str, object], batch: int, tmp_path: Path, capsys: Captured
) -> None:
    stock = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, **sizes}
    words = ["--to", "lsp", "--model", "random:llama-tiny", "--seq", "16"]
    assert main(["convert", written(tmp_path, stock), *words]) == 0
    assert f" {batch} x 16 tokens, fp32, one process" in capsys.readouterr().err


@pytest.mark.parametrize(("host_gb", "wanted"), [("3.5", "nf4"), ("2.12", "nf4_nested")])
def test_a_base_that_does_not_fit_is_written_in_four_bits(
    host_gb: str, wanted: str, tmp_path: Path, capsys: Captured
) -> None:
    stock = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    words = ["convert", written(tmp_path, stock), "--to", "adapter", "--model", "random:llama-1.3b", "--seq", "16"]
    assert main([*words, "--device-memory-gb", "1.5", "--host-memory-gb", host_gb]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["zero_optimization"]["ds_zo"]["stream"]["frozen_dtype"] == wanted
    assert "planned: without it the run does not fit" in said.err and "NOT fit" not in said.err
    assert main([*words, "--device-memory-gb", "24"]) == 0
    assert "frozen_dtype" not in capsys.readouterr().out


def test_check_names_the_backend_and_what_has_no_effect(tmp_path: Path, capsys: Captured) -> None:
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "ZO", "params": {"lr": "auto", "betas": [0.9, 0.99]}},
    }
    for config, expected in (
        (json.loads((REPO / "ds_configs" / "zo.json").read_text()), ["backend: zo, streamed", "valid"]),
        (
            auto,
            [
                "backend: zo, resident",
                "valid",
                "no effect: optimizer.params.betas",
                'note: Trainer or Accelerate must replace "auto" in train_micro_batch_size_per_gpu, '
                "optimizer.params.lr; plain DeepSpeed does not",
            ],
        ),
        (
            {
                "optimizer": {"type": "LOMO", "params": {"lr": 2e-5}},
                "gradient_clipping": 0,
                "zero_optimization": BUCKETS,
            },
            [
                "backend: lomo, resident",
                "valid",
                "no effect: zero_optimization.stage",
                "no effect: zero_optimization.overlap_comm",
                "no effect: zero_optimization.contiguous_gradients",
                "no effect: zero_optimization.reduce_bucket_size",
                "warning: LOMO trains at learning rates of about 0.01 to 0.1, got 2e-05, which is far below them; "
                "AdamW's rates do not suit it; start from 0.01 without gradient_clipping (optimizer.params.lr)",
            ],
        ),
        (
            json.loads(STOCK.read_text()),
            [
                'stock: DeepSpeed\'s own engine takes this JSON, and ds_zo does nothing (optimizer.type "AdamW")',
            ],
        ),
        (
            {"train_batch_size": 1, "optimizer": "auto"},
            ["stock: DeepSpeed's own engine takes this JSON, and ds_zo does nothing (optimizer.type none)"],
        ),
    ):
        assert main(["convert", "--check", written(tmp_path, config)]) == 0
        assert capsys.readouterr().out.splitlines() == expected


ZO = {"type": "ZO", "params": {"zo_eps": 1e-3}}


def test_a_section_without_an_optimizer_is_for_evaluation(tmp_path: Path, capsys: Captured) -> None:
    section = {"zero_optimization": {"ds_zo": {"stream": {"device_slots": 3}}}}
    assert main(["convert", written(tmp_path, section), "--check"]) == 0
    assert capsys.readouterr().out.startswith("evaluation only")
    assert main(["convert", written(tmp_path, {"ds_zo": {"backend": "lomo"}}), "--check"]) == 0
    assert "the script must pass an optimizer" in capsys.readouterr().out


def test_keys_that_deepspeed_has_removed_are_removed(tmp_path: Path, capsys: Captured) -> None:
    stock = {"optimizer": {"type": "AdamW"}, "elasticity": {"enabled": False}, "amp": {"enabled": False}}
    assert main(["convert", written(tmp_path, stock), "--to", "lomo"]) == 0
    found = capsys.readouterr()
    assert "elasticity" not in found.out and "amp" not in found.out
    assert found.err.count("DeepSpeed 0.19.8 removed the feature") == 2


@pytest.mark.parametrize(
    ("config", "words", "said"),
    [
        ({"optimizer": ZO, "ds_zo": {"stream": {"device_slots": 1}}}, ["--check"], "(ds_zo.stream.device_slots)"),
        ({"optimizer": ZO, "ds_zo": {"rounding": "auto"}}, ["--check"], "leave the key out"),
        (
            {"optimizer": {"type": "AdamW"}, "zero_optimization": {"ds_zo": {"rounding": "nearest"}}},
            ["--check"],
            "no ds_zo.backend",
        ),
        ({"optimizer": ZO, "elasticity": {"enabled": False}}, ["--check"], "removed elasticity, got"),
        ({"optimizer": {"type": "LOMMO", "params": {}}}, ["--check"], 'did you mean "LOMO"?'),
        ({"optimizer": {"type": "AdaLomoo", "params": {}}}, ["--check"], 'did you mean "AdaLOMO"?'),
        (
            {"optimizer": {"type": "LOMO"}, "gradient_accumulation_steps": 4},
            ["--check"],
            "another optimizer.type alone is not enough",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}}, ["--check"], "write 1e-5 without quotes"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}}, ["--to", "zo"], "(optimizer.params.lr)"),
        ({"zero_optimization": {"stage": 4}}, ["--check"], "(zero_optimization.stage)"),
        ('{"optimizer": {}, "optimizer": {}}', ["--check"], "without repeated keys"),
        ("{", ["--to", "zo"], "without repeated keys"),
        ("[1]", ["--to", "zo"], "it must be an object, got [1]"),
        ('{"optimizer": ' * 101 + "1" + "}" * 101, ["--check"], "at most 100 levels deep"),
        ('{"optimizer": ' + "[" * 100_000 + "]" * 100_000 + "}", ["--to", "zo"], "at most 100 levels deep"),
        ({"ds_zo": []}, ["--check"], "ds_zo must be an object, got []"),
        ({"zero_optimization": {"ds_zo": 0}}, ["--to", "zo"], "ds_zo must be an object, got 0"),
        ({"zero_optimization": {"stagee": 2}}, ["--to", "zo"], "(zero_optimization.stagee)"),
        ({}, ["--to", "zo", "--device-memory-gb", "24"], "name it (--model)"),
        ({}, ["--to", "zo", "--seq", "64", "--batch", "2"], "reads --seq, --batch, got no model"),
        ({}, ["--to", "zo", "--rates", "rates.json"], "reads --rates, got no model"),
        ({"optimizer": ZO}, ["--check", "--out", "zo.json"], "--check only reads FILE, got --out too"),
        ({"optimizer": ZO}, ["--check", "--model", "m", "--batch", "0"], "got --model, --batch too"),
        ({}, ["--to", "zo", "--model", "random:opt-7b"], "unknown shape"),
        ({}, ["--to", "zo", "--model", "random:opt-tiny", "--batch", "0"], "batch must be >= 1"),
        ({}, ["--to", "zo", "--out", "no/such/folder/zo.json"], "error: [Errno 2]"),
    ],
)
def test_wrong_input_is_one_line(config: Any, words: list[str], said: str, tmp_path: Path, capsys: Captured) -> None:
    assert main(["convert", written(tmp_path, config), *words]) == 1
    found = capsys.readouterr()
    assert found.out == "" and said in found.err
    lines = [line for line in found.err.splitlines() if not line.startswith("[")]  # DeepSpeed's log begins so
    assert len(lines) == 1 and lines[0].startswith("error: ")


def test_check_reports_every_error_in_a_line(tmp_path: Path, capsys: Captured) -> None:
    zo = {
        "train_batch_sizee": 4,
        "optimizer": {"type": "ZO", "params": {"zo_eps": -1, "lr": "1e-6"}},
        "ds_zo": {"stream": {"device_slots": 1, "overlap": 3}},
        "gradient_clipping": "x",
    }
    stock = {"optimizer": {"type": "LOMMO", "params": {"lr": "1"}}, "fp16": {"hysteresis": "x"}, "zero_optimization": 3}
    for config, places in (
        (zo, ["train_batch_sizee", "lr", "zo_eps", "device_slots", "overlap", "gradient_clipping"]),
        (stock, ["optimizer.type", "optimizer.params.lr", "fp16.hysteresis", "zero_optimization"]),
    ):
        assert main(["convert", "--check", written(tmp_path, config)]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
        assert len(lines) == len(places), lines
        for place in places:
            assert sum(line.startswith("error: ") and place in line for line in lines) >= 1, (place, lines)
        assert not any("more after this one" in line for line in lines)


def test_the_input_is_not_overwritten(tmp_path: Path, capsys: Captured) -> None:
    path = written(tmp_path, STOCK.read_text())
    assert main(["convert", path, "--to", "zo", "--out", path]) == 1
    assert "which is the input: name another (--out)" in capsys.readouterr().err
    assert Path(path).read_text() == STOCK.read_text()


def test_one_job_is_named(capsys: Captured) -> None:
    for words in ([], ["--to", "zo", "--check"], ["--to", "adamw"]):
        with pytest.raises(SystemExit):
            main(["convert", str(STOCK), *words])


@pytest.mark.usefixtures("single_process")
def test_a_converted_json_trains(tmp_path: Path) -> None:
    out = tmp_path / "converted.json"
    assert main(["convert", str(STOCK), "--to", "zo", "--out", str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(ds_zo.EMBEDDED_MODEL, dtype=torch.float32)
    config = json.loads(out.read_text()) | {"bf16": {"enabled": False}, "train_micro_batch_size_per_gpu": 2}
    before = model.lm_head.weight.detach().clone()
    engine = deepspeed.initialize(model=model, config=config)[0]
    tokens = torch.arange(32).reshape(2, 16)
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    assert engine.global_steps == 2 and engine.resolved.backend == "zo"
    engine.destroy()
    assert not torch.equal(before, model.lm_head.weight)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: ModuleType, capsys: Captured) -> None:
    """Of every command. The parser accepts the examples, as far as they are complete commands."""
    name = command.__name__.rpartition(".")[2]
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    examples = re.findall(rf"^ +(ds-zo {name}\b.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert examples
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    for example in examples:
        parser.parse_args(shlex.split(re.split("[|>]", example)[0])[1:])
