"""The half of a backend's interface that reads and writes weights and states, for checkpoints and for users."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_zo.checkpoint.errors import CheckpointError, reading_content
from ds_zo.checkpoint.export import Spec, Stream
from ds_zo.checkpoint.reader import Saved
from ds_zo.checkpoint.recorder import TrajectoryRecorder
from ds_zo.checkpoint.snapshot import Snapshot, host_copy, module_files, without_aliases
from ds_zo.checkpoint.stock import Weights, check_forms, check_weights
from ds_zo.config import Resolved
from ds_zo.streaming.streams import current_stream


class StateAccess:
    """Weights and states of the current step, by name. The defaults fit weights that are a module's own, on its
    device."""

    module: nn.Module
    config: Resolved
    device: torch.device
    is_writer: bool = True
    """Whether this rank writes checkpoints. The engine sets it."""
    has_several_writers: bool = False
    """With DeepSpeed's `use_node_local_storage`, one rank of each machine writes. The engine sets it."""
    recorder: TrajectoryRecorder | None = None
    """Writes the trajectory that `ds_zo.checkpoint.trajectory` asks for. None where the configuration asks for none,
    and on ranks that do not write checkpoints."""

    # State for a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs besides weights and param groups: counters, moments. It is equal
        on all ranks. `snapshot` calls it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        """Loads a `state_dict`. `restore` calls it after the weights are written.

        With `load_optimizer_states=False` the caller has asked for weights only: counters and moments are reset to
        their initial values, and `state` is not used.
        """

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises if `load_state_dict` cannot load `state`. `restore` calls it before it changes any weight."""

    def module_state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Returns the module's `state_dict` with the weights of the current step, also where the backend has updates
        pending. The keywords are those of `nn.Module.state_dict`. `engine.module_state_dict` calls it."""
        return self.module.state_dict(**kwargs)

    def frozen_unread(self) -> AbstractContextManager[None]:
        """Context in which `module_state_dict` need not read frozen weights, because the caller drops them. The engine
        enters it for `exclude_frozen_parameters`."""
        return nullcontext()

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads a `state_dict` of the module. The engine calls it for a checkpoint that stock DeepSpeed has written. It
        raises before it changes a weight if a dtype or a shape differs."""
        here = dict(self.module.named_parameters(remove_duplicate=False))
        forms = {name: (v.dtype, tuple(v.shape)) for name, v in state.items() if isinstance(v, torch.Tensor)}
        check_forms(forms, here, of="the state dict")  # torch raises only after it has copied the tensors that fit
        self.module.load_state_dict(state, strict=strict)

    # Access to stored weights

    def stored(self) -> dict[str, torch.Tensor]:
        """Returns the storage of weights and buffers, by the names of `state_dict`. A caller that writes to a tensor
        changes the model, and must call `stored_changed` afterwards. `snapshot`, `restore`, `weights` and
        `load_weights` call it."""
        return {name: value for name, value in self.module.state_dict().items() if isinstance(value, torch.Tensor)}

    def read_stored(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Returns the weight or buffer `name` in host memory. `value` is the tensor that `stored` returned for it."""
        return value.cpu()

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        """Writes `value` to the weight or buffer `name`. `target` is the tensor that `stored` returned for `name`.
        Every rank calls it, for the same names in the same order."""
        target.copy_(value)

    @contextmanager
    def readable_by_writers(self) -> Iterator[None]:
        """Context in which ranks that write (`is_writer`, rank 0 among them) can read all weights while the other ranks
        do nothing. Every rank enters it. The engine uses it to save. A backend that shards weights over ranks gathers
        them here."""
        yield

    @property
    def stored_are_copies(self) -> bool:
        """Whether `stored` now returns copies, which training does not change. `snapshot` then copies no weight."""
        return False

    def stored_changed(self) -> None:
        """Called on every rank after a caller has written to the tensors that `stored` returned. A backend drops
        whatever it has derived from the old weights. The default does nothing."""

    # Checkpoints and weights as a whole

    def snapshot(self, *, hold: bool, omit_frozen: bool = False) -> Snapshot:
        """Returns the weights and the state that a checkpoint of the current step contains. Only ranks that write call
        it, inside `readable_by_writers`.

        `hold`: the checkpoint is written while training continues, so the snapshot holds copies of weights and state in
        host memory. `omit_frozen`: leaves out parameters that do not require gradients.
        """
        tensors, aliases = without_aliases(self.stored())
        frozen = {name for name, p in self.module.named_parameters() if omit_frozen and not p.requires_grad}
        tensors = {name: value for name, value in tensors.items() if name not in frozen}
        own = self.state_dict()
        current_stream(self.device).synchronize()  # the writer's threads read on other streams
        state = {"state": host_copy(own) if hold else own, "aliases": aliases, "omitted": sorted(frozen)}
        return Snapshot(module_files(tensors, hold=hold and not self.stored_are_copies), lambda: state)

    @torch.no_grad()
    def restore(self, saved: Saved, *, resume: bool, strict: bool = True) -> None:
        """Loads a checkpoint of this backend. `engine.load_checkpoint` calls it. It raises before it changes anything
        if the checkpoint does not fit.

        `resume` False loads weights only. `strict` False loads the tensors that the checkpoint and the model share.
        """
        here = self.stored()
        with reading_content(saved.folder, "its state"):
            names = {name: name for name in saved.names()} | saved.backend_state["aliases"]
            frozen = set(saved.backend_state.get("omitted", ()))  # not in the checkpoint: the model keeps its values
            if not set(names.values()) <= saved.names() | frozen:
                raise KeyError("an alias of a tensor that is not in the checkpoint")
        omitted = frozen | {name for name, of in names.items() if of in frozen}
        names = {name: of for name, of in names.items() if name not in omitted}
        here = {name: value for name, value in here.items() if name not in omitted}
        if strict and names.keys() != here.keys():
            only = sorted(names.keys() ^ here.keys())
            raise CheckpointError(
                f"checkpoint {saved.folder} is of another model: {len(only)} tensors are only in one of the two, such "
                f"as {only[0]}; load_module_strict=False loads the tensors that both have"
            )
        shared = names.keys() & here.keys()
        check_forms({name: saved.form(names[name]) for name in shared}, here, of=f"checkpoint {saved.folder}")
        if resume:
            with reading_content(saved.folder, "its state"):
                self.check_state(saved.backend_state["state"])
        for name in sorted(shared, key=lambda name: names[name]):
            self.write_stored(name, here[name], saved.tensor(names[name]))
        self.stored_changed()
        self.load_state_dict(saved.backend_state["state"], load_optimizer_states=resume)

    def aliases(self) -> dict[str, str]:
        """Returns, for each further name of a tied parameter, the name under which the parameter is saved."""
        first = {id(p): name for name, p in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        return {name: first[id(p)] for name, p in every if name != first[id(p)]}

    def weights(self, *, omitted: Collection[str] = ()) -> Stream:
        """Returns the specs of all weights of the current step, and an iterator of names and tensors in host memory. A
        tied weight occurs once. `omitted`: names to leave out. `engine.save_16bit_model` calls it on rank 0."""
        tensors, _ = without_aliases(self.stored())
        chosen = {name: value for name, value in tensors.items() if name not in omitted}
        specs = [Spec(name, value.dtype, tuple(value.shape)) for name, value in chosen.items()]
        return specs, ((name, self.read_stored(name, value)) for name, value in chosen.items())

    @torch.no_grad()
    def load_weights(self, weights: Weights, *, strict: bool = True) -> None:
        """Replaces the weights by `weights`, which maps names to tensors and reads one tensor at a time. A tied
        parameter may have any of its names there. `engine.load_checkpoint` calls it for weights of another backend or
        of a safetensors folder."""
        here = self.stored()
        check_weights(weights, here, self.aliases(), strict=strict)
        for name, value in here.items():
            if name in weights:
                self.write_stored(name, value, weights[name])
        self.stored_changed()

    def replay_steps(self, rows: torch.Tensor) -> int:
        """Repeats the steps that a trajectory recorded after the restored checkpoint, one row of `rows` per step.
        Returns the number of those that were skipped. The engine calls it on every rank after `restore`, where
        `ds_zo.checkpoint.trajectory` is set."""
        raise NotImplementedError(f"backend {self.config.backend} records no trajectory")

    # State of one rank

    def rank_state(self) -> dict[str, Any]:
        """Returns the state that differs between ranks: the sums of an unfinished accumulation window. The engine calls
        it on every rank and saves it beside `state_dict`. By default: `grad` of the parameters that have one."""
        return {name: p.grad.cpu() for name, p in self.module.named_parameters() if p.grad is not None}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        """Raises if `load_rank_state` cannot load `state`. The engine calls it before it changes anything."""
        parameters = dict(self.module.named_parameters())
        if any(parameters[name].shape != grad.shape for name, grad in state.items()):
            raise ValueError("a gradient has another shape than its parameter")

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Loads this rank's `rank_state`, after `restore`. Not called if the number of ranks has changed: the sums of
        an unfinished window are then dropped."""
        for name, parameter in self.module.named_parameters():
            grad = state.get(name)
            parameter.grad = None if grad is None else grad.to(parameter.device, parameter.dtype, copy=True)
