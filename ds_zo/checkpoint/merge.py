"""Writes a PEFT model's checkpoint as one model: each adapter is merged into its base weight by PEFT itself.

The model is built on the meta device. One layer at a time gets its values, is merged, is written, and loses its values
again. So a base of any size is merged in the memory of its largest layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_zo import ops
from ds_zo.checkpoint import older_base
from ds_zo.checkpoint.adapters import FILE as ADAPTERS_FILE
from ds_zo.checkpoint.adapters import ROOT, Adapters
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.export import SHARD_NBYTES, Spec, weights_by_name, write_model_folder
from ds_zo.checkpoint.reader import Saved
from ds_zo.config.json_text import parse_json
from ds_zo.logs import warn
from ds_zo.ops.nf4 import Quantised
from ds_zo.streaming.loading import IN_MEMORY, SafetensorsSource


def export_merged(
    saved: Saved, out: Path, *, base: Path | None, dtype: torch.dtype, shard_nbytes: int = SHARD_NBYTES
) -> None:
    """Writes a folder for `from_pretrained`. Base weights that the checkpoint leaves out are read from the folder
    `base`, one at a time. None: from the folder that the run has read."""
    adapters = Adapters.read(saved.text(ADAPTERS_FILE))
    config_text = saved.text("config.json")
    if adapters is None or config_text is None:
        raise CheckpointError(
            f"--merge needs a checkpoint of a PEFT model of transformers, got {saved.folder}: export it without --merge"
        )
    config = {**parse_json(config_text), "dtype": str(dtype).removeprefix("torch.")}
    config.pop("quantization_config", None)
    plain = partial(_plain_model, config, dtype)
    merging = _Merging(saved, adapters, _peft_model(config, adapters, dtype), plain=plain, base=base, dtype=dtype)
    run_dtype: str = json.loads(config_text)["dtype"]
    merging.compare_older_base(lambda: _peft_model(config, adapters, getattr(torch, run_dtype)))
    extra = {"config.json": json.dumps(config, indent=2) + "\n"}
    if (generation := saved.text("generation_config.json")) is not None:
        extra["generation_config.json"] = generation
    stream = (merging.specs(), merging.tensors())
    write_model_folder(out, stream, extra=extra, shard_nbytes=shard_nbytes, progress=True)


def _peft_model(config: dict[str, Any], adapters: Adapters, dtype: torch.dtype) -> nn.Module:
    """The PEFT model on the meta device."""
    import peft

    settings = {**json.loads(adapters.config), "base_model_name_or_path": None}
    if settings["peft_type"] != "LORA":
        raise CheckpointError(
            f"--merge merges LoRA adapters (also DoRA and rsLoRA), got {settings['peft_type']}: load the checkpoint "
            "into an engine and call merge_and_unload there"
        )
    settings |= {"init_lora_weights": False} if "init_lora_weights" in settings else {}  # the checkpoint has the values
    with torch.device("meta"):
        found: nn.Module = peft.get_peft_model(
            _plain_model(config, dtype),
            peft.get_peft_config(settings),
            adapter_name=adapters.adapter,
            autocast_adapter_dtype=False,
        )
    return found


def _plain_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model without adapters, on the meta device."""
    import transformers

    hf_config = transformers.AutoConfig.for_model(**config)
    named = getattr(transformers, (hf_config.architectures or [""])[0], None)
    with torch.device("meta"):
        model = (named or transformers.AutoModelForCausalLM)._from_config(hf_config, dtype=dtype)
        model.tie_weights()
    return model


