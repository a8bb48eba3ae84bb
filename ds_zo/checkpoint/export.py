"""Writes weights for other programs: a folder that `from_pretrained` loads, or one file.

One unit is in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ds_zo.checkpoint import files
from ds_zo.checkpoint.adapters import CONFIG_FILE, WEIGHTS_FILE, Adapters
from ds_zo.checkpoint.adapters import FILE as ADAPTERS_FILE
from ds_zo.checkpoint.errors import CheckpointError, reading_content
from ds_zo.checkpoint.layout import check_stored
from ds_zo.checkpoint.progress import progress_bar
from ds_zo.checkpoint.reader import Saved
from ds_zo.checkpoint.replay import saved_values, unit_values
from ds_zo.checkpoint.stock import Weights

SHARD_NBYTES = 4 * 10**9


@dataclass(frozen=True)
class Spec:
    """Name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Stream = tuple[list[Spec], Iterator[tuple[str, torch.Tensor]]]
"""The specs of all tensors, and an iterator over (name, tensor) in any order."""


def specs_of(units: Iterable[Mapping[str, Any]]) -> Iterator[Spec]:
    """The specs of the parameters of units, from their descriptions by `layout.describe`."""
    for unit in units:
        for part in unit["parts"]:
            yield from (Spec(p["name"], getattr(torch, part["dtype"]), tuple(p["shape"])) for p in part["params"])


def saved_weights(saved: Saved) -> Stream:
    """The weights of a checkpoint by their names in the module's `state_dict`. Tied weights come once."""
    state = saved.backend_state
    if "units" not in state:
        names = sorted(saved.names())
        specs = [Spec(name, *saved.form(name)) for name in names]
        return specs, ((name, saved.tensor(name)) for name in names)
    with reading_content(saved.folder, "its state"):
        check_stored(state, saved.form)
    specs = [spec for spec in specs_of(state["units"]) if spec.name not in state["omitted"]]
    specs += [Spec(name, *saved.form(name)) for name in state["buffers"]]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for placed, value in saved_values(saved):
            yield placed.name, value.cpu()
        for name in state["buffers"]:
            yield name, saved.tensor(name)

    return specs, tensors()


def weights_by_name(saved: Saved) -> Weights:
    """The weights of a checkpoint for a reader that asks for them by name. Asking for one computes its whole unit."""
    state = saved.backend_state
    if "units" not in state:
        forms = {name: saved.form(name) for name in sorted(saved.names())}
        return Weights(forms, saved.tensor, omitted=state.get("omitted", ()))
    unit_of = {p["name"]: unit for unit in state["units"] for part in unit["parts"] for p in part["params"]}
    made: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        if name not in unit_of:
            return saved.tensor(name)
        if name not in made:
            made.clear()
            made.update((placed.name, value) for placed, value in unit_values(saved, unit_of[name]))
        return made[name]

    forms = {spec.name: (spec.dtype, spec.shape) for spec in saved_weights(saved)[0]}
    return Weights(forms, read, omitted=state["omitted"])


def write_model_file(path: Path, stream: Stream, *, aliases: Mapping[str, str]) -> None:
    """Writes one file and then renames it to `path`.

    A path that ends in `.safetensors` gets that format. Any other path gets the format of `torch.save`, in which tied
    weights have all their names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.temporary_path(path)
    pickled = temporary.with_name(temporary.name + ".bin")
    files.remove(temporary)
    try:
        _write_shards(temporary.parent, {temporary.name: stream[0]}, stream[1])
        if path.suffix != ".safetensors":
            with safe_open(temporary, framework="pt") as file:  # memory-mapped, so not a second copy in host memory
                state = {spec.name: file.get_tensor(spec.name) for spec in stream[0]}
                state |= {alias: state[name] for alias, name in aliases.items() if name in state}
                _pickle(state, pickled)
        files.rename(temporary if path.suffix == ".safetensors" else pickled, path)
    except OSError as error:
        raise CheckpointError(f"{path} was not written: {error}; free disk space or name another path") from error
    finally:
        files.remove(temporary)
        files.remove(pickled)


def _pickle(state: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch's own writer raises it where the disk is full
        raise OSError(str(error).partition("\n")[0]) from error


def write_model_folder(
    out: Path,
    stream: Stream,
    *,
    extra: Mapping[str, str],
    apart: Mapping[str, str] | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    progress: bool = False,
) -> None:
    """Writes a model folder, reads its tensors back to compare them, and then renames it to `out`.

    `extra` holds the texts of other files by name. `apart` maps tensors that are not the model's own, by name, to the
    file that they are written to; None if there are none.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"OUT must be a new or empty folder, got {out}, which exists: name another one (OUT)")
    out = out.resolve()  # a link to an empty folder stays a link
    if out == Path.cwd():
        raise CheckpointError(f"OUT replaces a folder and must not be the current one, got {out}: name another (OUT)")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.temporary_path(out)
    files.remove(temporary)
    apart = apart or {}
    own = [spec for spec in stream[0] if spec.name not in apart]
    try:
        files.make_folder(temporary)
        shards = _shards(own, shard_nbytes)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(spec.nbytes for spec in own)},
                "weight_map": {spec.name: file for file, specs in shards.items() for spec in specs},
            }
            files.write_json(temporary / "model.safetensors.index.json", index)
        for spec in stream[0]:
            if spec.name in apart:
                shards.setdefault(apart[spec.name], []).append(spec)
        folders = sorted({str(Path(name).parent) for name in (*shards, *extra)} - {"."})
        for name in folders:
            files.make_folder(temporary / name)
        digests = _write_shards(temporary, shards, stream[1], progress=progress)
        for name, text in extra.items():
            files.write_bytes(temporary / name, text.encode())
        _verify(temporary, shards, digests)
        for folder in (*(temporary / name for name in folders), temporary):
            files.sync_folder(folder)
        if out.exists():
            out.rmdir()
        files.rename(temporary, out)
    except OSError as error:
        raise CheckpointError(f"{out} was not written: {error}; free disk space or name another folder") from error
    finally:
        files.remove(temporary)


