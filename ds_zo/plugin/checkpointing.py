"""DeepSpeed's methods for saving and loading, with our own files.

As in DeepSpeed, each tag is a folder and the file `latest` names a tag. A folder holds a manifest, safetensors and JSON
in place of pickles. Data-parallel ranks have the same weights, so one rank writes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import log_dist, logger

import ds_zo
from ds_zo.backends.common.state_access import StateAccess
from ds_zo.checkpoint import CheckpointError
from ds_zo.checkpoint.adapters import FILE as ADAPTERS_FILE
from ds_zo.checkpoint.adapters import base_of, changed_settings, description
from ds_zo.checkpoint.errors import reading_content
from ds_zo.checkpoint.export import saved_weights, weights_by_name, write_model_file
from ds_zo.checkpoint.manifest import Manifest, is_trainers, is_unfinished, suggest_complete
from ds_zo.checkpoint.reader import Saved, is_ours, open_checkpoint, point_of, tag_to_load
from ds_zo.checkpoint.recorder import read_logs
from ds_zo.checkpoint.rng import check_random_states, random_states, set_random_states
from ds_zo.checkpoint.snapshot import host_copy
from ds_zo.checkpoint.stock import model_source, plain_loading
from ds_zo.checkpoint.trajectory import Trajectory
from ds_zo.checkpoint.writer import BackgroundWriter, SaveRequest, check_tag, write_checkpoint
from ds_zo.config import Resolved
from ds_zo.logs import warn

_T = TypeVar("_T")
_WARN_AFTER_S = 1.0
"""Waits for the last save that are longer than this are logged."""


class CheckpointingEngine(DeepSpeedEngine):
    """The part of `PluginEngine` that saves and loads."""

    resolved: Resolved
    backend: StateAccess
    _background: BackgroundWriter
    _window_has_sums: bool

    # Saving

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Does what DeepSpeed's `save_checkpoint` does; every rank calls it.

        With `ds_zo.checkpoint.asynchronous` it returns while the weights of this step are still being written, except
        for the first checkpoint of a trajectory.
        """
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}: name a folder (save_dir)")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        check_tag(tag)
        if dist.get_world_size() > 1:
            self._checkpoint_tag_validation(tag)
        ranks = self._gather_from_ranks(self._rank_state())

        def save() -> None:
            if self._writes:
                self._save(Path(save_dir), tag, dict(client_state or {}), save_latest, exclude_frozen_parameters, ranks)

        self._on_all_ranks(self._finish_last_save)
        with self.backend.readable_by_writers():
            self._on_all_ranks(save)
        return True

    def _finish_last_save(self) -> None:
        """Waits for the last save and raises its error. Two saves at a time would keep two snapshots in memory."""
        waited_s = self._background.wait() if self._writes else 0.0
        if waited_s > _WARN_AFTER_S:
            logger.warning(
                f"ds_zo: training waited {waited_s:.1f} s for the last checkpoint to be written: save less often, or "
                "to a faster disk"
            )
        self._background.raise_error()

    def _common_state(self) -> dict[str, Any]:
        """The part of the state that all ranks have in common, under the names that DeepSpeed's checkpoints have."""
        samples = self.training_dataloader is not None and self.curriculum_learning_enabled()
        return {
            "buffer_names": self._get_buffer_names(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "data_sampler": self.training_dataloader.data_sampler.state_dict() if samples else None,
            "random_ltd": self.random_ltd_scheduler.state_dict() if self.random_ltd_enabled() else None,
            "skipped_steps": self.skipped_steps,
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "dp_world_size": self.seq_dp_world_size,
            "mp_world_size": self.mp_world_size,
            "ds_config": self.config,
            "ds_version": version("deepspeed"),
        }

    def _save(
        self, save_dir: Path, tag: str, client: dict[str, Any], latest: bool, omit_frozen: bool, ranks: list[Any]
    ) -> None:
        settings = self.resolved.section.checkpoint
        recorder = self.backend.recorder
        # A trajectory can be replayed only from a complete checkpoint, so training waits for the first one.
        asynchronous = settings.asynchronous and (recorder is None or recorder.follows_a_checkpoint)
        log_folder = Path(settings.trajectory_dir or save_dir)
        if recorder is not None:
            recorder.raise_error()
            recorder.prepare(log_folder)
        log_id = None if recorder is None else recorder.id
        state = {
            "common": self._common_state(),
            "micro_steps": self.micro_steps,
            "accumulation": self.gradient_accumulation_steps(),
            "in_window": self._window_has_sums,
            "client": client,
            "ranks": ranks,
            "trajectory": log_id,
        }
        step = 0 if recorder is None else self.backend.state_dict()["step"]

        def complete(manifest: Manifest) -> None:
            if recorder is not None and log_id is not None:
                sha256 = manifest.weights_sha256 if snapshot.is_as_replayed and not omit_frozen else None
                recorder.complete(log_folder, log_id, step=step, sha256=sha256)

        written_state = host_copy(state) if asynchronous else state
        extra_files = _model_description(self.module)
        # The snapshot is made last, because the writer releases its memory: an error between the two would leak it.
        snapshot = self.backend.snapshot(hold=asynchronous, omit_frozen=omit_frozen)
        request = SaveRequest(
            save_dir=save_dir,
            tag=tag,
            backend=self.resolved.backend,
            global_steps=self.global_steps,
            ds_zo_version=ds_zo.__version__,
            snapshot=snapshot,
            state=written_state,
            extra_files=extra_files,
            latest=latest,
            keep_last=settings.keep_last,
            progress=not asynchronous,
            on_complete=complete,
        )
        if asynchronous:
            self._background.start(request)
        else:
            write_checkpoint(request)
        log_dist(f"ds_zo: checkpoint {save_dir / tag}", ranks=[0])

    def _rank_state(self) -> dict[str, Any]:
        """The part of the state that differs between ranks."""
        return {
            "random": random_states(),
            "backend": self.backend.rank_state(),
            "unmanaged_backward_count": self._unmanaged_backward_count,
            "window_loss": None if self._window_loss is None else self._window_loss.cpu(),
        }

    def wait_for_checkpoint(self) -> None:
        """Waits until no checkpoint is being written, and raises the error of the last one, if it failed."""
        self._background.wait()
        self._background.raise_error()

    def _raise_background_error(self) -> None:
        """Raises the error of a save or of the trajectory, at the end of a step.

        The step is complete by then, so a loop that catches the error has lost no step. With several ranks an error on
        one of them would leave the other ranks waiting. There it is logged, and all ranks raise it at the next save.
        """
        if dist.get_world_size() == 1:
            self._background.raise_error()
            if self.backend.recorder is not None:
                self.backend.recorder.raise_error()

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the weights of this step to one file, as DeepSpeed's method does. One unit is in memory at a time."""

        def save() -> None:
            if dist.get_rank() == 0:
                frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
                omitted = frozen if exclude_frozen_parameters else set()
                aliases = self.backend.aliases()
                write_model_file(Path(save_dir) / save_filename, self.backend.weights(omitted=omitted), aliases=aliases)

        with self.backend.readable_by_writers():
            self._on_all_ranks(save)
        return True

    # Loading

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Does what DeepSpeed's `load_checkpoint` does.

        It reads our checkpoints, DeepSpeed's own, and the weights of folders with safetensors.
        """
        self._on_all_ranks(self._background.wait)  # a rank that writes nothing would read an older `latest`
        folder = Path(load_dir)
        found = tag_to_load(folder, tag)
        if found is None and is_unfinished(folder):
            raise CheckpointError(f"the checkpoint in {folder} was not completed; {suggest_complete(folder, but='')}")
        if found is None and (source := model_source(folder)) is not None:
            if custom_load_fn is None:
                self.backend.load_weights(source, strict=load_module_strict)
            else:
                custom_load_fn(src=dict(source), dst=self.module)
            return load_dir, {}
        if found is None or not is_ours(folder, found):
            _check_is_deepspeeds(folder, found)
            scheduler_state = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
            with plain_loading(self.checkpoint_engine, scheduler_state=scheduler_state):
                loaded: tuple[str | None, dict[str, Any] | None] = super().load_checkpoint(
                    load_dir,
                    tag,
                    load_module_strict,
                    load_optimizer_states,
                    load_lr_scheduler_states,
                    load_module_only,
                    custom_load_fn,
                )
            return loaded
        resume = load_optimizer_states and not load_module_only
        if resume and custom_load_fn is not None:
            raise ValueError(
                f"custom_load_fn loads weights alone, without the backend's own state, got it for {folder / found} "
                "with load_optimizer_states=True: pass load_optimizer_states=False too (custom_load_fn)"
            )
        saved = self._on_all_ranks(lambda: open_checkpoint(folder, found, verify=self._writes, progress=self._writes))
        self._check_saved(saved, resume=resume)
        logs = self._read_logs(folder) if resume else []
        if custom_load_fn is not None:
            weights = dict(saved_weights(saved)[1])
            tied = {alias: weights[name] for alias, name in self.backend.aliases().items() if name in weights}
            custom_load_fn(src={**tied, **weights}, dst=self.module)
        elif saved.manifest.backend == self.resolved.backend:
            self.backend.restore(saved, resume=resume, strict=load_module_strict)
        else:
            by_name = weights_by_name(saved)
            if by_name.omitted:
                warn(
                    f"checkpoint {saved.folder} of backend {saved.manifest.backend} has no frozen weights, and whether "
                    "the model's own are those of its run is not compared"
                )
            self.backend.load_weights(by_name, strict=load_module_strict)
        client = {**saved.engine_state["common"], **saved.engine_state["client"]}
        if not load_module_only:
            self._load_counters(saved, load_lr_scheduler_states)
            self._load_window(saved.engine_state, resume=resume)
        if resume:
            groups = saved.engine_state["common"]["optimizer"]["param_groups"]
            for group, values in zip(self.optimizer.param_groups, groups, strict=True):
                group.update({name: value for name, value in values.items() if name not in ("params", "param_names")})
            self._load_random_states(saved.engine_state["ranks"])
            # Trainer would make replayed steps a second time: it does not know that they are made.
            self._continue_trajectory(saved, folder, logs, newest=tag is None and not is_trainers(folder))
        return str(saved.folder), client

    def _check_saved(self, saved: Saved, *, resume: bool) -> None:
        """Raises if the checkpoint could not be loaded, before anything is loaded."""
        if resume and saved.manifest.backend != self.resolved.backend:
            raise CheckpointError(
                f"a checkpoint resumes with the backend that wrote it, got {saved.folder} of backend "
                f"{saved.manifest.backend} in an engine of backend {self.resolved.backend}: "
                "load_optimizer_states=False loads its weights and counters alone, and from_pretrained loads a folder "
                "that `ds-zo export` makes"
            )
        with reading_content(saved.folder, "its state"):
            _check_engine_state(saved.engine_state)
            if resume and (mine := self._own_window(saved.engine_state)) is not None:
                self.backend.check_rank_state(mine["backend"])
        self._check_adapters(saved, resume=resume)
        if resume:
            _check_groups(self.optimizer, saved.engine_state["common"]["optimizer"]["param_groups"])

    def _check_adapters(self, saved: Saved, *, resume: bool) -> None:
        """Raises if a resumed run has other settings of PEFT than the saved one; warns if only weights are loaded."""
        text = saved.text(ADAPTERS_FILE)
        with reading_content(saved.folder, ADAPTERS_FILE):
            changed = {} if text is None else changed_settings(text, self.module)
        there = ", ".join(f"{name} {values[0]}" for name, values in changed.items())
        here = ", ".join(f"{name} {values[1]}" for name, values in changed.items())
        if resume and not all(name.endswith("dropout") for name in changed):
            raise CheckpointError(
                f"a resumed run has the settings of PEFT of the saved run, {there}, got {here}: make the adapters with "
                "the saved settings, or call load_checkpoint(load_optimizer_states=False)"
            )
        if changed:
            warn(f"the adapters of checkpoint {saved.folder} were trained with {there}, and this run has {here}")

    def _load_counters(self, saved: Saved, load_lr_scheduler_states: bool) -> None:
        common = saved.engine_state["common"]
        if load_lr_scheduler_states and self.lr_scheduler is not None and common["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(common["lr_scheduler"])
        if self.random_ltd_enabled() and self.random_ltd_scheduler is not None and common["random_ltd"] is not None:
            self.random_ltd_scheduler.load_state_dict(common["random_ltd"])
        if common["data_sampler"] is not None and self.training_dataloader is not None:
            self.training_dataloader.data_sampler.load_state_dict(common["data_sampler"])
        self.global_steps = common["global_steps"]
        self.global_samples = common["global_samples"]
        self.skipped_steps = common["skipped_steps"]
        self.loaded_checkpoint_dp_world_size = common["dp_world_size"]
        self.loaded_checkpoint_mp_world_size = common["mp_world_size"]

    def _own_window(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """This rank's part of the accumulation window in a checkpoint. None if the checkpoint has another number of
        ranks or of micro-batches a step: its sums belong to the batches of its own ranks, and are scaled for its own
        number of micro-batches."""
        ranks, accumulation = state["ranks"], self.gradient_accumulation_steps()
        fits = len(ranks) == dist.get_world_size() and state.get("accumulation", accumulation) == accumulation
        return ranks[dist.get_rank()] if fits else None

    def _load_window(self, state: Mapping[str, Any], *, resume: bool) -> None:
        """Continues the accumulation window of a checkpoint, or begins a new one if its sums are not loaded."""
        window, accumulation = self._own_window(state) if resume else None, self.gradient_accumulation_steps()
        self.micro_steps = state["micro_steps"]
        if window is not None:
            self._window_has_sums = state.get("in_window", False)
            self._unmanaged_backward_count = window["unmanaged_backward_count"]
            self._window_loss = None if window["window_loss"] is None else window["window_loss"].to(self.device)
            self.backend.load_rank_state(window["backend"])
            return
        self.micro_steps -= self.micro_steps % accumulation
        self._forget_window()
        self.zero_grad()
        if state.get("in_window", False):
            warn(
                "the checkpoint was saved between the micro-batches of a step, and their sums are not loaded: training "
                "goes on with the first micro-batch of a new step; to continue the saved one, load optimizer states "
                "with as many ranks and gradient_accumulation_steps as the saved run"
            )

    def _forget_window(self) -> None:
        """Forgets the counts and losses of the accumulation window, whose sums the backend does not have."""
        self._unmanaged_backward_count, self._window_loss, self._window_has_sums = 0, None, False

    def _load_random_states(self, ranks: list[dict[str, Any]]) -> None:
        if dist.get_rank() < len(ranks):
            set_random_states(ranks[dist.get_rank()]["random"])
            return
        logger.warning(
            f"ds_zo: the checkpoint has {len(ranks)} ranks, so rank {dist.get_rank()} keeps its present random states"
        )

    def _read_logs(self, folder: Path) -> list[Trajectory]:
        """The trajectories in `folder`. They are read before weights are replaced, so that a log that can't be read
        changes nothing."""
        settings = self.resolved.section.checkpoint
        if not settings.trajectory:
            return []
        folders = [Path(settings.trajectory_dir or folder), folder]
        return self._on_all_ranks(lambda: [] if self.backend.recorder is None else read_logs(*folders))

    def _continue_trajectory(self, saved: Saved, folder: Path, logs: list[Trajectory], *, newest: bool) -> None:
        """Replays the steps that a trajectory recorded after the checkpoint, if there is one."""
        settings = self.resolved.section.checkpoint
        if not settings.trajectory:
            return

        def resume() -> torch.Tensor | None:
            if self.backend.recorder is None:
                return None
            log_folder = Path(settings.trajectory_dir or folder)
            return self.backend.recorder.resume(logs, log_folder, point_of(saved), newest=newest)

        rows = self._gather_from_ranks(self._on_all_ranks(resume))[0]
        if rows is None or rows.shape[0] == 0:
            return
        num_steps = rows.shape[0]
        self.skipped_steps += self.backend.replay_steps(rows)
        self._forget_window()  # the first replayed step has completed it
        for _ in range(num_steps):
            if self.lr_scheduler is not None:
                self.optimizer._opt_called = True
                self.lr_scheduler.step()
        self.global_steps += num_steps
        self.global_samples += num_steps * self.train_batch_size()
        accumulation = self.gradient_accumulation_steps()
        self.micro_steps = (self.micro_steps // accumulation + num_steps) * accumulation
        warn(
            f"{num_steps} steps after the checkpoint were recorded in the trajectory and replayed: the run is at step "
            f"{self.global_steps}; client_state and random states are those of the checkpoint; load_checkpoint with a "
            "tag replays none"
        )

    # Weights by name, and DeepSpeed's own checkpoints

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        with self.backend.frozen_unread() if exclude_frozen_parameters else nullcontext():
            state = self.backend.module_state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole weights on the host, for rank 0; None on other ranks. Accelerate and Trainer call it whenever the
        JSON says stage 3."""
        with self.backend.readable_by_writers():
            if dist.get_rank() != 0:
                return None
            state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return {name: v.detach().cpu() if isinstance(v, torch.Tensor) else v for name, v in state.items()}

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        **zero3: Any,
    ) -> None:
        if custom_load_fn is None:
            self.backend.load_module_state_dict(checkpoint["module"], strict=strict)
        else:
            custom_load_fn(src=checkpoint["module"], dst=self.module)

    def _load_checkpoint(self, load_dir: str, tag: str, **options: Any) -> tuple[str | None, dict[str, Any] | None]:
        # With load_optimizer_states=False DeepSpeed does not load them into the optimizer. The script's own optimizer
        # does not accept the keyword that DeepSpeed passes to it in bf16 and fp16.
        path, rest = super()._load_checkpoint(load_dir, tag, **{**options, "load_optimizer_states": False})
        if path is not None and rest is not None and not options.get("load_module_only", False):
            warn(
                f"the checkpoint was written by another optimizer, not by {self.resolved.backend}: weights and "
                f"counters are loaded, and the backend starts without a state ({path})"
            )
        return path, rest

    # Ranks

    @property
    def _writes(self) -> bool:
        """Whether this rank writes checkpoints."""
        return bool((self.local_rank if self.use_node_local_storage() else self.global_rank) == 0)

    def _gather_from_ranks(self, value: _T) -> list[_T]:
        """`value` of every rank, by rank."""
        if dist.get_world_size() == 1:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def _on_all_ranks(self, call: Callable[[], _T]) -> _T:
        """Runs `call` on every rank. If it fails on one rank, all ranks raise, so that none waits for ever."""
        if dist.get_world_size() == 1:
            return call()
        error: Exception | None = None
        result: Any = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        texts = self._gather_from_ranks(None if error is None else str(error))
        failures = [text for text in texts if text is not None]
        if error is not None:
            raise error
        if failures:
            raise CheckpointError(f"another rank failed: {failures[0]}")
        return result  # type: ignore[no-any-return]


