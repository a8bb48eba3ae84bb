"""Models read from safetensors straight into the block store: equal to `from_pretrained`, and never twice in memory."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from ds_zo.checkpoint import CheckpointError
from ds_zo.ops import mxfp4
from ds_zo.streaming.loading import SafetensorsSource, load_pretrained, read_all
from tests.helpers.loaded_models import BITSANDBYTES, bitsandbytes_tensors, engine_for, lora_over, zo_json
from tests.helpers.lomo_runs import batches, train
from tests.helpers.tiny_models import tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("single_process")


def save(model: nn.Module, folder: Path, *, sharded: bool = False) -> str:
    model.save_pretrained(folder, max_shard_size="4KB" if sharded else "5GB")
    assert (folder / "model.safetensors.index.json").exists() == sharded
    return str(folder)


def assert_same_run(ours: nn.Module, theirs: nn.Module, config: dict[str, Any], name: str) -> None:
    """The same weights and buffers once placed, and the same losses while trained."""
    engines = [engine_for(model.train(), config) for model in (ours, theirs)]
    states = [engine.module.state_dict() for engine in engines]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert value.device.type == "cpu"
        assert value.dtype is states[1][key].dtype, key
        assert torch.equal(value, states[1][key]), key
    for (key, a), (_, b) in zip(engines[0].module.named_buffers(), engines[1].module.named_buffers(), strict=True):
        assert torch.equal(a, b), key
    losses = [train(engine, batches(name, 3)) for engine in engines]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "one file"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_equal_to_from_pretrained(tied: bool, sharded: bool, tmp_path: Path) -> None:
    """Every pair of tie, number of files and place (streamed or resident), not every triple."""
    offload = tied == sharded
    folder = save(tiny_model("llama", tie_word_embeddings=tied), tmp_path / "model", sharded=sharded)
    ours = load_pretrained(hf.AutoModelForCausalLM, folder)
    assert all(p.is_meta for p in ours.parameters()), "read before an engine has a place for it"
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert not ours.training
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert_same_run(ours, theirs, zo_json(offload=offload), "llama")


@pytest.mark.parametrize("name", ["opt", "gpt2", "bloom", "mixtral", "roberta"])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    auto = hf.AutoModelForSequenceClassification if name == "roberta" else hf.AutoModelForCausalLM
    folder = save(tiny_model(name), tmp_path / "model")
    of = hf.OPTForCausalLM if name == "opt" else auto  # a model's own class makes the same
    assert_same_run(load_pretrained(of, folder), auto.from_pretrained(folder), zo_json(), name)


@pytest.mark.parametrize("kind", ["LOMO", "LSP", "SGD"])
def test_an_engine_that_takes_a_model_whole_reads_it_whole(kind: str, tmp_path: Path) -> None:
    folder = save(tiny_model("llama", tie_word_embeddings=True), tmp_path / "model")
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    ours = load_pretrained(hf.AutoModelForCausalLM, folder)
    engine = engine_for(ours, zo_json(offload=False, optimizer={"type": kind, "params": {"lr": 1e-3}}))
    for name, p in theirs.named_parameters():
        assert torch.equal(engine.module.get_parameter(name).cpu(), p), name
    assert engine.module.lm_head.weight is engine.module.model.embed_tokens.weight


@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtypes_are_those_of_from_pretrained(stored: torch.dtype, asked: torch.dtype | None, tmp_path: Path) -> None:
    folder = save(tiny_model("llama").to(stored), tmp_path / "model")
    ours = load_pretrained(hf.AutoModelForCausalLM, folder, dtype=asked)
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder, **({} if asked is None else {"dtype": asked}))
    assert {p.dtype for p in ours.parameters()} == {p.dtype for p in theirs.parameters()}
    bf16 = {"bf16": {"enabled": True}} if next(theirs.parameters()).dtype is torch.bfloat16 else {}
    if stored is torch.bfloat16 or not bf16:
        assert_same_run(ours, theirs, zo_json(**bf16), "llama")


def test_a_config_without_a_dtype_and_the_dtype_auto(tmp_path: Path) -> None:
    folder = save(tiny_model("llama").bfloat16(), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    for text in (config, {name: value for name, value in config.items() if name != "dtype"}):
        path.write_text(json.dumps(text))
        for dtype in ({}, {"dtype": "auto"}, {"dtype": "float16"}):
            ours = load_pretrained(hf.AutoModelForCausalLM, folder, **dtype)
            theirs = hf.AutoModelForCausalLM.from_pretrained(folder, **dtype)
            assert {p.dtype for p in ours.parameters()} == {p.dtype for p in theirs.parameters()}


def test_weights_that_a_config_ties_and_the_files_do_not(tmp_path: Path) -> None:
    folder = save(tiny_model("llama", tie_word_embeddings=False), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    ours = load_pretrained(hf.AutoModelForCausalLM, folder)
    assert_same_run(ours, theirs, zo_json(), "llama")
    with pytest.raises(ValueError, match=r"got values of lm_head\.weight that differ .*config\.json ties it to"):
        load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype="nf4")


@pytest.mark.parametrize("asked", [None, torch.bfloat16])
def test_a_float32_checkpoint_under_a_bf16_json(asked: torch.dtype | None, tmp_path: Path) -> None:
    """The weights are its values rounded, and the master copy still has what was rounded away."""
    model = tiny_model("llama")
    folder = save(model, tmp_path / "model")
    engine = engine_for(load_pretrained(hf.AutoModelForCausalLM, folder, dtype=asked), zo_json(bf16={"enabled": True}))
    for name, p in model.named_parameters():
        ours = engine.module.get_parameter(name)
        assert torch.equal(engine.module.state_dict()[name], p.bfloat16()), name
        assert torch.equal(safe_get_full_fp32_param(ours), p), name


def test_buffers_that_are_stored_come_along(tmp_path: Path) -> None:
    config = hf.ResNetConfig(num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[2, 2], layer_type="basic")
    torch.manual_seed(0)
    model = hf.AutoModelForImageClassification.from_config(config).train()
    with torch.no_grad():
        model(torch.randn(4, 1, 16, 16) + 3)  # its normalisations learn means and variances
    buffers = dict(model.named_buffers())
    assert buffers
    ours = load_pretrained(hf.AutoModelForImageClassification, save(model, tmp_path / "model"))
    assert all(p.is_meta for p in ours.parameters())
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_settings_of_generation_come_along(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = 7
    folder = save(model, tmp_path / "model")
    ours, theirs = load_pretrained(hf.AutoModelForCausalLM, folder), hf.AutoModelForCausalLM.from_pretrained(folder)
    assert ours.generation_config.eos_token_id == 7
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.name_or_path == theirs.name_or_path


# What may be missing


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsSource(tmp_path)
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(OSError, match="safetensors"):
        load_pretrained(hf.AutoModelForCausalLM, str(tmp_path))


def test_one_file_saved_over_shards_counts(tmp_path: Path) -> None:
    """transformers deletes the old shards and leaves their index."""
    save(tiny_model("llama"), tmp_path / "model", sharded=True)
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    folder = str(tmp_path / "model")
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert_same_run(load_pretrained(hf.AutoModelForCausalLM, folder), theirs, zo_json(), "llama")


def test_meta_parameters_that_nobody_can_read_are_refused() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"q_proj\.weight is on the meta device .*load_pretrained"):
        engine_for(model, zo_json())


def test_a_checkpoint_of_another_layout(tmp_path: Path) -> None:
    """A base model's folder lacks the head and has no prefix in its names; transformers knows what to do."""
    folder = save(tiny_model("llama", tie_word_embeddings=True).model, tmp_path / "model")
    ours = load_pretrained(hf.AutoModelForCausalLM, folder)
    assert_same_run(ours, hf.AutoModelForCausalLM.from_pretrained(folder), zo_json(), "llama")


