"""Checkpoints that transformers converts while it loads them, such as a tensor for each expert."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ds_zo.cli import main
from ds_zo.streaming import loading
from ds_zo.streaming.converted_checkpoints import Conversions
from ds_zo.streaming.loading import SafetensorsSource, load_pretrained
from tests.helpers.loaded_models import BITSANDBYTES, bitsandbytes_tensors, engine_for, lora_over, zo_json
from tests.helpers.moe_configs import moe_configs

pytestmark = pytest.mark.usefixtures("single_process")
AUTO = hf.AutoModelForCausalLM
NUM_LAYERS = 4


def saved(config: Any, folder: Path) -> str:
    """A folder with random weights, as `save_pretrained` names them."""
    make = getattr(hf, config.architectures[0])
    model = make(config).bfloat16()
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.uniform_(-1, 1)
    model.save_pretrained(folder)
    return str(folder)


def experts(folder: Path) -> str:
    """Qwen3-MoE, whose files have a tensor for each expert."""
    config = hf.Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=NUM_LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    config.architectures = ["Qwen3MoeForCausalLM"]
    path = saved(config, folder)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in SafetensorsSource(folder).names()
    return path


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    read = {name: p.read().to(p.dtype) for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return {**read, **dict(model.named_buffers())}


@pytest.mark.slow
def test_every_mixture_of_experts_is_read_as_by_from_pretrained(tmp_path: Path) -> None:
    for name, config in moe_configs().items():
        folder = saved(config, tmp_path / name)
        make = getattr(hf, config.architectures[0])
        ours = values(load_pretrained(make, folder, dtype=torch.bfloat16, frozen_dtype="nf4"))
        theirs = make.from_pretrained(folder, dtype=torch.bfloat16)
        for key, value in (*theirs.named_parameters(), *theirs.named_buffers()):
            assert ours[key].dtype is value.dtype and torch.equal(ours[key], value), (name, key)


def adapter_json(frozen_dtype: str) -> dict[str, Any]:
    config = zo_json(bf16={"enabled": True}, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    return config | {"ds_zo": {"backend": "adapter", "stream": {"frozen_dtype": frozen_dtype}}}


@pytest.mark.parametrize("frozen_dtype", ["auto", "fp8", "nf4", "nf4_nested"])
def test_stored_bytes_are_those_of_from_pretrained(frozen_dtype: Any, tmp_path: Path) -> None:
    folder = experts(tmp_path)
    ours = load_pretrained(AUTO, folder, dtype=torch.bfloat16, frozen_dtype=frozen_dtype)
    assert all(p.is_meta for p in ours.parameters())
    engines = [
        engine_for(lora_over(model), adapter_json(frozen_dtype))
        for model in (ours, AUTO.from_pretrained(folder, dtype=torch.bfloat16))
    ]
    states = [engine.module.state_dict() for engine in engines]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert value.dtype is states[1][name].dtype and torch.equal(value, states[1][name]), name


def test_the_tensors_of_one_group_of_experts_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that were read and are not stored yet are one layer's: never those of two."""
    folder = experts(tmp_path)
    alive = {"now": 0, "peak": 0}
    convert = Conversions.read

    def free(nbytes: int) -> None:
        alive["now"] -= nbytes

    def counted(self: Conversions, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        def read_and_count(name: str) -> torch.Tensor:
            tensor = read(name).clone()
            weakref.finalize(tensor.untyped_storage(), free, tensor.nbytes)
            alive["now"] += tensor.nbytes
            alive["peak"] = max(alive.values())
            return tensor

        return convert(self, name, read_and_count)

    monkeypatch.setattr(Conversions, "read", counted)
    model = lora_over(load_pretrained(AUTO, folder, dtype=torch.bfloat16, frozen_dtype="nf4"))
    assert alive["peak"] == 0, "names alone are enough to load"
    group_nbytes = 2 * math.prod((4, 2 * 16, 32))
    assert sum(p.numel() for p in model.parameters()) > 2 * NUM_LAYERS * group_nbytes / 2
    engine_for(model, adapter_json("nf4"))
    assert 0 < alive["peak"] <= group_nbytes and alive["now"] == 0


@pytest.mark.skipif(Version(hf.__version__) < Version("5.0"), reason="transformers 4 has modules for experts")
def test_a_checkpoint_without_one_expert_is_refused(tmp_path: Path) -> None:
    folder = experts(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for lost, said in (("experts.3.", r"shape \(3, 32, 32\) of 6 tensors"), ("experts.3.up_proj", ".* of 7 tensors")):
        kept = {name: t for name, t in tensors.items() if lost not in name}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        model = load_pretrained(AUTO, folder, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=rf"gate_up_proj must have shape \(4, 32, 32\), got {said}, .* again$"):
            values(model)


def in_four_bits(folder: Path, target: Path, *, nests: bool, but: str = "no tensor") -> tuple[str, str]:
    """Folders of the model as bitsandbytes quantises it under transformers 4, where each expert is a linear layer, and
    of its decoded values. `but`: a part of the names of matrices that are not quantised."""
    packed, decoded = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        packed[name] = decoded[name] = value
        if "_proj" in name and but not in name:
            added, values = bitsandbytes_tensors(name, value, nests=nests)
            packed |= added
            decoded[name] = values.to(value.dtype)
    for kind, tensors in (("packed", packed), ("decoded", decoded)):
        config = hf.AutoConfig.from_pretrained(folder)
        if kind == "packed":
            config.quantization_config = BITSANDBYTES
        config.save_pretrained(target / kind)
        save_file(tensors, target / kind / "model.safetensors", {"format": "pt"})
    return str(target / "packed"), str(target / "decoded")


@pytest.mark.parametrize("nests", [False, True])
def test_experts_in_four_bits_keep_their_bytes(nests: bool, tmp_path: Path) -> None:
    """The files have each expert's matrices. Stored values are those of a model with the decoded values, and a merged
    export has them."""
    experts(tmp_path)
    packed, decoded = in_four_bits(tmp_path, tmp_path, nests=nests)
    ours = load_pretrained(AUTO, packed, dtype=torch.bfloat16)
    engine = engine_for(lora_over(ours), adapter_json("auto"))
    units = engine.backend.blocks.store.placement.blocks
    forms = {p.name: part.stored_as for unit in units for part in unit.parts for p in part.placed if len(p.shape) > 1}
    own = "nf4_nested" if nests else "nf4"
    assert set(forms.values()) == {own, "bfloat16"} and all(
        form == ("bfloat16" if "gate.weight" in name else own) for name, form in forms.items()
    )
    theirs = engine_for(lora_over(AUTO.from_pretrained(decoded, dtype=torch.bfloat16)), adapter_json("auto"))
    expected = theirs.module.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in engine.module.state_dict().items())
    engine.save_checkpoint(str(tmp_path / "saves"))
    assert main(["export", str(tmp_path / "saves"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = AUTO.from_pretrained(tmp_path / "merged").named_parameters()
    stacks = {f"base_model.model.{name}": p.data for name, p in merged if p.dim() == 3 or "o_proj" in name}
    assert stacks and all(torch.equal(value, expected[name]) for name, value in stacks.items())


def test_a_file_is_opened_once_for_a_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts(tmp_path)
    packed, _ = in_four_bits(tmp_path, tmp_path, nests=True)
    model = load_pretrained(AUTO, packed, dtype=torch.bfloat16)
    opened: list[Any] = []

    def counted(path: Any, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr(loading, "safe_open", counted)
    values(model)
    assert len(opened) == len(list(model.parameters()))


def test_experts_that_are_partly_in_four_bits_are_decoded(tmp_path: Path) -> None:
    experts(tmp_path)
    packed, decoded = in_four_bits(tmp_path, tmp_path, nests=True, but="experts.1.up_proj")
    ours = values(load_pretrained(AUTO, packed, dtype=torch.bfloat16))
    theirs = AUTO.from_pretrained(decoded, dtype=torch.bfloat16)
    assert all(torch.equal(ours[name], value) for name, value in theirs.named_parameters())
