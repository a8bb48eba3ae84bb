"""Compares model folders by their weights, as `from_pretrained` of the client's own transformers loads them.

A folder of adapters stands for the model with these adapters merged. Runs in the environment of a client: python
weights.py BASE TRAINED OTHER... prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def _load(folder: str) -> dict[str, torch.Tensor]:
    if Path(folder, "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).merge_and_unload()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return dict(model.state_dict())


def _largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float | None:
    """None where names or shapes differ."""
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return None
    return max((a[name] - b[name]).abs().max().item() for name in a)


def main() -> None:
    base, trained, *others = sys.argv[1:]
    weights = _load(trained)
    result = {
        "finite": all(value.isfinite().all().item() for value in weights.values()),
        "moved": _largest_difference(_load(base), weights),
        "differences": [_largest_difference(_load(other), weights) for other in others],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