# Memory

MEASURE = """
import ctypes, json, sys
from pathlib import Path
M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # freed tensors leave the process: malloc keeps up to 60 MB else
import deepspeed, peft, torch, transformers as hf
import ds_zo
from ds_zo.bench.shapes import random_model
from ds_zo.streaming.loading import load_pretrained

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def initialize(model, stream):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "ZO", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": next(model.parameters()).dtype is torch.bfloat16},
        "ds_zo": {"stream": stream},
    }
    return deepspeed.initialize(model=model, config=config)[0]

def lora_over(base):
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))

def drawn(folder):
    config = hf.AutoConfig.from_pretrained(folder)
    return lora_over(random_model(config, dtype=torch.bfloat16, device=torch.device("cpu")))

def in_four_bits(folder):
    auto = hf.AutoModelForCausalLM
    return lora_over(load_pretrained(auto, folder, dtype=torch.bfloat16, frozen_dtype="nf4"))

small, large = sys.argv[1:]
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
results = {}
for how, load, stream in (
    ("nf4", in_four_bits, {}),
    ("random nf4", drawn, {"frozen_dtype": "nf4"}),
    ("float32", lambda folder: load_pretrained(hf.AutoModelForCausalLM, folder), {}),
):
    initialize(load(small), stream)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    engine = initialize(load(large), stream)
    peak = status("VmHWM")
    store = engine.backend.store
    units = store.blocks.placement.units
    results[how] = {
        "taken": peak - before,
        "stored": sum(u.nbytes + u.low_nbytes for u in units),
        "device": sum(s.buffer.numel() for s in store.blocks.runtime.slots) + store.materialiser.scratch.numel(),
    }
first = {u.name: float(next(iter(u.placed)).parameter.flatten()[0]) for u in store.blocks.placement.blocks}
print("RESULT", json.dumps(results | {"first": first}))
"""

