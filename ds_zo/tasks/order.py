"""The order in which examples are visited, as a pure function of the seed and the position."""

from __future__ import annotations

import torch


class SeededOrder:
    """Example `position` of an endless stream of shuffled epochs: resuming means going on from a position."""

    def __init__(self, num_examples: int, *, seed: int) -> None:
        if num_examples < 1:
            raise ValueError(f"an order needs at least one example, got {num_examples}")
        self.num_examples = num_examples
        self.seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self.num_examples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            self._permutation = torch.randperm(self.num_examples, generator=generator).tolist()
            self._epoch = epoch
        return self._permutation[index]

    def batch(self, position: int, size: int) -> list[int]:
        """The `size` examples from `position` on."""
        return [self[position + i] for i in range(size)]