class _Merging:
    """Reads, merges and yields the weights of one PEFT model."""

    def __init__(
        self,
        saved: Saved,
        adapters: Adapters,
        model: nn.Module,
        *,
        plain: Callable[[], nn.Module],
        base: Path | None,
        dtype: torch.dtype,
    ) -> None:
        """`plain` makes the model without adapters."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._adapters = adapters
        self._model = model
        self._dtype = dtype
        self._saved_values = weights_by_name(saved)
        self._saved = saved
        self.base: SafetensorsSource | None = None
        """The folder of weights that the checkpoint leaves out. None: it has all weights."""
        self._base_state: dict[str, Any] = saved.backend_state.get("base") or {}
        self._layers = {name: m for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        for name in self._layers:
            if any(name.startswith(f"{other}.") for other in self._layers):
                raise CheckpointError(
                    f"--merge needs at most one adapter a layer, got several in {name}: load the checkpoint into an "
                    "engine and call merge_and_unload there"
                )
        self._buffers = {name: b for name, b in model.named_buffers() if name in model.state_dict()}
        names = [*(name for name, _ in model.named_parameters()), *self._buffers]
        own = [name for name in names if name not in self._saved_values]
        if own:
            self.base = _base_of(saved, base)
            if not {self._plain(name) for name in own} <= self.base.weight_names():
                self.base.convert_for(plain())
            missing = [n for n in own if self._adapters.place(n)[0] or self._plain(n) not in self.base.weight_names()]
            if missing:
                raise CheckpointError(
                    f"neither checkpoint {saved.folder} nor its base {self.base.folder} has {missing[0]}: name the "
                    "folder that the run has loaded its model from (--base)"
                )

    def _plain(self, name: str) -> str:
        """A parameter's name in the merged model."""
        return self._adapters.place(name)[1].removeprefix(ROOT)

    def specs(self) -> list[Spec]:
        """The merged model's weights. Of a module that was trained as a copy (`modules_to_save`) the copy is taken."""
        shapes = {
            self._plain(name): tuple(p.shape) for name, p in self._model.named_parameters() if self._is_kept(name)
        }
        specs = [Spec(name, self._dtype, shape) for name, shape in shapes.items()]
        return specs + [Spec(self._plain(name), b.dtype, tuple(b.shape)) for name, b in self._buffers.items()]

    def _is_kept(self, name: str) -> bool:
        """Whether the merged model has a weight for this parameter: not for an adapter, nor for a copy's original."""
        is_adapters, _ = self._adapters.place(name)
        return ".modules_to_save." in name if is_adapters else ".original_module." not in name

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        done: set[str] = set()
        for name, _ in list(self._model.named_parameters()):
            layer = next((at for at in self._layers if name.startswith(f"{at}.")), None)
            if layer is None:
                if self._is_kept(name):
                    yield self._plain(name), self._value(name)
            elif layer not in done:
                done.add(layer)
                yield from self._merged(layer)
        for name, buffer in self._buffers.items():
            yield self._plain(name), self._read(name).to(buffer.dtype)

    @torch.no_grad()
    def _merged(self, at: str) -> Iterator[tuple[str, torch.Tensor]]:
        layer: Any = self._layers[at]
        for name, p in list(layer.named_parameters()):
            torch._C._swap_tensor_impl(p, nn.Parameter(self._value(f"{at}.{name}"), requires_grad=False))
        layer.merge()
        for name, p in layer.named_parameters():
            if name.startswith("base_layer."):
                yield self._plain(f"{at}.{name}"), p.data.to(self._dtype)
            torch._C._swap_tensor_impl(p, nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False))

    def _value(self, name: str) -> torch.Tensor:
        """A parameter's value: the base in the dtype of the export, adapters in their own."""
        is_adapters, _ = self._adapters.place(name)
        return self._read(name) if is_adapters and not self._is_kept(name) else self._read(name).to(self._dtype)

    def _read(self, name: str) -> torch.Tensor:
        if name in self._saved_values:
            return self._saved_values[name]
        assert self.base is not None
        value = self.base.stored(self._plain(name))
        there: str | None = self._base_state.get("sums", {}).get(name)
        if there is not None and ops.sum_in_form(value, there.split()[0]) != there:
            self._refuse_base(self._plain(name))
        return value.values() if isinstance(value, Quantised) else value

    def _refuse_base(self, name: str) -> None:
        assert self.base is not None
        raise CheckpointError(
            f"--merge needs the base that the run of checkpoint {self._saved.folder} has trained its adapters over, "
            f"got {self.base.folder}, in which {name} differs: name the folder that the run has loaded its model from "
            "(--base); if PEFT changed the base at the start (PiSSA, OLoRA), load the checkpoint into an engine, call "
            "merge_and_unload there and save_pretrained"
        )

    def compare_older_base(self, make_model: Callable[[], nn.Module]) -> None:
        """Compares the base with a checkpoint that has no sums of it. `make_model` makes the run's model on the meta
        device."""
        state, source = self._base_state, self.base
        if "sums" in state or source is None:
            return
        reason = "has no hash of its base"
        if "sha256" in state:
            model = make_model()
            settings = self._saved.engine_state["common"]["ds_config"]
            section = settings.get("ds_zo", {}) if isinstance(settings, dict) else {}
            read = lambda name: source.stored(self._plain(name))  # noqa: E731
            if older_base.is_of(
                self._saved.backend_state, read, model=model, block_paths=section.get("stream", {}).get("blocks")
            ):
                return
            formats = state.get("stored_as", "fewer bits")
            if set(formats.split()) <= {str(p.dtype).removeprefix("torch.") for p in model.parameters()}:
                self._refuse_base("a weight")
            reason = f"has a hash of its base as {formats}, and does not name the device that encoded the base"
        warn(
            f"whether {source.folder} is the base of the run is not known, because checkpoint {self._saved.folder} "
            f"{reason}: compare outputs of the merged model with those of the run"
        )


def _base_of(saved: Saved, base: Path | None) -> SafetensorsSource:
    """The folder of the base weights that the checkpoint leaves out."""
    recorded = (saved.backend_state.get("base") or {}).get("source")
    folder = base or (None if recorded in (None, IN_MEMORY, "NoneType") else Path(recorded))
    if folder is None:
        raise CheckpointError(f"checkpoint {saved.folder} has no base weights: name their folder (--base)")
    try:
        return SafetensorsSource(folder)
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {saved.folder} has no base weights, and its run has read them from {recorded}, got {folder}, "
            "which has no safetensors: name the folder of the base model (--base)"
        ) from None