NUM_LAYERS = 10


def big_folder(folder: Path, *, num_layers: int = NUM_LAYERS, width: int = 512) -> str:
    """A LLaMA of 17 MB a layer whose every layer holds its own number. Made shard by shard."""
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=num_layers,
        num_attention_heads=4, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    weight_map = {}
    for name, p in model.named_parameters():
        layer = int(name.split(".")[2]) if ".layers." in name else num_layers
        file = f"model-{layer:05d}.safetensors"
        weight_map[name] = file
        shards.setdefault(file, {})[name] = p
    for i, (file, tensors) in enumerate(sorted(shards.items())):
        save_file({name: torch.full(p.shape, float(i)) for name, p in tensors.items()}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def test_loading_takes_little_more_memory_than_what_is_stored(run_python: Callable[..., str], tmp_path: Path) -> None:
    """Slots and scratch are the device's; on a machine without one they are host memory too, and are taken off.

    In four bits the store is an eighth of the files. Temporaries of the largest tensor, of 4 MB in float32, come on
    top."""
    pytest.importorskip("peft")
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    output = run_python(MEASURE, big_folder(small, num_layers=2, width=16), big_folder(large))
    found = json.loads(output.split("RESULT", 1)[1])
    whole = found["float32"]
    assert whole["stored"] > 150 * 2**20
    assert whole["taken"] - whole["device"] <= 1.1 * whole["stored"], found
    assert found["first"] == {f"model.layers.{i}": float(i) for i in range(NUM_LAYERS)}
    for how in ("nf4", "random nf4"):
        of = found[how]
        assert of["stored"] < whole["stored"] / 6, found
        assert of["taken"] - of["device"] <= of["stored"] + 40 * 2**20, found


# A frozen base in four bits


NF4 = {"bf16": {"enabled": True}, "ds_zo": {"stream": {"frozen_dtype": "nf4"}}}


def test_adapters_over_a_base_on_disk(tmp_path: Path) -> None:
    """`frozen_dtype` in the call or in the JSON; equal to a base that was in memory. Afterwards the base is unread."""
    folder = save(tiny_model("llama").bfloat16(), tmp_path / "model", sharded=True)
    config = zo_json(bf16={"enabled": True})
    ours = lora_over(load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype="nf4"))
    assert not any(p.is_meta for name, p in ours.named_parameters() if "lora" in name)
    engines = [engine_for(ours, config)]
    engines.append(engine_for(lora_over(hf.AutoModelForCausalLM.from_pretrained(folder)), zo_json(**NF4)))
    losses = [adapter_losses(engine) for engine in engines]
    assert losses[0] == losses[1]
    engines[0].destroy()
    assert all(p.is_meta == (".layers." in name and p.dim() == 2 and "lora" not in name) for name, p in named(ours))
    again, theirs = engine_for(ours, config).module.state_dict(), engines[1].module.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in again.items())


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


def adapter_losses(engine: Any) -> list[float]:
    return train(engine, batches("llama", 2))


