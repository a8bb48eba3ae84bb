"""Weights for others, and from others: export, save_16bit_model, stock and Hugging Face folders; nothing executes."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_zo import cli
from ds_zo.backends.common.unit_weights import UnitWeights
from ds_zo.checkpoint import CheckpointError
from ds_zo.checkpoint.export import Spec, write_model_file
from ds_zo.streaming.loading import load_pretrained
from ds_zo.tasks.embedded_model import FOLDER as EMBEDDED
from tests.helpers.checkpoint_runs import JSONS
from tests.helpers.first_order_runs import JSONS as FIRST_ORDER
from tests.helpers.first_order_runs import Epochs, engine_of, play
from tests.helpers.lomo_runs import lively
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import Toy, engine_for, one_step, train

pytestmark = pytest.mark.usefixtures("single_process")


def batches(kind: str, num: int) -> list[dict[str, torch.Tensor]]:
    return [tiny_batch(kind, seed=i, batch_size=2, length=6) for i in range(num)]


@pytest.mark.parametrize(
    ("kind", "name", "tied"),
    [
        ("opt", "bf16 split", True),
        ("llama", "fp8 split", False),
        ("llama", "fp32", True),
        ("gpt2", "bf12 wire", True),
        ("mixtral", "bf16 split", False),
    ],
)
def test_an_exported_checkpoint_loads_as_the_model(kind: str, name: str, tied: bool, tmp_path: Path) -> None:
    engine = engine_for(tiny_model(kind, tie_word_embeddings=tied), JSONS[name])
    train(engine, batches(kind, 4))
    engine.save_checkpoint(str(tmp_path / "saves"))
    assert cli.main(["export", str(tmp_path / "saves"), str(tmp_path / "out"), "--shard-gb", "0.00001"]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = weights(engine.module)
    assert_equal(loaded.state_dict(), expected)
    assert type(loaded) is type(engine.module)
    if tied:
        assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    one = [str(tmp_path / "saves" / "global_step4"), str(tmp_path / "one")]
    assert cli.main(["export", *one, "--tokenizer", str(tmp_path / "nowhere")]) == 1
    assert cli.main(["export", *one, "--tokenizer", str(EMBEDDED)]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "one")("a").input_ids
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert all(value.numel() > 0 and torch.equal(value, expected[key]) for key, value in whole.items())


@pytest.mark.parametrize("filename", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("seed", range(4))
def test_a_file_that_cannot_be_written_leaves_nothing(filename: str, seed: int, tmp_path: Path) -> None:
    """Files are limited to a random part of the size that they would have, the largest part too."""
    rng = random.Random(seed)
    tensors = {f"p{i}": torch.randn(rng.randrange(1, 3000)) for i in range(rng.randrange(1, 20))}
    specs = [Spec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]

    def write(name: str) -> None:
        write_model_file(tmp_path / name, (specs, iter(tensors.items())), aliases={"tied": "p0"})

    write(filename)
    before = (tmp_path / filename).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (rng.randrange(len(before)), len(before) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(CheckpointError, match=r"was not written: .+; free disk space or name another path"):
                write(filename)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in tmp_path.iterdir()] == [filename]
        assert (tmp_path / filename).read_bytes() == before


def test_export_follows_links_and_leaves_the_current_folder(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    engine = engine_for(tiny_model("llama"), JSONS["fp32"])
    engine.save_checkpoint(str(tmp_path / "saves"))
    (tmp_path / "an empty folder").mkdir()
    for name in ("an empty folder", "a new folder"):
        link = tmp_path / f"to {name}"
        link.symlink_to(name)
        assert cli.main(["export", str(tmp_path / "saves"), str(link)]) == 0
        assert link.is_symlink() and (tmp_path / name / "model.safetensors").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["export", str(tmp_path / "saves"), "."]) == 1
    assert "must not be the current one" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ZO", "LOMO"])
def test_a_peft_model_is_exported_as_the_model_and_its_adapter(kind: str, tmp_path: Path) -> None:
    """Of LoRA beside LOMO both are new: PEFT's own `save_pretrained` would keep the adapter alone."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        r=2, target_modules=["q_proj", "embed_tokens"], use_dora=kind == "ZO", modules_to_save=["lm_head"]
    )
    model = peft.get_peft_model(tiny_model("llama", tie_word_embeddings=False), settings)
    params: dict[str, Any] = {"lr": 1e-3} | ({"adapter": {"lr": 1e-3}} if kind == "LOMO" else {})
    if kind == "LOMO":
        for p in model.parameters():
            p.requires_grad_(True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = engine_for(model, {**JSONS["fp32"], "optimizer": {"type": kind, "params": params}, "ds_zo": {}})
    train(engine, batches("llama", 2))
    engine.save_checkpoint(str(tmp_path / "saves"))
    assert cli.main(["export", str(tmp_path / "saves"), str(tmp_path / "out")]) == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "out" / "adapter")
    expected = weights(engine.module)
    assert_equal(loaded.state_dict(), expected)
    changed = {name for name, value in before.items() if not torch.equal(value, expected[name])}
    assert any("lora_B" in name for name in changed) and any("base_layer" in name for name in changed) == (
        kind == "LOMO"
    )