def _shards(specs: list[Spec], shard_nbytes: int) -> dict[str, list[Spec]]:
    groups: list[list[Spec]] = []
    room = 0
    for spec in specs:
        if not groups or spec.nbytes > room:
            groups.append([])
            room = shard_nbytes
        groups[-1].append(spec)
        room -= spec.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def _write_shards(
    folder: Path,
    shards: Mapping[str, list[Spec]],
    tensors: Iterator[tuple[str, torch.Tensor]],
    *,
    progress: bool = False,
) -> dict[str, str]:
    """Writes tensors that come in any order to their files, and returns the hash of each tensor."""
    outputs: dict[str, files.TensorFile] = {}
    file_of = {spec.name: file for file, specs in shards.items() for spec in specs}
    left = {file: len(specs) for file, specs in shards.items()}
    digests: dict[str, str] = {}
    nbytes = sum(spec.nbytes for specs in shards.values() for spec in specs)
    try:
        with progress_bar("writing", nbytes=nbytes, shown=progress) as advance:
            for name, value in tensors:
                file = file_of[name]
                if file not in outputs:
                    outputs[file] = files.TensorFile(
                        folder / file, {s.name: (s.dtype, s.shape) for s in shards[file]}, metadata={"format": "pt"}
                    )
                digests[name] = outputs[file].put(name, value)
                left[file] -= 1
                if left[file] == 0:
                    outputs[file].finish()
                advance(value.numel() * value.element_size())
    finally:
        for output in outputs.values():
            output.close()
    missing = file_of.keys() - digests.keys()
    if missing:
        raise CheckpointError(f"{len(missing)} tensors have no values, such as {min(missing)}")
    return digests


def _verify(folder: Path, shards: Mapping[str, list[Spec]], digests: Mapping[str, str]) -> None:
    for file, specs in shards.items():
        with safe_open(folder / file, framework="pt") as opened:
            for spec in specs:
                tensor = opened.get_tensor(spec.name)
                right = tensor.dtype is spec.dtype and tuple(tensor.shape) == spec.shape
                if not right or hashlib.sha256(files.bytes_of(tensor)).hexdigest() != digests[spec.name]:
                    raise CheckpointError(
                        f"a tensor must read back as it was written, and {spec.name} in {file} does not: check the disk"
                    )


def export(saved: Saved, out: Path, *, shard_nbytes: int = SHARD_NBYTES) -> None:
    """Writes a checkpoint's weights and config as a folder for `from_pretrained`; `ds-zo export` calls it.

    The adapters of a PEFT model are in a folder inside it, for `PeftModel.from_pretrained`. They are alone there if the
    checkpoint has no other weights.
    """
    extra = {name: text for name in ("config.json", "generation_config.json") if (text := saved.text(name)) is not None}
    stream = saved_weights(saved)
    adapters = Adapters.read(saved.text(ADAPTERS_FILE))
    apart: dict[str, str] = {}
    if adapters is not None:
        stream, apart = _unwrapped(stream, adapters)
        has_model = any(spec.name not in apart for spec in stream[0])
        extra = {**(extra if has_model else {}), CONFIG_FILE: adapters.config}
    write_model_folder(out, stream, extra=extra, apart=apart, shard_nbytes=shard_nbytes, progress=True)


def _unwrapped(stream: Stream, adapters: Adapters) -> tuple[Stream, dict[str, str]]:
    """A PEFT model's tensors by their names without PEFT, and the file of each tensor that the adapter owns."""
    placed = {spec.name: adapters.place(spec.name) for spec in stream[0]}
    specs = [Spec(placed[spec.name][1], spec.dtype, spec.shape) for spec in stream[0]]
    tensors = ((placed[name][1], value) for name, value in stream[1])
    apart = {name: WEIGHTS_FILE for is_adapters, name in placed.values() if is_adapters}
    return (specs, tensors), apart