def bitsandbytes_folder(
    folder: Path, *, nests: bool = False, settings: dict[str, Any] | None = None
) -> tuple[str, nn.Module]:
    """A model as transformers saves one that bitsandbytes has quantised, and the model with the decoded values."""
    model = tiny_model("llama").bfloat16()
    tensors: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        if ".layers." not in name or p.dim() < 2:
            tensors[name] = p.detach().clone()
            continue
        added, values = bitsandbytes_tensors(name, p, nests=nests)
        tensors |= added
        p.data = values.bfloat16()
    model.config.quantization_config = settings or BITSANDBYTES
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder), model


@pytest.mark.parametrize(
    ("nests", "stream", "backend"),
    [
        (False, {"frozen_dtype": "nf4"}, "zo"),
        (False, {}, "adapter"),
        (True, {"frozen_dtype": "nf4"}, "adapter"),
        (True, {}, "zo"),
    ],
)
def test_a_checkpoint_of_bitsandbytes(nests: bool, stream: dict[str, Any], backend: str, tmp_path: Path) -> None:
    folder, decoded = bitsandbytes_folder(tmp_path, nests=nests)
    model = load_pretrained(hf.AutoModelForCausalLM, folder, dtype=torch.bfloat16)
    config = zo_json(bf16={"enabled": True}, ds_zo={"stream": stream})
    if backend == "adapter":
        config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        config["ds_zo"]["backend"] = "adapter"
    engine = engine_for(lora_over(model), config)
    values = engine.module.state_dict()
    for name, p in decoded.named_parameters():
        name = "base_model.model." + name.replace("q_proj.", "q_proj.base_layer.")
        assert torch.equal(values[name], p.data), name
    assert all(map(math.isfinite, adapter_losses(engine)))
    blocks = (engine.backend.blocks.store if backend == "adapter" else engine.backend.store.blocks).placement.blocks
    form = "nf4_nested" if nests and not stream else "nf4"
    assert {part.stored_as for unit in blocks for part in unit.parts} == {"bfloat16", form}


@pytest.mark.parametrize("nests", [False, True])
def test_a_four_bit_matrix_of_another_shape_is_refused(nests: bool, tmp_path: Path) -> None:
    folder, _ = bitsandbytes_folder(tmp_path, nests=nests)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "down_proj" in name and name.endswith("bitsandbytes__nf4")]:
        state = json.loads(bytes(tensors[name].tolist()))
        state["shape"].reverse()
        tensors[name] = torch.tensor(list(json.dumps(state).encode())).byte()
    save_file(tensors, file, metadata={"format": "pt"})
    model = load_pretrained(hf.AutoModelForCausalLM, folder, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"has shape .* in the model's files: use the config\.json that belongs"):
        read_all(model)


def test_a_changed_byte_of_a_scale_is_another_base(tmp_path: Path) -> None:
    """A run over nested scales resumes with them and with float32 ones, whose values are the same."""
    folder, _ = bitsandbytes_folder(tmp_path / "model", nests=True)

    def engine_over(form: str) -> Any:
        model = load_pretrained(hf.AutoModelForCausalLM, folder, dtype=torch.bfloat16)
        return engine_for(lora_over(model), zo_json(bf16={"enabled": True}, ds_zo={"stream": {"frozen_dtype": form}}))

    engine = engine_over("auto")
    adapter_losses(engine)
    engine.save_checkpoint(str(tmp_path / "saved"))
    losses = adapter_losses(engine)
    for form in ("auto", "nf4_nested", "nf4"):
        resumed = engine_over(form)
        resumed.load_checkpoint(str(tmp_path / "saved"))
        assert adapter_losses(resumed) == losses, form
    files = load_file(Path(folder, "model.safetensors"))
    name = next(name for name in files if name.endswith("down_proj.weight.absmax"))
    files[name][1] ^= 1
    save_file(files, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"needs the base of its run .*down_proj.* differs"):
        engine_over("auto").load_checkpoint(str(tmp_path / "saved"))