def refuse_to_stock(load_dir: Path, tag: str | None) -> None:
    """Raises where DeepSpeed's own engine is about to load a checkpoint of ours."""
    found = tag_to_load(load_dir, tag)
    if found is not None and is_ours(load_dir, found):
        raise CheckpointError(
            f"DeepSpeed's own engine cannot load checkpoint {load_dir / found}, which was written by ds_zo: make a "
            f"model folder of it with `ds-zo export {load_dir / found} OUT`, and load that with from_pretrained"
        )


def _model_description(module: torch.nn.Module) -> dict[str, bytes]:
    """The files that `from_pretrained` needs besides weights, by name, for `ds-zo export`."""
    found = description(module)
    module = base_of(module)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        config.architectures = [type(module).__name__]
        config.dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        found["config.json"] = config.to_json_string().encode()
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        try:
            found["generation_config.json"] = generation.to_json_string().encode()
        except (TypeError, ValueError) as error:
            logger.warning(f"ds_zo: the generation config can't be written as JSON and is not saved: {error}")
    return found


def _check_engine_state(state: Mapping[str, Any]) -> None:
    """Raises where a part of the state could not be loaded, before anything is loaded."""
    common = state["common"]
    counters = [common[name] for name in ("global_steps", "global_samples", "skipped_steps")]
    counters += [common["dp_world_size"], common["mp_world_size"], state["micro_steps"]]
    if not all(type(counter) is int for counter in counters):
        raise TypeError(f"counters are {counters}")
    if not common["optimizer"]["param_groups"] or not state["ranks"]:
        raise ValueError("it has no parameter groups or no ranks")
    dicts = [state["client"], *common["optimizer"]["param_groups"], *state["ranks"]]
    dicts += [common[name] for name in ("lr_scheduler", "random_ltd", "data_sampler") if common[name] is not None]
    if not all(isinstance(found, dict) for found in dicts):
        raise TypeError("a part of it is not a dict")
    for rank in state["ranks"]:
        check_random_states(rank["random"])
        if type(rank["unmanaged_backward_count"]) is not int or not isinstance(rank["backend"], dict):
            raise TypeError("the state of a rank has values of other types")
        if rank["window_loss"] is not None and rank["window_loss"].numel() != 1:
            raise ValueError("the window_loss of a rank is not one number")


def _check_is_deepspeeds(folder: Path, tag: str | None) -> None:
    """Raises if `tag` has no checkpoint of DeepSpeed, and warns if there is no tag, where DeepSpeed loads nothing."""
    if tag is not None and not any((folder / tag).glob("*model_states.pt")):  # the name of DeepSpeed's
        raise CheckpointError(f"there is no complete checkpoint {folder / tag}; {suggest_complete(folder, but=tag)}")
    if tag is None and "no other" not in (suggestion := suggest_complete(folder, but="")):
        logger.warning(f"ds_zo: {folder} has no file `latest`; {suggestion}")


def _check_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(
            f"an optimizer needs as many parameter groups as the checkpoint has, {len(saved)}, got "
            f"{len(optimizer.param_groups)}: make the same groups, or call load_checkpoint(load_optimizer_states=False)"
        )
