"""Loading without a second copy of the model: parameters on the meta device, with a source that reads them one by
one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ds_zo.config import ConfigError
from ds_zo.config.json_text import check_file_names, parse_json
from ds_zo.config.section import FROZEN_DTYPES, FrozenDtype
from ds_zo.ops import MXFP4, NF4, NF4_NESTED
from ds_zo.ops.nf4 import GROUP_NUMEL, Quantised
from ds_zo.streaming import quantised_checkpoints
from ds_zo.streaming.converted_checkpoints import Conversions
from ds_zo.streaming.units import PlacedParameter, num_matrices
from ds_zo.versions import dtype_without_request

_SOURCE = "_ds_zo_source"
_NAMES = "_ds_zo_names"
IN_MEMORY = "memory"
"""`source_of` a module without a source."""
_FROZEN_DTYPE = "_ds_zo_frozen_dtype"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes by their names in safetensors."""
Source = Callable[[str], torch.Tensor]
"""Returns a parameter's value for its name. A source of weights in four bits has a method `shipped_wire` too."""


_CONVERSIONS = (
    *("to", "type", "float", "half", "bfloat16", "double", "detach", "contiguous", "requires_grad_"),
    "__get__",  # of `data`, or of a view such as `T`
)
"""Names of functions that make an `UnreadValue` of an unread weight."""


class UnreadValue(torch.Tensor):
    """The data of an unread parameter, or a conversion of them: on the meta device, without values. All it can do is
    become the data of an unread parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _without_values(func, args, kwargs or {})


class UnreadParameter(nn.Parameter):
    """A parameter on the meta device whose values a source can read.

    It says that it is on the CPU: PEFT moves new adapters to the device of the layer that they adapt, and on the meta
    device they would lose their values. Prompt tuning looks up rows, and DoRA copies weights to a device. The source
    reads these weights, one at a time. PiSSA, merges, `resize_token_embeddings` and others compute with the data, or
    replace them, which is refused whoever does it.
    """

    read: Callable[[], torch.Tensor] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cpu")
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            weight, value = args
            if value is weight:  # a conversion to its own dtype
                return None
            if not isinstance(value, UnreadValue):
                raise NotImplementedError(_refusal(func))
            args = (weight, value.as_subclass(torch.Tensor))
        if func is nn.functional.embedding or _copies_to_a_device(func, args, kwargs):
            args = [a.read().to(a.dtype) if isinstance(a, cls) and a.read is not None else a for a in args]
        return _without_values(func, args, kwargs)


def _without_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function of unread weights. Raises if it needs their values."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            found = func(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and "meta" not in str(error):
                raise
            raise NotImplementedError(_refusal(func)) from error
    name = getattr(func, "__name__", "")
    tensors = [one for one in (found if isinstance(found, (tuple, list)) else (found,)) if torch.is_tensor(one)]
    if not any(one.is_meta for one in tensors) or isinstance(found, UnreadParameter):
        return found
    if name in _CONVERSIONS:
        return found.as_subclass(UnreadValue)
    if name == "clone" or name.endswith("_like") or name.startswith("new_"):
        return found
    raise NotImplementedError(_refusal(func))


def _copies_to_a_device(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call is `weight.to(device)`. `Module.to`, which would replace the weight, passes more arguments."""
    if func is not torch.Tensor.to or len(args) != 2 or kwargs or not isinstance(args[1], (str, torch.device)):
        return False
    return torch.device(args[1]).type != "meta"


def _refusal(func: Any) -> str:
    return (
        "weights of ds_zo.load_pretrained are in memory only between deepspeed.initialize and engine.destroy, got a "
        f"call of {getattr(func, '__name__', func)} outside: load the model with from_pretrained if its embeddings are "
        "resized or adapters are made from its weights (PiSSA, OLoRA, CorDA, LoftQ, MiCA), and merge adapters by "
        "ds-zo export --merge"
    )


