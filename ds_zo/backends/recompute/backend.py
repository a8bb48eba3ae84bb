"""Access to weights for backends whose blocks may be recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ds_zo.backends.common.backend import Backend
from ds_zo.backends.common.ownership import LowBits
from ds_zo.backends.common.unit_weights import UnitWeights
from ds_zo.backends.common.weights_by_name import ResidentWeights, WeightsByName
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.backends.recompute.model_blocks import ModelBlocks, RecomputedBlocks
from ds_zo.backends.recompute.recomputation import Recomputation, make_block_store
from ds_zo.backends.recompute.stored_weights import StoredWeights
from ds_zo.checkpoint.reader import Saved
from ds_zo.checkpoint.snapshot import Snapshot
from ds_zo.streaming.transport import MakeTransport
from ds_zo.streaming.use import Preparation


class RecomputedBackend(Backend):
    """A backend that streams blocks and recomputes them, or keeps the whole module on the device. Its constructor calls
    `make_blocks`, unless it sets `blocks` itself, and then `access_weights`."""

    blocks: ModelBlocks
    weights_by_name: WeightsByName

    def make_blocks(
        self,
        *,
        preparation: Preparation | None = None,
        compiler: BlockCompiler | None = None,
        transport: MakeTransport | None = None,
    ) -> None:
        """Makes `blocks`, whose weights are stored in the dtype of the model. Moves them to their storage if
        `places_parameters` says so. `preparation`: what is done with a block in each use. None: nothing. `transport`:
        see `BlockStore`."""
        module, config = self.module, self.config
        if not self.places_parameters(config):
            paths = config.section.stream.blocks
            self.blocks = ModelBlocks(module, device=self.device, paths=paths, compiler=compiler)
            return
        store = make_block_store(
            module,
            config,
            param_groups=self.param_groups,
            device=self.device,
            process_group=self.process_group,
            transport=transport,
        )
        recomputation = Recomputation(module, store, config, preparation=preparation or Preparation())
        self.blocks = RecomputedBlocks(module, recomputation, compiler=compiler)

    def access_weights(
        self,
        *,
        low_bits: LowBits | None = None,
        settle: Callable[[], None] | None = None,
        has_pending: Callable[[], bool] = lambda: False,
    ) -> None:
        """Makes `weights_by_name`. `low_bits`: what is kept of weights besides the parameters. `settle` applies pending
        updates. `has_pending`: whether there are any. None of them may refer to the backend."""
        if isinstance(self.blocks, RecomputedBlocks):
            storage = StoredWeights(self.module, self.blocks.recomputation, settle=settle)
            self.weights_by_name = UnitWeights(self.module, storage, low_bits=low_bits)
        else:
            self.weights_by_name = ResidentWeights(
                self.module,
                device=self.device,
                low_bits=low_bits,
                settle=settle,
                has_pending=has_pending,
            )

    def snapshot(self, *, hold: bool, omit_frozen: bool = False) -> Snapshot:
        """A snapshot with the number of tiles."""
        found = super().snapshot(hold=hold, omit_frozen=omit_frozen)
        state = {**found.state(), "tiles": self.blocks.num_tiles}
        return Snapshot(found.weights_files, lambda: state)

    def restore(self, saved: Saved, *, resume: bool, strict: bool = True) -> None:
        super().restore(saved, resume=resume, strict=strict)
        if resume:
            self.blocks.keep_tiles(saved.backend_state.get("tiles"))

    def plain_parameters(self) -> AbstractContextManager[None]:
        """Context in which parameters do not report reads ([Note: direct access to parameters])."""
        return self.weights_by_name.unwatched()

    def frozen_unread(self) -> AbstractContextManager[None]:
        return self.weights_by_name.frozen_undecoded()

    def stored(self) -> dict[str, torch.Tensor]:
        return self.weights_by_name.stored()

    @property
    def stored_are_copies(self) -> bool:
        return self.weights_by_name.stored_are_copies

    def read_stored(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self.weights_by_name.read_stored(name, value)

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        self.weights_by_name.write_stored(name, target, value)

    def stored_changed(self) -> None:
        self.weights_by_name.stored_changed()

    @contextmanager
    def readable_by_writers(self) -> Iterator[None]:
        with self.weights_by_name.readable(reads=self.is_writer):
            yield