def test_what_cannot_be_loaded_in_four_bits_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_model("llama").bfloat16(), tmp_path / "model")
    fp4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
    foreign, _ = bitsandbytes_folder(tmp_path / "fp4", settings=fp4)
    (tmp_path / "empty").mkdir()
    for name, further, found in (
        ("somewhere", {}, r"no folder \(somewhere\): .*snapshot_download"),
        (folder, {"revision": "main"}, r"further arguments \(revision\)"),
        (str(tmp_path / "empty"), {}, "a folder without safetensors"),
        (foreign, {}, "weights quantised as fp4"),
    ):
        with pytest.raises(ValueError, match=rf"reads a folder of safetensors .*, got {found}"):
            load_pretrained(hf.AutoModelForCausalLM, name, frozen_dtype="nf4", **further)
    with pytest.raises(
        ValueError, match=r"frozen_dtype must be one of auto, bf12, fp8, nf4, nf4_nested, mxfp4, got 'int4'"
    ):
        load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype="int4")  # type: ignore[arg-type]
    for method in ("LOMO", "ZO"):
        model = lora_over(load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype="nf4"))
        config = zo_json(offload=method == "LOMO", bf16={"enabled": True})
        config["optimizer"]["type"] = method
        with pytest.raises(
            ValueError, match=r"loaded for frozen_dtype nf4, .* stores frozen weights as auto: train by"
        ):
            engine_for(model, config)