def test_export_overwrites_nothing_and_names_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    engine = engine_for(tiny_model("opt"), JSONS["fp32"])
    engine.save_checkpoint(str(tmp_path / "saves"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert cli.main(["export", str(tmp_path / "saves"), str(tmp_path / "out")]) == 1
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
    weights_file = tmp_path / "saves" / "global_step0" / "weights-00001.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    assert cli.main(["export", str(tmp_path / "saves"), str(tmp_path / "new")]) == 1
    assert "weights-00001.safetensors does not have the hash" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["fp32", "bf16 split", "fp8 split"])
@pytest.mark.parametrize("filename", ["pytorch_model.bin", "model.safetensors"])
def test_save_16bit_model_is_the_state_dict_in_one_file(name: str, filename: str, tmp_path: Path) -> None:
    engine = engine_for(tiny_model("opt"), JSONS[name])
    train(engine, batches("opt", 4))
    assert engine.save_16bit_model(str(tmp_path / "out"), filename)
    file = tmp_path / "out" / filename
    found = torch.load(file, weights_only=True) if filename.endswith(".bin") else load_file(file)
    expected = weights(engine.module)
    if filename.endswith(".safetensors"):
        expected.pop("lm_head.weight")  # tied: once
    assert_equal(found, expected)
    assert [p.name for p in (tmp_path / "out").iterdir()] == [filename]


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2", "bloom"])
def test_save_pretrained_holds_a_shard_at_a_time(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Copies of weights that are alive at once stay within a shard and a unit, and the files are the usual ones."""
    alive: dict[int, int] = {}
    most = [0]
    read = UnitWeights.read

    def watched(self: UnitWeights, parameter: torch.nn.Parameter) -> torch.Tensor:
        value = read(self, parameter)
        nbytes = value.numel() * value.element_size()
        alive[id(value)] = nbytes
        weakref.finalize(value, alive.pop, id(value), None)
        most[0] = max(most[0], sum(alive.values()))
        return value

    monkeypatch.setattr(UnitWeights, "read", watched)
    engine = engine_for(tiny_model(kind, num_hidden_layers=6), JSONS["fp8 split"])
    train(engine, batches(kind, 3))
    shard, total = 12_000, sum(p.numel() * 2 for p in engine.module.parameters())
    engine.module.save_pretrained(tmp_path / "a", max_shard_size=shard)
    assert 0 < most[0] <= 2 * shard < total
    engine.module.save_pretrained(tmp_path / "b", max_shard_size=shard, state_dict=engine.module.state_dict())
    for path in (tmp_path / "b").iterdir():
        same = tmp_path / "a" / path.name
        if path.suffix == ".safetensors":
            assert_equal(load_file(same), load_file(path))
        elif "index" not in path.name:
            assert same.read_bytes() == path.read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto")
    assert_equal(loaded.state_dict(), weights(engine.module))
    engine.destroy()
    assert "save_pretrained" not in vars(engine.module)


# From others


@pytest.mark.parametrize("name", ["fp32", "bf16 split", "bf12 split", "fp8 split"])
def test_a_model_folder_loads_into_a_running_engine(name: str, tmp_path: Path) -> None:
    other = tiny_model("llama", seed=7, tie_word_embeddings=True).to(torch.float32)
    other.save_pretrained(tmp_path)
    engine = engine_for(tiny_model("llama", tie_word_embeddings=True), JSONS[name])
    train(engine, batches("llama", 3))
    path, client_state = engine.load_checkpoint(str(tmp_path))
    assert (path, client_state, engine.global_steps) == (str(tmp_path), {}, 3)
    found = weights(engine.module)
    dtype = next(engine.module.parameters()).dtype
    if "fp8" not in name:
        assert_equal(found, {key: value.to(dtype) for key, value in other.state_dict().items()})
    for key, value in other.state_dict().items():
        torch.testing.assert_close(found[key].float(), value, rtol=0.1, atol=0.01)
    train(engine, batches("llama", 1))
    tiny_model("opt").save_pretrained(tmp_path / "opt")
    with pytest.raises(CheckpointError, match="weights of another model"):
        engine.load_checkpoint(str(tmp_path / "opt"))


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (2, "bf16 split"),
        (0, "bf16 split"),
        (0, "LOMO, bf16, streamed"),
        (0, "AdaLOMO, bf16, kahan, window"),
        (0, "LSP, on the device"),
    ],
)
def test_a_stock_deepspeed_checkpoint_gives_its_weights(stage: int, name: str, tmp_path: Path) -> None:
    stock_json = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    stock = deepspeed.initialize(model=lively("llama", seed=4, num_hidden_layers=2), config=stock_json)[0]
    one_step(stock, batches("llama", 1)[0])
    stock.save_checkpoint(str(tmp_path))
    if name in FIRST_ORDER:
        engine = engine_of(name)
        play(engine, Epochs(), 3)
    else:
        engine = engine_for(lively("llama", num_hidden_layers=2), JSONS[name])
        train(engine, batches("llama", 3))
    engine.load_checkpoint(str(tmp_path))
    for key, value in engine.backend.module_state_dict().items():
        assert torch.equal(value, stock.module.state_dict()[key].to(value.dtype)), key
    assert engine.global_steps == 1
    one_step(engine, batches("llama", 1)[0])
    engine.save_checkpoint(str(tmp_path), tag="ours")
    with pytest.raises(CheckpointError, match=r"DeepSpeed's own engine cannot load.*ds-zo export"):
        stock.load_checkpoint(str(tmp_path))
    assert stock.load_checkpoint(str(tmp_path), tag="global_step1")[0] is not None


class Boom:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_a_stock_checkpoint_that_would_execute_something_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "saves" / "global_step1"
    folder.mkdir(parents=True)
    (tmp_path / "saves" / "latest").write_text("global_step1")
    module = {name: p.detach() for name, p in Toy().state_dict().items()}
    torch.save({"module": module, "evil": Boom()}, folder / "mp_rank_00_model_states.pt")
    engine = engine_for(Toy(), JSONS["fp32"])
    with pytest.raises(CheckpointError, match="would have to be executed"):
        engine.load_checkpoint(str(tmp_path / "saves"))
    assert not (tmp_path / "executed").exists()


def test_our_checkpoints_hold_no_pickles(tmp_path: Path) -> None:
    engine = engine_for(tiny_model("opt"), JSONS["bf16 split"])
    train(engine, batches("opt", 2))
    engine.save_checkpoint(str(tmp_path), client_state={"epoch": 1})
    for path in (tmp_path / "global_step2").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert path.suffix == ".safetensors"
            with safe_open(path, framework="pt") as file:
                assert file.keys() is not None
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError)):
            pickle.loads(path.read_bytes())


# Merged adapters


def merged(checkpoint: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    assert cli.main(["export", str(checkpoint), str(out), "--merge", "--shard-gb", "0.00001", *options]) == 0
    assert len(list(out.glob("model-*.safetensors"))) > 1
    found: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True, "modules_to_save": ["lm_head"]}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        ("mixtral", {"target_modules": ["q_proj"]}),  # its base is converted while it is read
    ],
    ids=["rslora", "dora", "conv1d", "experts"],
)
def test_a_merged_export_equals_merge_and_unload(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """The base is read from the folder that it was loaded from, in bf16, while the run has it in NF4."""
    peft = pytest.importorskip("peft")
    tiny_model(kind, tie_word_embeddings=kind == "gpt2").bfloat16().save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, init_lora_weights=False, **settings)
    torch.manual_seed(0)
    base = load_pretrained(AutoModelForCausalLM, str(tmp_path / "base"), frozen_dtype="nf4")
    model = peft.get_peft_model(base, config).train()
    json = {**JSONS["bf16 split"], "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}}}
    engine = engine_for(model, json)
    train(engine, batches(kind, 2))
    engine.save_checkpoint(str(tmp_path / "saves"))
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto"), config)
    trained = {name: value for name, value in weights(engine.module).items() if name in dict(trained_of(theirs))}
    assert trained
    theirs.load_state_dict(trained, strict=False)
    for _, p in trained_of(theirs):
        p.data = p.data.bfloat16()  # as this run has trained them
    expected = theirs.merge_and_unload().state_dict()
    assert_equal(merged(tmp_path / "saves", tmp_path / "out"), expected)
    (tmp_path / "base").rename(tmp_path / "moved")
    assert cli.main(["export", str(tmp_path / "saves"), str(tmp_path / "no"), "--merge"]) == 1
    assert_equal(merged(tmp_path / "saves", tmp_path / "again", "--base", str(tmp_path / "moved")), expected)


def trained_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def test_what_cannot_be_merged_is_refused(tmp_path: Path, capsys: Any) -> None:
    engine = engine_for(tiny_model("llama"), JSONS["fp32"])
    engine.save_checkpoint(str(tmp_path / "saves"))
    assert cli.main(["export", str(tmp_path / "saves"), str(tmp_path / "out"), "--merge"]) == 1
    assert "needs a checkpoint of a PEFT model" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "saves"), str(tmp_path / "out"), "--base", str(tmp_path)]) == 1
    assert "add --merge (--base)" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "saves"), str(tmp_path / "out"), "--dtype", "bf16"]) == 1
    assert "add --merge (--dtype)" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_base_inside_the_checkpoint_is_merged(tmp_path: Path) -> None:
    """LOMO trains base and adapter; nothing else is read."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["v_proj"]))
    for p in model.parameters():
        p.requires_grad_(True)
    params = {"lr": 1e-3, "adapter": {"lr": 1e-3}}
    engine = engine_for(model, {**JSONS["fp32"], "optimizer": {"type": "LOMO", "params": params}, "ds_zo": {}})
    train(engine, batches("llama", 2))
    engine.save_checkpoint(str(tmp_path / "saves"))
    found = merged(tmp_path / "saves", tmp_path / "out", "--dtype", "fp32")
    assert_equal(found, engine.module.merge_and_unload().state_dict())