def attach_source(module: nn.Module, source: Source) -> None:
    """Attaches a source of values to a module with parameters on the meta device. An engine reads it when it stores the
    parameters. The module may be wrapped until then, which changes the names of its parameters."""
    names = {p: name for name, p in module.named_parameters()}
    for p in names:
        if p.is_meta and type(p) is nn.Parameter:
            p.__class__ = UnreadParameter
            assert isinstance(p, UnreadParameter)
            p.read = partial(source, names[p])
    object.__setattr__(module, _SOURCE, source)
    object.__setattr__(module, _NAMES, names)


def read_all(module: nn.Module) -> None:
    """Reads the meta parameters of a module with a source into host memory, for an engine that moves the whole module.
    Parameters stay the same Python objects."""
    source: Source | None = getattr(module, _SOURCE, None)
    if source is None:
        return
    check_frozen_dtype(module, "auto")
    for own_name, p in module.named_parameters():
        name = _name_in_source(module, own_name, p)
        if p.is_meta and name is not None:
            value = source(name)
            if value.shape != p.shape:
                raise ValueError(
                    f"{own_name} has shape {tuple(p.shape)}, got {tuple(value.shape)} in the model's files: use the "
                    "config.json that belongs to them"
                )
            p.__class__ = nn.Parameter
            read = nn.Parameter(value.to(p.dtype), requires_grad=p.requires_grad)
            torch._C._swap_tensor_impl(p, read)  # as in Unit.leave_meta


def _name_in_source(module: nn.Module, name: str, parameter: nn.Parameter) -> str | None:
    """The name by which the module's source knows a parameter of the module, or the parameter that PEFT has copied it
    from (`modules_to_save`); None if it knows neither."""
    names: dict[nn.Parameter, str] = getattr(module, _NAMES, {})
    owner, copied, rest = name.partition(".modules_to_save.")
    if parameter not in names and copied:
        parameter = module.get_parameter(f"{owner}.original_module.{rest.partition('.')[2]}")
    return names.get(parameter)


def put_back(module: nn.Module, parameter: nn.Parameter) -> None:
    """Frees a parameter's values, which the module's source can provide again."""
    assert has_source(module, parameter)
    hollow = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, hollow)
    parameter.__class__ = UnreadParameter


