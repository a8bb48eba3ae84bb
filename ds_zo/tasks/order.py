"""The order of training examples, as a pure function of the seed and the position."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SPAN = 16
"""Number of batches whose examples are sorted by length together: enough for little padding, few enough for a random
order."""
MAX_SEED = 2**42
"""The seed of an epoch, which is the order's times 2**20 plus the epoch, is a signed number of 64 bits."""


class SeededOrder:
    """An endless sequence of shuffled epochs: `order[position]` is the index of an example. A resumed run continues
    from its position."""

    def __init__(self, num_examples: int, *, seed: int) -> None:
        if num_examples < 1:
            raise ValueError(f"an order needs at least one example, got {num_examples}")
        self.num_examples = num_examples
        """Number of examples in an epoch."""
        self.seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self.num_examples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            self._permutation = self.shuffled(generator)
            self._epoch = epoch
        return self._permutation[index]

    def shuffled(self, generator: torch.Generator) -> list[int]:
        return torch.randperm(self.num_examples, generator=generator).tolist()

    def batch(self, position: int, size: int) -> list[int]:
        """The indices of the `size` examples from `position` on."""
        return [self[position + i] for i in range(size)]


class GroupedOrder(SeededOrder):
    """An order whose batches have examples of similar lengths. Batches are in random order. Each epoch leaves out the
    examples that do not fill a last batch, different ones in each epoch."""

    def __init__(self, lengths: Sequence[int], *, batch_size: int, seed: int) -> None:
        if not 1 <= batch_size <= len(lengths):
            raise ValueError(f"grouping by length needs examples for a batch of {batch_size}, got {len(lengths)}")
        super().__init__(len(lengths) - len(lengths) % batch_size, seed=seed)
        self.lengths = lengths
        self.batch_size = batch_size

    def shuffled(self, generator: torch.Generator) -> list[int]:
        drawn = torch.randperm(len(self.lengths), generator=generator).tolist()[: self.num_examples]
        size, span = self.batch_size, SPAN * self.batch_size
        spans = (sorted(drawn[i : i + span], key=self.lengths.__getitem__) for i in range(0, len(drawn), span))
        batches = [found[i : i + size] for found in spans for i in range(0, len(found), size)]
        return [index for i in torch.randperm(len(batches), generator=generator).tolist() for index in batches[i]]
