"""`save_pretrained` of a model whose parameters do not hold all weights, without a copy of the whole model.

transformers takes the weights of one shard at a time out of a state dict. So it is given placeholders, and each weight
is read from its storage when its shard is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo import versions
from ds_zo.backends.common.plain_copies import StandIn
from ds_zo.checkpoint.snapshot import persistent_buffers

_SHARD = "5GB"
"""`max_shard_size` if the caller passes none. The default of transformers is larger than most models."""


class _Placeholder(torch.Tensor):
    """A meta tensor with the shape and dtype of a weight. Its `contiguous()`, which transformers calls when it writes a
    shard, reads and returns the weight."""

    read: Callable[[], torch.Tensor]
    """Returns the weight."""

    @staticmethod
    def of(parameter: nn.Parameter, read: Callable[[], torch.Tensor]) -> _Placeholder:
        hollow = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        found: _Placeholder = torch.Tensor._make_subclass(_Placeholder, hollow)
        found.read = read
        return found

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.read()


class PretrainedSaving:
    """Replaces the `save_pretrained` of a transformers model until `close`."""

    def __init__(self, module: nn.Module, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """`read` returns the current weights of a parameter."""
        self._module, self._read = module, read
        self._stand_in: StandIn | None = None
        if _is_plain_pretrained(module):
            own: Any = module.save_pretrained
            self._stand_in = StandIn.put(module, "save_pretrained", partial(self._save_by_shard, own))

    def close(self) -> None:
        if self._stand_in is not None:
            self._stand_in.remove()

    def _save_by_shard(self, save: Callable[..., Any], save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        # If the model's files have another layout than its parameters, transformers needs all weights to convert them.
        if not args and kwargs.get("state_dict") is None and not versions.converts_weights(self._module):
            kwargs["state_dict"] = self._placeholders()
            kwargs |= versions.saving_arguments()
            kwargs.setdefault("max_shard_size", _SHARD)
        return save(save_directory, *args, **kwargs)

    def _placeholders(self) -> dict[str, torch.Tensor]:
        """Placeholders of all weights, and the buffers, by the names of `state_dict`. A tied weight occurs once, under
        the name by which transformers loads it."""
        tied = versions.tied_names(self._module)
        names: dict[int, str] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, p in self._module.named_parameters(remove_duplicate=False):
            if id(p) not in names or (names[id(p)] in tied and name not in tied):
                names[id(p)] = name
            parameters[id(p)] = p
        found: dict[str, torch.Tensor] = {
            name: _Placeholder.of(parameters[key], lambda p=parameters[key]: self._read(p).cpu().contiguous())  # type: ignore[misc]
            for key, name in names.items()
        }
        found |= {name: buffer.detach() for name, buffer in persistent_buffers(self._module)}
        return found


def _is_plain_pretrained(module: nn.Module) -> bool:
    """Whether `module` is a transformers model without adapters and quantizers, which need all weights to be saved."""
    transformers = sys.modules.get("transformers.modeling_utils")  # it is imported if there is such a model
    return (
        transformers is not None
        and isinstance(module, transformers.PreTrainedModel)
        and not getattr(module, "_hf_peft_config_loaded", False)
        and getattr(module, "hf_quantizer", None) is None
    )
