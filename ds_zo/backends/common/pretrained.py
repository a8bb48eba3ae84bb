"""`save_pretrained` of a model whose weights are not all in its parameters: shard by shard, no second copy of them.

transformers takes each weight out of a state dict when it writes the shard that the weight belongs to. So it is given
stand-ins, which are read from the host store at that moment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.plain_copies import StandIn
from ds_zo.checkpoint.snapshot import persistent_buffers

_SHARD = "5GB"
"""`max_shard_size` where the caller names none: transformers' own default is larger than most models."""


class _Later(torch.Tensor):
    """Shape and dtype of a weight; `contiguous()`, which transformers calls as it writes, is the weight itself."""

    read: Callable[[], torch.Tensor]

    @staticmethod
    def of(parameter: nn.Parameter, read: Callable[[], torch.Tensor]) -> _Later:
        hollow = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        found: _Later = torch.Tensor._make_subclass(_Later, hollow)
        found.read = read
        return found

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.read()


class PretrainedSaving:
    """Stands before a transformers model's `save_pretrained` while an engine has its weights."""

    def __init__(self, module: nn.Module, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
        self._module = module
        self._read = read
        self._save: Callable[..., Any] | None = None
        self._stand_in: StandIn | None = None
        if _is_plain_pretrained(module):
            save: Callable[..., Any] = module.save_pretrained  # type: ignore[assignment]
            self._save = save
            self._stand_in = StandIn(self._save_by_shard, save)
            object.__setattr__(module, "save_pretrained", self._stand_in)

    def close(self) -> None:
        if self._stand_in is not None and self._module.__dict__.get("save_pretrained") is self._stand_in:
            object.__delattr__(self._module, "save_pretrained")

    def _save_by_shard(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._save is not None
        # Conversions to another layout of the weights on disk need all of them; so do adapters and quantizers.
        if not args and kwargs.get("state_dict") is None and not _converts(self._module):
            kwargs["state_dict"] = self._stand_ins()
            kwargs["save_original_format"] = False
            kwargs.setdefault("max_shard_size", _SHARD)
        return self._save(save_directory, *args, **kwargs)

    def _stand_ins(self) -> dict[str, torch.Tensor]:
        """By the names of `state_dict`, a tied weight once, under the name that transformers loads it by."""
        tied = getattr(self._module, "all_tied_weights_keys", None) or {}
        names: dict[int, str] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, p in self._module.named_parameters(remove_duplicate=False):
            if id(p) not in names or (names[id(p)] in tied and name not in tied):
                names[id(p)] = name
            parameters[id(p)] = p
        found: dict[str, torch.Tensor] = {
            name: _Later.of(parameters[key], lambda p=parameters[key]: self._read(p).cpu().contiguous())  # type: ignore[misc]
            for key, name in names.items()
        }
        found |= {name: buffer.detach() for name, buffer in persistent_buffers(self._module)}
        return found


def _is_plain_pretrained(module: nn.Module) -> bool:
    transformers = sys.modules.get("transformers.modeling_utils")  # imported where there is a model of its own
    return (
        transformers is not None
        and isinstance(module, transformers.PreTrainedModel)
        and not getattr(module, "_hf_peft_config_loaded", False)
        and getattr(module, "hf_quantizer", None) is None
    )


def _converts(module: nn.Module) -> bool:
    conversions = getattr(module, "_weight_conversions", None)
    if conversions is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = get_model_conversion_mapping(module, add_legacy=False)
    return bool(conversions)