def test_dora_reads_the_weights_that_it_needs(tmp_path: Path) -> None:
    """The same magnitudes as over a base in memory, and the same losses. The base stays unread."""
    folder = save(tiny_model("llama").bfloat16(), tmp_path / "model", sharded=True)
    ours = lora_over(load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype="nf4"), use_dora=True)
    theirs = lora_over(hf.AutoModelForCausalLM.from_pretrained(folder), use_dora=True)
    for (name, p), (_, other) in zip(named(ours), named(theirs), strict=True):
        assert p.is_meta == ("lora" not in name), name
        assert p.is_meta or torch.equal(p, other), name
    losses = [adapter_losses(engine_for(model, zo_json(**NF4))) for model in (ours, theirs)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_that_transformers_keeps_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Parameters have the dtypes that `from_pretrained` gives them. (Buffers: see test_converted_checkpoints.py.)"""
    make = hf.AutoModelForSeq2SeqLM
    config = hf.T5Config(d_model=16, d_ff=24, num_layers=2, num_heads=2, d_kv=8, vocab_size=67)
    make.from_config(config).save_pretrained(tmp_path)
    ours, theirs = load_pretrained(make, str(tmp_path), dtype=dtype), make.from_pretrained(tmp_path, dtype=dtype)
    dtypes = [{name: p.dtype for name, p in m.named_parameters()} for m in (ours, theirs)]
    assert dtypes[0] == dtypes[1]
    assert dtype is not torch.float16 or set(dtypes[0].values()) == {torch.float16, torch.float32}


def test_weights_of_other_shapes_than_the_config_says_are_refused(tmp_path: Path) -> None:
    """By an engine that streams them, and by one that reads all of them at once."""
    folder = save(tiny_model("llama"), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    for use in (read_all, lambda model: engine_for(model, zo_json())):
        with pytest.raises(ValueError, match=r"mlp\.\w+\.weight has shape \(\d+, \d+\), got \(\d+, \d+\)"):
            use(load_pretrained(hf.AutoModelForCausalLM, folder))


def test_prompt_tuning_reads_the_embedding(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = save(tiny_model("llama"), tmp_path / "model")
    ours, theirs = load_pretrained(hf.AutoModelForCausalLM, folder), hf.AutoModelForCausalLM.from_pretrained(folder)
    rows = [nn.Embedding.forward(model.get_input_embeddings(), torch.tensor([3, 1])) for model in (ours, theirs)]
    assert torch.equal(*rows)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adapted = peft.get_peft_model(ours, config)
    assert not any(p.is_meta for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_2"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}},
    ],
    ids=lambda settings: settings["init_lora_weights"],
)
def test_adapters_that_change_the_base_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    if settings["init_lora_weights"] == "loftq":
        pytest.importorskip("scipy")
        pytest.importorskip("bitsandbytes")
    folder = save(tiny_model("llama"), tmp_path / "model")
    with pytest.raises(NotImplementedError, match=r"got a call of .* outside: load the model with from_pretrained"):
        lora_over(load_pretrained(hf.AutoModelForCausalLM, folder), **settings)


def test_a_model_without_values_can_change_its_dtype(tmp_path: Path) -> None:
    """As `Module.bfloat16` does; moving it elsewhere is refused."""
    folder = save(tiny_model("llama"), tmp_path / "model")
    model = load_pretrained(hf.AutoModelForCausalLM, folder).bfloat16()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.to(torch.float16).parameters()} == {torch.float16}
    assert all(type(p).__name__ == "UnreadParameter" for p in model.parameters())
    with pytest.raises(NotImplementedError):
        model.to("cpu")


def test_what_uses_weights_outside_an_engine_is_refused(tmp_path: Path) -> None:
    """Also once an engine that has stored them is gone."""
    folder = save(tiny_model("llama"), tmp_path / "model")
    line = "in memory only between deepspeed.initialize and engine.destroy, got a call of .* outside: load the model"
    for use in (
        lambda model: model.resize_token_embeddings(80),
        lambda model: model.resize_token_embeddings(80, mean_resizing=False),
        lambda model: model(**tiny_batch("llama")),
    ):
        with pytest.raises(NotImplementedError, match=line):
            use(load_pretrained(hf.AutoModelForCausalLM, folder))
    model = lora_over(load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype="nf4"))
    engine_for(model, zo_json()).destroy()
    with pytest.raises(NotImplementedError, match=line):
        model.merge_and_unload()


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.data[:4],
        lambda weight: weight.data.to(torch.float64).mean(),
        lambda weight: torch.linalg.qr(weight.to(torch.float64).data),
        lambda weight: weight.T @ weight,
        lambda weight: weight - 1,
        lambda weight: weight.data.add_(1),
        lambda weight: setattr(weight, "data", torch.zeros_like(weight, device="cpu")),
        lambda weight: setattr(weight, "data", weight.data.clone()),
    ],
    ids=[
        "slice",
        "mean of a conversion",
        "decomposition",
        "product",
        "difference",
        "in place",
        "other values",
        "a copy",
    ],
)
def test_data_of_an_unread_weight_are_refused_whoever_asks(use: Callable[[Any], Any], tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path / "model")
    weight = load_pretrained(hf.AutoModelForCausalLM, folder).get_input_embeddings().weight
    with pytest.raises(NotImplementedError, match="outside: load the model with from_pretrained"):
        use(weight)


def test_an_unread_weight_is_converted_and_copied_whoever_asks(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path / "model")
    model = load_pretrained(hf.AutoModelForCausalLM, folder)
    weight = model.get_input_embeddings().weight
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert torch.equal(weight.to("cpu"), theirs)
    weight.data = weight.data.to(torch.bfloat16)
    weight.data = weight.to(torch.bfloat16)
    assert weight.is_meta and weight.dtype is torch.bfloat16
    assert torch.equal(weight.to("cpu"), theirs.bfloat16())
    assert copy.deepcopy(weight).is_meta


def test_training_arguments_with_stage_3_come_before_the_model(tmp_path: Path) -> None:
    """transformers makes models under `zero.Init` from then on."""
    folder = save(tiny_model("llama"), tmp_path / "model")
    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    model = load_pretrained(hf.AutoModelForCausalLM, folder)
    assert is_deepspeed_zero3_enabled() and all(type(p).__name__ == "UnreadParameter" for p in model.parameters())
    del kept


def test_a_shard_that_is_cut_off_is_named_by_the_engine_that_reads_it(tmp_path: Path) -> None:
    folder = save(tiny_model("llama").bfloat16(), tmp_path / "model", sharded=True)
    shard = sorted((tmp_path / "model").glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    model = lora_over(load_pretrained(hf.AutoModelForCausalLM, folder))
    said = rf"{shard.name} is missing, damaged or cut off .*: download or save the model"
    with pytest.raises(ValueError, match=said):
        engine_for(model, zo_json(**NF4))


def test_a_damaged_index_or_single_file_is_named_by_load_pretrained(tmp_path: Path) -> None:
    folder = Path(save(tiny_model("llama"), tmp_path / "model", sharded=True))
    for text in ("{", "[]", '{"weight_map": []}'):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"index\.json is missing, damaged or cut off .*: download or save the model"
        ):
            load_pretrained(hf.AutoModelForCausalLM, str(folder))
    single = Path(save(tiny_model("llama"), tmp_path / "single"), "model.safetensors")
    single.write_bytes(single.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is missing, damaged or cut off"):
        load_pretrained(hf.AutoModelForCausalLM, str(single.parent))


@pytest.mark.parametrize("backend", ["zo", "adapter"])
def test_a_base_weight_that_was_written_outlives_its_engine(backend: str, tmp_path: Path) -> None:
    """The files hold another value. Weights that were not written are unread again."""
    folder = save(tiny_model("llama").bfloat16(), tmp_path / "model")
    model = lora_over(load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype="nf4"))
    config = zo_json(bf16={"enabled": True})
    if backend == "adapter":
        config |= {"optimizer": {"type": "AdamW"}, "ds_zo": {"backend": "adapter"}}
    name = next(name for name, _ in model.named_parameters() if "k_proj" in name)
    engine = engine_for(model, config)
    model.load_state_dict({name: torch.full(model.get_parameter(name).shape, 0.25)}, strict=False)
    engine.destroy()
    again = engine_for(model, config)
    assert (model.state_dict()[name] == 0.25).all()
    again.destroy()
    assert (model.get_parameter(name) == 0.25).all()
    assert model.get_parameter(name.replace("k_proj", "o_proj")).is_meta


def test_checkpoints_leave_the_base_out_and_know_it(tmp_path: Path) -> None:
    folders = [save(tiny_model("llama", seed=seed).bfloat16(), tmp_path / f"{seed}") for seed in range(2)]
    config = zo_json(bf16={"enabled": True})

    def engine_over(folder: str) -> Any:
        return engine_for(lora_over(load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype="nf4")), config)

    engine = engine_over(folders[0])
    adapter_losses(engine)
    engine.save_checkpoint(str(tmp_path / "saved"), tag="a")
    written = [name for file in (tmp_path / "saved" / "a").glob("weights-*") for name in load_file(file)]
    assert {name.partition(":")[0] for name in written} == {n for n, p in named(engine.module) if p.requires_grad}
    losses = adapter_losses(engine)
    resumed = engine_over(folders[0])
    resumed.load_checkpoint(str(tmp_path / "saved"), tag="a")
    assert adapter_losses(resumed) == losses
    before = engine.module.state_dict()
    other = engine_over(folders[1])
    with pytest.raises(RuntimeError, match=rf"needs the base of its run \({folders[0]}\), got another base"):
        other.load_checkpoint(str(tmp_path / "saved"), tag="a")
    changed = next(name for name in before if "k_proj" in name)
    engine.module.load_state_dict({**before, changed: torch.ones_like(before[changed])})
    engine.save_checkpoint(str(tmp_path / "saved"), tag="b")
    written = [name for file in (tmp_path / "saved" / "b").glob("weights-*") for name in load_file(file)]
    assert changed in written, "it is no more what the files hold"


# Experts in MXFP4


def gpt_oss_folder(folder: Path, *, seed: int = 0) -> tuple[str, nn.Module]:
    """A model as gpt-oss ships, and the model with the decoded values."""
    config = hf.GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, hidden_size=32, intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=256, sliding_window=8,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config).bfloat16()
    tensors: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        p.data.normal_(0, 0.1)
        if p.dim() < 3:
            tensors[name] = p.detach().clone()
            continue
        packed, scales = mxfp4.quantise(p)
        num_experts, num_rows, num_columns = p.shape
        tensors[f"{name}_blocks"] = packed.view(num_experts, num_columns, num_rows // 32, 16)
        tensors[f"{name}_scales"] = scales.view(num_experts, num_columns, num_rows // 32)
        p.data = mxfp4.MXFP4Values(packed, scales, tuple(p.shape)).values().bfloat16()
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder), model


@pytest.mark.parametrize("asked", ["auto", "mxfp4", "nf4"])
def test_experts_in_mxfp4(asked: Any, tmp_path: Path) -> None:
    """They are stored and streamed as the files hold them. Losses are those over the decoded values, and the values are
    those of transformers."""
    folder, decoded = gpt_oss_folder(tmp_path / "model")
    model = load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype=None if asked == "auto" else asked)
    config = zo_json(bf16={"enabled": True})
    ours = engine_for(lora_over(model), config)
    stored = {
        p.name.removeprefix("base_model.model."): (part, p, unit)
        for unit in ours.backend.store.blocks.placement.blocks
        for part in unit.parts
        for p in part.placed
    }
    if asked == "nf4":
        assert {part.stored_as for part, p, _ in stored.values() if len(p.shape) == 3} == {"nf4"}
        return
    files = load_file(tmp_path / "model" / "model.safetensors")
    for name, (part, p, unit) in stored.items():
        assert part.stored_as == ("mxfp4" if len(p.shape) == 3 else "bfloat16"), name
        if len(p.shape) == 3:
            planes = next(
                found for of, found in zip(unit.parts, unit.planes(unit.store_buffer), strict=True) if of is part
            )
            assert planes.scales is not None
            assert torch.equal(part.stored(p, planes.storage).view(torch.uint8), files[f"{name}_blocks"].view(-1))
            assert torch.equal(planes.scales[part.scales_of(p)], files[f"{name}_scales"].view(-1))
    losses = adapter_losses(ours)
    assert losses == adapter_losses(engine_for(lora_over(decoded), config))
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    values = ours.module.state_dict()
    for name, p in theirs.named_parameters():
        name = "base_model.model." + name.replace("q_proj.", "q_proj.base_layer.")
        assert torch.equal(values[name], p.data.bfloat16()), name


def test_mxfp4_where_a_model_does_not_ship_so_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_model("llama").bfloat16(), tmp_path / "model")
    model = lora_over(load_pretrained(hf.AutoModelForCausalLM, folder, frozen_dtype="mxfp4"))
    with pytest.raises(
        ValueError, match=r"frozen_dtype mxfp4 keeps weights .*, got a model without such weights: .* nf4"
    ):
        engine_for(model, zo_json(bf16={"enabled": True}))
    folder, _ = gpt_oss_folder(tmp_path / "cut")
    files = load_file(Path(folder, "model.safetensors"))
    name = next(name for name in files if name.endswith("_scales"))
    files[name] = files[name][:, :-1].clone()
    save_file(files, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"MXFP4 weights must be bytes .* damaged or of another layout"):
        engine_for(lora_over(load_pretrained(hf.AutoModelForCausalLM, folder)), zo_json(bf16={"enabled": True}))


def test_a_checkpoint_over_mxfp4_resumes(tmp_path: Path) -> None:
    folder, _ = gpt_oss_folder(tmp_path / "model")
    config = zo_json(bf16={"enabled": True})
    engine = engine_for(lora_over(load_pretrained(hf.AutoModelForCausalLM, folder)), config)
    adapter_losses(engine)
    engine.save_checkpoint(str(tmp_path / "saved"))
    losses = adapter_losses(engine)
    resumed = engine_for(lora_over(load_pretrained(hf.AutoModelForCausalLM, folder)), config)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    assert adapter_losses(resumed) == losses
    before = resumed.module.state_dict()
    resumed.module.load_state_dict(before)
    assert all(torch.equal(value, before[name]) for name, value in resumed.module.state_dict().items())


@pytest.mark.parametrize("stream", [{}, {"resident_blocks": 1, "offload_activations": True}], ids=["streamed", "mixed"])
def test_adapters_of_experts_in_mxfp4_by_adamw(stream: dict[str, Any], tmp_path: Path) -> None:
    """PEFT sets the weights of experts anew in each forward. Equal, up to rounding, to a base on the device with the
    decoded values."""
    pytest.importorskip("peft")
    from tests.helpers import adapter_runs

    folder, decoded = gpt_oss_folder(tmp_path / "model")
    data = [tiny_batch("llama", seed=i, batch_size=2, length=8) for i in range(3)]
    runs: list[tuple[list[float], list[torch.Tensor]]] = []
    ours = load_pretrained(hf.AutoModelForCausalLM, folder, dtype=torch.float32)
    cases: list[tuple[nn.Module, dict[str, Any]]] = [(decoded.float(), {"offload": False}), (ours, stream)]
    for base, more in cases:
        model = lora_over(base, target_parameters=["mlp.experts.gate_up_proj"])
        engine = adapter_runs.start(model, adapter_runs.adapter_json(**more))
        losses = adapter_runs.train(engine, data)
        runs.append((losses, [p.detach().clone() for p in model.parameters() if p.requires_grad]))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-5)
    assert len(runs[0][1]) == 8
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=0, atol=1e-4)  # a hundredth of a step of AdamW
