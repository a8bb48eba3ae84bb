"""Times one layer's forward, backward and update on the GPU and on the CPU: the LSP paper's Tables 1 and 5.

The times show which of the three can move to the host: the update can, the others cannot. The GPU computes in bf16. The
CPU computes in float32, because few CPUs have fast 16-bit products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_zo.bench.measure import seconds_of
from ds_zo.planner.models import load_config
from ds_zo.planner.table import grid
from ds_zo.streaming.blocks import find_blocks


@dataclass(frozen=True)
class LayerTimes:
    """Times of one model and batch. A device that the machine does not have has no entry."""

    model: str
    batch: int
    seq: int
    num_layers: int
    parameters_gb: float
    states_gb: float
    """GB of Adam's master weights and two moments in float32, of the whole model."""
    seconds: dict[str, dict[str, float]]
    """Seconds by device, then by "forward", "backward" and "update", of one layer."""

    def render(self) -> str:
        rows = [
            [device, *(f"{times[phase] * 1e3:.2f}" for phase in ("forward", "backward", "update"))]
            for device, times in self.seconds.items()
        ]
        title = (
            f"{self.model}: {self.num_layers} layers, {self.parameters_gb:.1f} GB of parameters, "
            f"{self.states_gb:.1f} GB of optimizer states; {self.batch} x {self.seq} tokens, ms a layer"
        )
        return "\n".join([title, "", *grid(["device", "FWD", "BWD", "UPD"], rows)])


def profile_layers(name: str, *, batch: int, seq: int) -> LayerTimes:
    """Makes two layers of the model with random weights and times one of them."""
    from transformers import AutoModelForCausalLM

    config = load_config(name, seq=seq)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole.tie_weights()
    num_layers, numel = len(find_blocks(whole)), sum(p.numel() for p in whole.parameters())
    cut = load_config(name, seq=seq)
    cut.num_hidden_layers = 2
    cut.use_cache = False
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    seconds = {device: _time_layer(cut, torch.device(device), batch=batch, seq=seq) for device in devices}
    return LayerTimes(name, batch, seq, num_layers, 2 * numel / 1e9, 12 * numel / 1e9, seconds)


def _time_layer(config: Any, device: torch.device, *, batch: int, seq: int) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layer = next(iter(find_blocks(model).values()))
    call = _captured_call(model, layer, torch.zeros(batch, seq, dtype=torch.long, device=device))
    repeats = 5 if device.type == "cuda" else 1

    def forward() -> torch.Tensor:
        found = call()
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    def forward_and_backward() -> None:
        forward().float().sum().backward()

    with torch.no_grad():
        forward_s = seconds_of(forward, device, repeats=repeats)
    both_s = seconds_of(forward_and_backward, device, repeats=repeats)
    return {
        "forward": forward_s,
        "backward": max(0.0, both_s - forward_s),
        "update": _update_s(layer, device, repeats=repeats),
    }


def _captured_call(model: nn.Module, layer: nn.Module, ids: torch.Tensor) -> Callable[[], Any]:
    """Returns a call of the layer with the arguments that its model gives it."""
    seen: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.update(args=args, kwargs=kwargs)

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    args = tuple(a.detach().requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a for a in seen["args"])
    return lambda: layer(*args, **seen["kwargs"])


def _update_s(layer: nn.Module, device: torch.device, *, repeats: int) -> float:
    """Seconds of fused Adam over a float32 master of the layer."""
    numel = sum(p.numel() for p in layer.parameters())
    master = nn.Parameter(torch.zeros(numel, device=device))
    master.grad = torch.full_like(master, 1e-3)
    adam = torch.optim.AdamW([master], lr=1e-4, fused=True)
    return seconds_of(adam.step, device, repeats=repeats)
