"""Writes a ZO run to a checkpoint, and restores a run from one.

A checkpoint holds the planes as they are stored, the units' versions, and the log of pending updates. A resumed run has
the same bits as the saved run, in every storage format.

[Note: frozen base] A base that is stored as `frozen_dtype` says and was read from files is not written again. The
checkpoint has its source, its formats, and 64-bit sums of its values before they were encoded. So a base is compared
with one in another format, and with the model's files. A run that loads the checkpoint must have the same base.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo import ops
from ds_zo.backends.common.frozen_base import check_base, describe_base, refuse_base, sums_of_units
from ds_zo.backends.zo.materialise import check_whole
from ds_zo.backends.zo.replay_log import CAPACITY
from ds_zo.backends.zo.store import ZOStore
from ds_zo.checkpoint import older_base
from ds_zo.checkpoint.errors import CheckpointError, reading_content
from ds_zo.checkpoint.files import hash_json, hash_tensors
from ds_zo.checkpoint.layout import (
    check_stored,
    describe,
    difference,
    fill_unit,
    host_tensors,
    shapes_of,
    still_of,
    unit_key,
    unit_tensors,
)
from ds_zo.checkpoint.reader import Saved
from ds_zo.checkpoint.recorder import TrajectoryRecorder
from ds_zo.checkpoint.replay import saved_values
from ds_zo.checkpoint.snapshot import Snapshot, WeightsFile, module_files, persistent_buffers
from ds_zo.checkpoint.stock import check_forms
from ds_zo.streaming.fold_schedule import FOLD_ORDER, turn
from ds_zo.streaming.loading import source_of
from ds_zo.streaming.units import Unit


class ZOCheckpoint:
    """Makes snapshots of one model's block store, and restores them."""

    def __init__(self, store: ZOStore, module: nn.Module, *, aliases: Mapping[str, str]) -> None:
        self._store = store
        self._module = module
        self._aliases = dict(aliases)

    # Saving

    def snapshot(self, *, hold: bool, omit_frozen: bool, omit_base: bool) -> Snapshot:
        """Returns the files to write. With `hold`, training goes on while they are written.

        See [Note: replaced buffers], and for `omit_base` [Note: frozen base].
        """
        store, units = self._store, self._store.blocks.placement.units
        omitted = {p.name for u in units for p in u.placed if omit_frozen and not p.parameter.requires_grad}
        base = set(store.base) if omit_base else set()
        omitted |= base
        for unit in units:
            check_whole(unit)
        if not hold:  # `_weights_file` waits for each unit's download
            store.blocks.streams.compute.synchronize()
        state = {**self.facts(), "omitted": sorted(omitted), "rows": store.log.rows.cpu().clone()}
        if base:
            state["base"] = self._describe_base(omitted)
        state["units"] = [{**describe(u), "version": u.version} for u in units]
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(self._module)}
        state["buffers"] = sorted(buffers)
        order = sorted(range(len(units)), key=lambda i: self._steps_to_fold(units[i]))
        of_buffers = module_files(buffers, hold=hold)
        order += range(len(units), len(units) + len(of_buffers))
        held: list[WeightsFile] = []
        try:
            for unit in units:
                held.append(self._weights_file(unit, hold=hold, omitted=omitted))
        except BaseException:  # no memory for a copy, say: code that rewrites weights would wait for ever
            for weights_file in held:
                weights_file.written()
            raise
        return Snapshot([*held, *of_buffers], lambda: state, order=order)

    def is_as_replayed(self, first_step: int) -> bool:
        """Whether the stored bytes are those of a replay from `first_step`, which folds units where training passes do.
        A read of a parameter may have folded a unit earlier."""
        last = self._store.log.length - 1

        def is_early(unit: Unit) -> bool:
            every = self._store.interval if unit.is_block else 1
            last_fold = last - (last + turn(unit.index, every)) % every
            return unit.trainable and unit.version > max(last_fold, first_step)

        return not any(map(is_early, self._store.blocks.placement.units))

    def recorder(self) -> TrajectoryRecorder:
        """A recorder for the trajectory of a run that starts here. Reads all weights once, for the hash of the starting
        point."""
        store = self._store
        digests = {unit_key(describe(unit)): hash_tensors(host_tensors(unit)) for unit in store.blocks.placement.units}
        on_device = store.blocks.device.type == "cuda"
        return TrajectoryRecorder(
            self._header, step=store.log.length, base_sha256=hash_json(digests), on_device=on_device
        )

    def _header(self) -> dict[str, Any]:
        """The trajectory's header: the model, the facts that determine its updates, and the layout of its units."""
        config = getattr(self._module, "config", None)
        return {
            "model": getattr(config, "_name_or_path", None) or type(self._module).__name__,
            "facts": {name: value for name, value in self.facts().items() if name != "step"},
            "capacity": CAPACITY,
            "width": self._store.log.rows.shape[1],
            "units": [describe(unit) for unit in self._store.blocks.placement.units],
            "aliases": self._aliases,
            "buffers": [name for name, _ in persistent_buffers(self._module)],
        }

    def facts(self) -> dict[str, Any]:
        """The settings that determine how updates are made and stored, besides the units themselves."""
        store = self._store
        return {
            "step": store.log.length,
            "noise_version": ops.NOISE_VERSION,
            "seed": store.perturbation.seed,
            "distribution": store.perturbation.distribution,
            "rounding": store.perturbation.rounding,
            "num_directions": store.log.num_directions,
            "num_groups": store.log.num_groups,
            "interval": store.interval,
            "fold_order": FOLD_ORDER,
            "device": store.blocks.device.type,
        }

    def _weights_file(self, unit: Unit, *, hold: bool, omitted: set[str]) -> WeightsFile:
        """One unit's tensors as a file of the snapshot. With `hold`, the claim keeps them as they are until they are
        written."""
        if all(placed.name in omitted for placed in unit.placed):
            return WeightsFile(dict, 0, unit_key(describe(unit)))
        if hold:
            if self._store.blocks.store.num_sharers > 1:
                self._store.blocks.runtime.host_wait(unit)
            held = self._store.claims.claim(unit)
            return WeightsFile(
                lambda: _without(unit_tensors(unit, *held.buffers()), omitted),
                unit.nbytes + unit.low_nbytes,
                unit_key(describe(unit)),
                held.written,
            )

        def tensors() -> Mapping[str, torch.Tensor]:
            self._store.blocks.runtime.host_wait(unit)
            return _without(host_tensors(unit), omitted)

        return WeightsFile(tensors, unit.nbytes + unit.low_nbytes, unit_key(describe(unit)))

    def _describe_base(self, names: set[str]) -> dict[str, Any]:
        units = self._store.blocks.placement.units
        parts = [p for u in units for p in u.parts if p.frozen and any(placed.name in names for placed in p.placed)]
        own = names & {placed.name for part in parts for placed in part.placed}
        sums = sums_of_units(units, own)
        return describe_base(self._module, sums, (part.stored_as for part in parts))

    def _check_base(self, saved: Saved, omitted: set[str]) -> None:
        """Raises if the checkpoint was saved over another frozen base than this run's. See [Note: frozen base]."""
        base = saved.backend_state.get("base")
        if base is None:
            return
        units = self._store.blocks.placement.units
        if "sums" in base:
            check_base(base, self._describe_base(set(base["sums"])), folder=saved.folder)
        elif _storage(map(describe, units), omitted) != _storage(saved.backend_state["units"], omitted):
            logger.warning(
                f"ds_zo: the frozen base of checkpoint {saved.folder} is not compared with this run's, because it was "
                f"stored in another format; the run that saved it read {base['source']}"
            )
        elif base["sha256"] != older_base.hash_of_units(units, omitted):
            refuse_base(base, folder=saved.folder, found=source_of(self._module))

    def _steps_to_fold(self, unit: Unit) -> int:
        """Steps until the unit's next fold. Units that the snapshot copies come last, because no fold waits for them to
        be written."""
        step, interval = self._store.log.length, self._store.interval
        return (-(step + turn(unit.index, interval))) % interval if unit.streamed or unit.low_streamed else interval

    # Loading

    @torch.no_grad()
    def restore(self, saved: Saved, *, resume: bool, strict: bool) -> None:
        """Restores a checkpoint. Without `resume` only weights and buffers are taken, and this run keeps its log and
        its step."""
        state = saved.backend_state
        with reading_content(saved.folder, "its state"):
            self._check_state(saved)
        omitted = set(state["omitted"])
        there = {name: shape for name, shape in shapes_of(state["units"]).items() if name not in omitted}
        here = {name: shape for name, shape in self._shapes().items() if name not in omitted}
        wrong = difference(there, here)
        if wrong is not None and (strict or not there.keys() & here.keys()):
            raise CheckpointError(f"checkpoint {saved.folder} is of another model: {wrong}")
        self._check_base(saved, omitted)
        buffers = dict(persistent_buffers(self._module))
        forms = {name: saved.form(name) for name in state["buffers"] if name in buffers}
        check_forms(forms, buffers, of=f"checkpoint {saved.folder}")
        if resume and self._store.must_choose_interval:
            self._store.set_interval(state["interval"])
        if resume:
            self._take_still(state["units"])
        reasons = self._differences(state) if wrong is None else [f"models ({wrong})"]
        if resume and not reasons:
            self._restore_planes(saved, omitted)
        else:
            self._restore_values(saved, partial=wrong is not None or bool(omitted))
            if resume:
                self._store.log.length = state["step"]
                logger.warning(
                    f"ds_zo: the checkpoint and this run differ in {', '.join(reasons)}: the run resumes from the "
                    "checkpoint's weights with every update applied, but not bit for bit as the saved run would"
                )
                for unit in self._store.blocks.placement.units:
                    unit.rewritten(self._store.log.length)
        for name in forms:
            buffers[name].copy_(saved.tensor(name))
        self._store.blocks.runtime.invalidate_slots()

    def _take_still(self, descriptions: Iterable[Mapping[str, Any]]) -> None:
        """Takes over which rows get no noise, so that a resumed run perturbs the same rows as the saved one."""
        still = {p["name"]: still_of(p) for unit in descriptions for part in unit["parts"] for p in part["params"]}
        for part in (part for unit in self._store.blocks.placement.units for part in unit.parts):
            for p in part.placed:
                p.still = still.get(p.name, p.still)
            part.forget_tables()

    def _check_state(self, saved: Saved) -> None:
        """Raises if a field of the saved state has the wrong type or shape."""
        state = saved.backend_state
        check_stored(state, saved.form)
        names = ("step", "seed", "noise_version", "num_directions", "num_groups", "interval")
        numbers = [state[name] for name in names] + [unit["version"] for unit in state["units"]]
        if not all(type(number) is int for number in numbers) or not 1 <= state["interval"] <= CAPACITY:
            raise TypeError(f"numbers must be integers, with an interval from 1 to {CAPACITY}, got {numbers}")
        if not set(state["buffers"]) <= saved.names():
            raise KeyError(f"buffers must all be stored, got {state['buffers']}")
        shape = (CAPACITY, 1 + state["num_groups"] * (1 + state["num_directions"]))
        if state["rows"].dtype is not torch.float32 or tuple(state["rows"].shape) != shape:
            raise TypeError(
                f"rows must be float32 of {shape}, got {state['rows'].dtype} of {tuple(state['rows'].shape)}"
            )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {p.name: tuple(p.parameter.shape) for u in self._store.blocks.placement.units for p in u.placed}

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        """Settings in which the checkpoint and this run differ, as text. If there are any, a resumed run has other
        bits."""
        ours, theirs = self.facts(), {"fold_order": 1, **state}
        names = ("noise_version", "seed", "distribution", "rounding", "num_directions", "num_groups", "interval")
        found = [f"{n} ({theirs[n]} there, {ours[n]} here)" for n in (*names, "fold_order") if theirs[n] != ours[n]]
        there = {unit_key(u): {k: v for k, v in u.items() if k != "version"} for u in state["units"]}
        here = {unit_key(u): u for u in map(describe, self._store.blocks.placement.units)}
        if there != here:
            found.append("blocks, groups or storage formats")
        return found

    def _restore_planes(self, saved: Saved, omitted: set[str]) -> None:
        """Restores stored planes, versions and the log, bit for bit."""
        store, state = self._store, saved.backend_state
        versions = {unit_key(u): u["version"] for u in state["units"]}
        with store.blocks.rewriting(*store.blocks.placement.units) as writes:
            for unit in store.blocks.placement.units:
                if writes(unit):
                    fill_unit(unit, saved.tensor, omitted=omitted)
                unit.rewritten(versions[unit_key(describe(unit))])
                unit.bind_stored()
        store.base &= omitted
        store.log.rows.copy_(state["rows"])
        store.log.length = state["step"]

    def _restore_values(self, saved: Saved, *, partial: bool) -> None:
        """Restores every weight's value at the saved step, in this run's storage format. `partial`: the checkpoint
        lacks some weights."""
        store = self._store
        where = {p.name: (unit, p) for unit in store.blocks.placement.units for p in unit.placed}
        if partial:  # weights that the checkpoint lacks keep their values, with pending updates
            for unit in store.blocks.placement.units:
                store.materialiser.fold_now(unit)
        with store.blocks.rewriting(*store.blocks.placement.units) as writes:
            for there, value in saved_values(saved, device=store.blocks.device, exact=True):
                if there.name not in where:
                    continue
                unit, placed = where[there.name]
                store.base.discard(placed.name)
                if placed.parameter.shape == there.parameter.shape:
                    unit.store_one(placed, value, writes=writes(unit))
        for unit in store.blocks.placement.units:
            unit.rewritten(store.log.length)
            unit.bind_stored()


def _without(tensors: Mapping[str, torch.Tensor], omitted: set[str]) -> Mapping[str, torch.Tensor]:
    """The tensors of parameters that are not omitted. A tensor's name is its parameter's, with `:plane` after it for
    planes besides the storage."""
    return {name: value for name, value in tensors.items() if name.partition(":")[0] not in omitted}


def _storage(descriptions: Iterable[Mapping[str, Any]], names: set[str]) -> dict[str, tuple[str, list[int]]]:
    """Storage dtype and shape of these parameters, by name."""
    return {
        p["name"]: (part["wire"], p["shape"])
        for unit in descriptions
        for part in unit["parts"]
        for p in part["params"]
        if p["name"] in names
    }
