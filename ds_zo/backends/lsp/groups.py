"""All groups of a model: those whose Adam runs on the CPU, with what their trips share, and those that stay."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_zo.backends.lsp.host_group import DeviceGroup, GroupPhase, HostGroup, Links, Scratch
from ds_zo.backends.lsp.matrices import Group, MatrixState
from ds_zo.backends.lsp.payload import Carry
from ds_zo.backends.lsp.ranks import CollectiveThread
from ds_zo.backends.lsp.scheduler import UpdateQueue
from ds_zo.backends.lsp.shared_groups import SharedDeviceGroup, SharedHostGroup
from ds_zo.config import LSPParams, Resolved
from ds_zo.optim.subspace_adam import Moments
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.units import Unit

_CORES_LEFT_TO_PYTHON = 2
_NUMEL_EACH = 12_000_000
"""That a thread of Adam's takes some 35 ms for, which the model's own computing hides. More threads would end sooner,
but spin between layers, beside the thread that launches kernels: LLaMA-1.3B at d = 512 took 187 ms a step with two of
them and 210 with fourteen."""
_LEAST_THREADS = 2

Kept = tuple[MatrixState, Moments | None, dict[str, tuple[Carry, int]]]
"""A parameter with its states and the errors that payloads carry, by side; without, where another rank has them."""


class LSPGroups:
    def __init__(
        self,
        groups: Sequence[Group],
        settings: LSPParams,
        *,
        config: Resolved,
        ranks: CollectiveThread | None,
        device: torch.device,
        max_norm: float,
        unit_of: Mapping[int, Unit],
    ) -> None:
        """See [Note: what trains how]. `unit_of`: parameters that come and go."""
        self.on_host: list[HostGroup] = []
        self.on_device: list[DeviceGroup] = []
        self.store = HostStore(device, pin=True)
        numel = sum(math.prod(slot.shape) for group in groups for slot in group.slots)
        self.queue = UpdateQueue(num_threads=_num_threads(device, numel, shared=ranks is not None), device=device)
        self.links: Links | None = None
        self._settings, self._ranks, self._device, self._max_norm = settings, ranks, device, max_norm
        self._owned = config.zero_stage > 0
        self._scratch = Scratch()
        vectors: list[MatrixState] = []
        for group in groups:
            unit = unit_of.get(id(group.slots[0].parameter))
            slots = group.slots
            if config.offload_optimizer and unit is None:
                vectors += [slot for slot in slots if slot.parameter.ndim < 2]
                slots = [slot for slot in slots if slot.parameter.ndim >= 2]
            if not slots:
                continue
            if config.offload_optimizer:
                self.on_host.append(self._host_group(Group(group.name, group.is_block, slots, group.modules)))
                self.on_host[-1].unit = unit
            else:
                self.on_device.append(self._device_group(slots))
        if vectors:
            self.on_device.append(self._device_group(vectors))
        if device.type == "cuda" and self.on_host:
            landing = [group.h_up.numel() for group in self.on_host if not group.lands_in_place]
            self.links = Links(device, landing_bytes=max(landing, default=0))
            for host_group in self.on_host:
                host_group.links = self.links

    def _host_group(self, group: Group) -> HostGroup:
        places: dict[str, Any] = {
            "device": self._device,
            "store": self.store,
            "queue": self.queue,
            "scratch": self._scratch,
            "max_norm": self._max_norm,
        }
        if self._ranks is None:
            return HostGroup(group, self._settings, **places)
        owner = len(self.on_host) % self._ranks.size if self._owned else None
        return SharedHostGroup(group, self._settings, ranks=self._ranks, owner=owner, **places)

    def _device_group(self, slots: list[MatrixState]) -> DeviceGroup:
        places: dict[str, Any] = {"device": self._device, "max_norm": self._max_norm}
        if self._ranks is None:
            return DeviceGroup(slots, self._settings, **places)
        return SharedDeviceGroup(slots, self._settings, ranks=self._ranks, **places)

    def prefetch(self) -> None:
        """Uploads what the forward pass needs next, as far as it is there and has room."""
        for group in self.on_host:
            if group.moment is GroupPhase.DUE and not group.prefetch():
                return

    def take_back(self) -> None:
        """See [Note: taken back]."""
        for group in self.on_host:
            if group.moment is GroupPhase.UPDATING:
                group.take_back()

    def close(self) -> None:
        """Unpins host memory, after the last copy. (Of several ranks one may be gone, and its copies never end.)"""
        if self.links is not None and self._ranks is None:
            for stream in (self.links.down, self.links.up):
                stream.synchronize()
        self.store.close()

    def kept(self) -> list[Kept]:
        found: list[Kept] = []
        for group in self.on_host:
            if not group.keeps_states:
                found += [(slot, None, {}) for slot in group.slots]
                continue
            for i, (slot, moments) in enumerate(zip(group.slots, group.moments, strict=True)):
                found.append((slot, moments, {"down": (group.carry_down, i), "up": (group.carry_up, i)}))
        for device_group in self.on_device:
            pairs = zip(device_group.slots, device_group.moments, strict=True)
            found += [(slot, moments, {}) for slot, moments in pairs]
        return found

    def footprint(self, slots: Sequence[MatrixState]) -> dict[str, int]:
        """Bytes besides the weights; scratch of the products comes on top."""
        subspaces = [slot.subspace for slot in slots if slot.subspace is not None]
        on_device = sum(s.num_bytes for s in subspaces)
        on_device += sum(slot.total.nbytes for slot in slots if slot.total is not None)
        on_device += sum(m.num_bytes for group in self.on_device for m in group.moments)
        on_device += 0 if self.links is None else self.links.num_bytes
        on_device += sum(group.payload_bytes["device"] for group in self.on_host)
        on_host = sum(group.payload_bytes["host"] for group in self.on_host)
        on_host += self.store.nbytes + sum(m.num_bytes for group in self.on_host for m in group.moments)
        return {"device_bytes": on_device, "host_bytes": on_host}


def _num_threads(device: torch.device, numel: int, *, shared: bool) -> int | None:
    """On CUDA the main thread launches kernels meanwhile, and must not wait for a core. Launchers of several ranks may
    have told torch to use a single one: Adam may take this rank's share of the machine."""
    if device.type != "cuda":
        return None
    num_threads = torch.get_num_threads()
    if shared:
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
        num_threads = max(num_threads, len(os.sched_getaffinity(0)) // max(1, num_ranks))
    needed = max(_LEAST_THREADS, -(-numel // _NUMEL_EACH))
    return max(1, min(needed, num_threads - _CORES_LEFT_TO_PYTHON))