def has_source(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether the module's source provides the parameter's values."""
    return parameter in getattr(module, _NAMES, ())


def forget_source(module: nn.Module, parameter: nn.Parameter) -> None:
    """Called when other values were stored for a parameter: the module's source does not provide these."""
    getattr(module, _NAMES, {}).pop(parameter, None)


def source_of(module: nn.Module) -> str:
    """The folder that the module's weights are read from, or the kind of their source."""
    source = getattr(module, _SOURCE, None)
    if source is None:
        return IN_MEMORY
    return str(source.folder) if isinstance(source, SafetensorsSource) else type(source).__name__


def frozen_dtype_of(module: nn.Module) -> str | None:
    """The `frozen_dtype` that `load_pretrained` was given for this module; None without one."""
    found: str | None = getattr(module, _FROZEN_DTYPE, None)
    return found


def shipped_wire(module: nn.Module, frozen_dtype: str) -> Callable[[nn.Parameter], torch.dtype | None]:
    """For `frozen_dtype` auto and mxfp4: a function that returns the four-bit format in which the module's files hold a
    parameter, as the dtype that stands for it, or None."""
    source = getattr(module, _SOURCE, None)
    names: dict[nn.Parameter, str] = getattr(module, _NAMES, {})
    wire_of: Callable[[str], torch.dtype | None] = getattr(source, "shipped_wire", lambda name: None)
    wires = {p: wire_of(name) for p, name in names.items()}
    found = {p: wire for p, wire in wires.items() if wire is not None}
    if frozen_dtype == "mxfp4" and MXFP4.dtype not in found.values():
        raise ConfigError(
            "frozen_dtype mxfp4 keeps weights that a model's files hold in MXFP4, as those of gpt-oss do, got a model "
            "without such weights: load it with ds_zo.load_pretrained, or take nf4",
            at="ds_zo.stream.frozen_dtype",
        )
    return found.get


def check_frozen_dtype(module: nn.Module, used: str) -> None:
    """Raises if `load_pretrained` was asked for another `frozen_dtype` than the one that an engine uses."""
    asked = frozen_dtype_of(module)
    if asked not in (None, used):
        remedy = (
            'train by ZO or the backend adapter, with zero_optimization.offload_param.device "cpu"'
            if used == "auto"
            else "write the same twice"
        )
        raise ValueError(
            f"the model was loaded for frozen_dtype {asked}, and this engine stores frozen weights as {used}: "
            f"{remedy}, or load the model without frozen_dtype (ds_zo.load_pretrained)"
        )


def reader_of(module: nn.Module) -> Callable[[PlacedParameter], torch.Tensor | Quantised]:
    """A function that returns each parameter's value: from memory, or from the attached source if the parameter is on
    the meta device."""
    source: Source | None = getattr(module, _SOURCE, None)

    def read(placed: PlacedParameter) -> torch.Tensor | Quantised:
        if not placed.parameter.is_meta:
            return placed.parameter.data
        name = _name_in_source(module, placed.name, placed.parameter)
        if source is None or name is None:
            raise ValueError(
                f"parameter {placed.name} is on the meta device and the model has no source of its value: load the "
                "model with ds_zo.load_pretrained, or with from_pretrained if adapters are made from its weights "
                "(PiSSA)"
            )
        return source.stored(name) if isinstance(source, SafetensorsSource) else source(name)

    return read


class SafetensorsSource:
    """Reads tensors by name from a folder with `model.safetensors` or an index and its shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._conversions: Conversions | None = None
        self._stamps: dict[Path, tuple[int, int]] = {}
        """Size and time of change of each file when this was made."""
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if single.exists():  # first, as in transformers: saving one file leaves the index of earlier shards
            self._stamps[single] = _stamp(single)
            with self._open(single) as file:
                self._file_of = dict.fromkeys(file.keys(), single)
        elif index.exists():
            with _reading(index):
                weight_map = parse_json(index.read_text())["weight_map"]
                check_file_names(weight_map.values())
                self._file_of = {name: folder / file for name, file in weight_map.items()}
            self._stamps = {path: _stamp(path) for path in set(self._file_of.values())}
        else:
            raise FileNotFoundError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")

    def convert_for(self, model: nn.Module) -> None:
        """From now on names are those of a transformers model, which may differ from the files' own."""
        self._conversions = Conversions(model, quantised_checkpoints.plain_names(self._file_of))

    def names(self) -> set[str]:
        return set(self._file_of) if self._conversions is None else self._conversions.names()

    def weight_names(self) -> set[str]:
        """The names that `stored` knows."""
        return quantised_checkpoints.weight_names(self.names())

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """A tensor's dtype, as safetensors names it, and its shape, without reading its values."""
        with self._open(self._file_of[name]) as file:
            found = file.get_slice(name)
            return found.get_dtype(), tuple(found.get_shape())

    def float_dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor of the first file; None if that file has none."""
        with self._open(min(self._file_of.values())) as file:
            found = (_FLOATS.get(file.get_slice(name).get_dtype()) for name in file.keys())  # noqa: SIM118
            return next(filter(None, found), None)

    @contextmanager
    def _reader(self) -> Iterator[Source]:
        """A function that returns tensors by their names in the files. It opens each file once: the header of a file
        with many experts takes a tenth of a second."""
        with ExitStack() as opened:
            files: dict[Path, Any] = {}

            def read(name: str) -> torch.Tensor:
                path = self._file_of[name]
                if path not in files:
                    self._check_unchanged(path)
                with _reading(path):
                    if path not in files:
                        files[path] = opened.enter_context(safe_open(path, framework="pt"))
                    tensor: torch.Tensor = files[path].get_tensor(name)
                    return tensor

            yield read

    @contextmanager
    def _open(self, path: Path) -> Iterator[Any]:
        """Opens one of the files."""
        self._check_unchanged(path)
        with _reading(path), safe_open(path, framework="pt") as file:
            yield file

    def _check_unchanged(self, path: Path) -> None:
        """Raises unless the file is the one that was there when this was made."""
        if _stamp(path) != self._stamps[path]:
            raise ValueError(
                "weights are read after load_pretrained has returned, so the files must stay as they are, got a "
                f"replaced {path}: load the model again, and save other models to other folders"
            )

    def stored(self, name: str) -> torch.Tensor | Quantised:
        """The weight as the files hold it. A stack of experts in four bits keeps the bytes of its matrices."""
        with self._reader() as read:
            if self._conversions is None:
                return self._as_shipped(name, read)
            if self._shipped_wires(name) == {None}:
                return self._conversions.read(name, read)
            wire = self.shipped_wire(name)
            if wire is None:
                return self._conversions.read(name, lambda tensor: self._values(tensor, read))
            tensors = self._conversions.stack_of(name)
            parts = [quantised_checkpoints.read_quantised(read, tensor, wire) for tensor in tensors]
            return quantised_checkpoints.stacked(name, parts, self._conversions.shape(name))

    def _as_shipped(self, tensor: str, read: Source) -> torch.Tensor | Quantised:
        wire = quantised_checkpoints.shipped_wire(self._file_of, tensor)
        return read(tensor) if wire is None else quantised_checkpoints.read_quantised(read, tensor, wire)

    def _values(self, tensor: str, read: Source) -> torch.Tensor:
        found = self._as_shipped(tensor, read)
        return found.values() if isinstance(found, Quantised) else found.float()

    def _shipped_wires(self, name: str) -> set[torch.dtype | None]:
        """The formats of the tensors of which the weight is made."""
        sources = [name] if self._conversions is None else self._conversions.sources(name)
        return {quantised_checkpoints.shipped_wire(self._file_of, tensor) for tensor in sources}

    def shipped_wire(self, name: str) -> torch.dtype | None:
        """The dtype that stands for the weight's four-bit format; None if it is not in four bits, or made of tensors
        that are not stacked in whole groups."""
        wires = self._shipped_wires(name)
        if len(wires) > 1 or None in wires:
            return None
        [wire] = wires
        if self._conversions is None:
            return wire
        shape, number = self._conversions.shape(name), len(self._conversions.stack_of(name))
        if number == 0 or (number > 1 and math.prod(shape) % (number * GROUP_NUMEL)):
            return None
        return NF4.dtype if wire is NF4_NESTED.dtype and number != num_matrices(name, shape) else wire

    def __call__(self, name: str) -> torch.Tensor:
        found = self.stored(name)
        return found.values() if isinstance(found, Quantised) else found


def _stamp(path: Path) -> tuple[int, int]:
    with _reading(path):
        found = path.stat()
        if not S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
    return found.st_size, found.st_mtime_ns


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns all errors of reading a model's file into one that names the file."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is missing, damaged or cut off ({why}): download or save the model again") from error


def load_pretrained(
    auto_class: Any,
    name_or_path: str,
    *,
    dtype: torch.dtype | str | None = None,
    frozen_dtype: FrozenDtype | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Loads a pretrained model whose weights `deepspeed.initialize` reads directly into the host store.

    `auto_class` is one of transformers' Auto classes, or a model's own class. `dtype` is as in `from_pretrained`,
    "auto" included. `frozen_dtype` is the format in which the engine stores frozen weights of blocks, as
    `ds_zo.stream.frozen_dtype` in the JSON. Weights are encoded one at a time, so the model never exists in its own
    dtype.

    This needs a folder of safetensors. Weights that transformers makes of other tensors, such as stacks of experts, are
    made one at a time. Weights may be quantised to NF4 by bitsandbytes, stacks of experts too, or to MXFP4 under the
    model's own parameter names. All other models (Hub names not on disk, other quantised files) are loaded by
    `from_pretrained`, or refused if `frozen_dtype` is given. `deepspeed.initialize` then frees their weights unit by
    unit as it stores them.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, GenerationConfig

    if frozen_dtype not in (None, *FROZEN_DTYPES):
        words = ", ".join(FROZEN_DTYPES)
        raise ValueError(f"frozen_dtype must be one of {words}, got {frozen_dtype!r} (ds_zo.load_pretrained)")
    folder = Path(name_or_path)
    source, found = None, "no folder"
    if kwargs:
        found = f"further arguments ({', '.join(kwargs)})"
    elif folder.is_dir():
        try:
            source = SafetensorsSource(folder)
        except FileNotFoundError:
            found = "a folder without safetensors"
    if source is not None:
        config = AutoConfig.from_pretrained(name_or_path)
        quantisation = _quantisation(config)
        is_foreign = quantisation not in (None, "nf4", "mxfp4")
        if quantisation is not None and not is_foreign:
            del config.quantization_config  # else transformers would take the saved adapters' base for quantised
        make = getattr(auto_class, "from_config", None) or auto_class._from_config
        with _without_zero_init(), init_empty_weights(include_buffers=False):
            model: nn.Module = make(config, dtype=_dtype(dtype, config, source))
        _keep_in_float32(model)
        model.tie_weights()  # type: ignore[operator]
        if quantisation != "mxfp4":
            source.convert_for(model)
        absent = sorted({name for name, _ in model.named_parameters()} - source.weight_names())
        untied = None if absent or is_foreign else _untied_name(model, source)
        if not absent and not is_foreign and untied is None:
            model.eval()
            for name, buffer in model.named_buffers():
                if name in source.names():
                    buffer.copy_(source(name))
            if (folder / "generation_config.json").exists():
                model.generation_config = GenerationConfig.from_pretrained(name_or_path)  # type: ignore[assignment]
            attach_source(model, source)
            object.__setattr__(model, _FROZEN_DTYPE, frozen_dtype)
            return model
        if is_foreign:
            found = f"weights quantised as {quantisation}"
        elif absent:
            found = f"a folder without {absent[0]}" + (f", in {quantisation}" if quantisation else "")
        else:
            found = f"values of {untied} that differ from those of the weight that config.json ties it to"
    if frozen_dtype is not None:
        raise ValueError(
            "load_pretrained with frozen_dtype reads a folder of safetensors with all weights of the model, in 16 or "
            f"32 bits, in NF4, or in MXFP4 under the model's own parameter names, got {found} ({name_or_path}): pass "
            "such a folder alone, as huggingface_hub.snapshot_download makes one, or set ds_zo.stream.frozen_dtype in "
            "the JSON instead"
        )
    loaded: nn.Module = auto_class.from_pretrained(name_or_path, dtype=dtype, **kwargs)
    return loaded


def _dtype(asked: torch.dtype | str | None, config: Any, source: SafetensorsSource) -> Any:
    """The dtype that `from_pretrained` gives a model if the caller asks for `asked`."""
    found = config.dtype if asked == "auto" else asked or dtype_without_request(config)
    return found or source.float_dtype() or torch.float32


def _untied_name(model: nn.Module, source: SafetensorsSource) -> str | None:
    """The name of a tied weight for which the files have values of its own. `from_pretrained` does not tie such a
    weight. None: there is none."""
    first = {p: name for name, p in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        if name != first[p] and name in source.weight_names() and not torch.equal(source(name), source(first[p])):
            return name
    return None


def _keep_in_float32(model: Any) -> None:
    """Makes the parameters and buffers that the model's class names float32, as `from_pretrained` does: of T5 in
    float16, one layer of each block. The parameters are on the meta device."""
    in_16_bits = model._keep_in_fp32_modules_strict or ()
    kept = {torch.bfloat16: {*in_16_bits}, torch.float16: {*in_16_bits, *(model._keep_in_fp32_modules or ())}}
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in kept.get(p.dtype, ())):
            p.data = p.data.float()


@contextmanager
def _without_zero_init() -> Iterator[None]:
    """Keeps transformers from making a model under `zero.Init`, as it does once TrainingArguments have a JSON with
    stage 3. A model without values has nothing to divide among ranks."""
    from transformers.integrations import deepspeed

    kept = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept


def _quantisation(config: Any) -> str | None:
    """The format in which a checkpoint's config says that its weights are quantised; None if it says nothing."""
    settings = getattr(config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    in_bits = settings.get("bnb_4bit_quant_type") if settings.get("load_in_4bit") else None
    return in_bits or settings.get("quant_method")
