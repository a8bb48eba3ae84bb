"""The JSON surface: what is accepted and what it comes to, what is refused and how the refusal reads."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime import lr_schedules

from ds_zo.config import BACKENDS, ConfigError, ZOParams, backend_of, resolve
from ds_zo.config.learning_rates import far_rate, largest_rate
from ds_zo.config.rules import check_top_level
from ds_zo.config.stock import known_keys

NAN, INF = float("nan"), float("inf")
DROP = object()


def base(kind: str = "ZO", *, stream: bool = True) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": kind, "params": {}},
        "zero_optimization": {"stage": 0},
    }
    if stream:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if stream and kind.lower() == "lsp":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return config


def edited(config: dict[str, Any], edits: dict[str, Any]) -> dict[str, Any]:
    """A copy with values put at dotted paths; DROP removes a key."""
    config = copy.deepcopy(config)
    for path, value in edits.items():
        *parents, last = path.split(".")
        place = config
        for key in parents:
            place = place.setdefault(key, {})
        if value is DROP:
            del place[last]
        else:
            place[last] = value
    return config


def param(key: str, value: Any) -> dict[str, Any]:
    return {f"optimizer.params.{key}": value}


Row = tuple[str, dict[str, Any], list[str], str]
"""A type, edits, words or values that are expected, and the location of an error."""


def rows(table: str) -> list[Row]:
    """Reads lines "type | path = value, ... | word & ... | location". Without a location it is the last path."""
    found: list[Row] = []
    for line in table.splitlines():
        if not line or line.startswith("#"):
            continue
        kind, text, words, *at = line.split(" | ")
        parts = re.split(r"(?:^|, )([\w.-]+) = ", text)[1:]
        edits = {
            path: DROP if value == "DROP" else json.loads(value)
            for path, value in zip(parts[::2], parts[1::2], strict=True)
        }
        found.append((kind, edits, words.split(" & "), at[0] if at else next(reversed(edits), "")))
    return found


MALFORMED = rows(
    """
# wrong types
ZO | optimizer.params.lr = "1e-6" | must be a number & without quotes
ZO | optimizer.params.lr = true | must be a number & true
ZO | optimizer.params.lr = [1e-06] | must be a number
ZO | optimizer.params.zo_eps = "small" | must be a number & "small" & 0.001
ZO | optimizer.params.num_directions = "8" | must be an integer & write 8 without quotes
ZO | optimizer.params.num_directions = 2.0 | must be an integer & write 2
ZO | optimizer.params.num_directions = 2.5 | must be an integer & 2.5
ZO | optimizer.params.num_directions = true | must be an integer & write a number
ZO | optimizer.params.distribution = 1 | must be one of normal, rademacher
ZO | ds_zo.stream.device_slots = "3" | must be an integer & write 3
ZO | ds_zo.cuda_graphs = "false" | must be true or false & without quotes
ZO | ds_zo.stream.device_memory_gb = "24" | must be a number & write 24
ZO | ds_zo.stream.blocks = 3 | dotted path
ZO | ds_zo.stream.blocks = ["model.layers", 3] | dotted path
ZO | ds_zo.stream.blocks = [""] | dotted path
ZO | ds_zo.stream.blocks = "model..layers" | dotted path
ZO | ds_zo.stream = [1] | must be an object
ZO | ds_zo = "zo" | must be an object
ZO | ds_zo.checkpoint = true | must be an object
ZO | ds_zo.rounding = null, ds_zo.checkpoint.asynchronous = "no" | true or false
ZO | optimizer.params = [1e-06] | must be an object
LOMO | optimizer.params.adapter = 0.0001 | must be an object
LSP | optimizer.params.betas = 0.9 | must be a list
LSP | optimizer.params.betas = [0.9] | number of entries
LSP | optimizer.params.betas = [0.9, 0.99, 0.999] | number of entries
LSP | optimizer.params.betas = [0.9, "0.999"] | betas[1] must be a number | optimizer.params.betas.1
# values out of range
ZO | optimizer.params.lr = NaN | finite & NaN
ZO | optimizer.params.lr = Infinity | must be
ZO | optimizer.params.lr = -1e-06 | >= 0 & -1e-06
ZO | optimizer.params.lr = 1e+30 | <= 100
ZO | optimizer.params.zo_eps = 0 | > 0
ZO | optimizer.params.zo_eps = -0.001 | > 0
ZO | optimizer.params.zo_eps = 1000000000.0 | <= 1
ZO | optimizer.params.num_directions = 0 | >= 1
ZO | optimizer.params.num_directions = 1000000000000 | <= 1024
ZO | optimizer.params.seed = -1 | >= 0
ZO | optimizer.params.seed = 9223372036854775808 | <=
ZO | optimizer.params.clip_projected_grad = 0 | > 0
ZO | optimizer.params.weight_decay = -0.1 | >= 0
ZO | optimizer.params.lr = 0.5, optimizer.params.weight_decay = 2.0 | sign of every weight
ZO | ds_zo.stream.device_slots = 1 | >= 2 & got 1
ZO | ds_zo.stream.device_slots = 1000000000 | <= 64
ZO | ds_zo.stream.device_memory_gb = 0 | > 0
ZO | ds_zo.stream.device_memory_gb = NaN | must be
ZO | ds_zo.stream.device_memory_gb = 1000000000000.0 | <= 100000
ZO | ds_zo.stream.resident_blocks = -1 | >= 0
ZO | ds_zo.stream.writeback_interval = 0 | >= 1
ZO | ds_zo.stream.writeback_interval = 65 | <= 64
LSP | optimizer.params.betas = [0.9, 1.0] | betas[1] must be < 1 | optimizer.params.betas.1
LSP | optimizer.params.eps = 0.0 | > 0
LSP | optimizer.params.subspace_dim = 0 | >= 1
LSP | optimizer.params.bias_threshold = 1.5 | <= 1
AdaLOMO | optimizer.params.decay_rate = 0.8 | <= 0
AdaLOMO | optimizer.params.adalomo_eps = [1e-30, -1] | >= 0 | optimizer.params.adalomo_eps.1
AdaLOMO | optimizer.params.adalomo_eps = [0.0, 0.001] | >= 1e-30 | optimizer.params.adalomo_eps.0
LOMO | optimizer.params.clip_grad_value = -1.0 | > 0
# words outside a closed set
ZO | optimizer.params.distribution = "gaussian" | normal, rademacher
ZO | optimizer.params.distribution = "Normal" | did you mean "normal"
ZO | optimizer.params.compute_dtype = "bfloat16" | auto, fp32, tf32, bf16, fp16
ZO | ds_zo.stream.wire_dtype = "fp4" | bf12 & fp8
ZO | ds_zo.stream.master = "full" | split, wire
ZO | ds_zo.rounding = "up" | stochastic, nearest
LOMO | optimizer.params.norm_scope = "layer" | global, group
# unknown keys
ZO | optimizer.params.zo_epss = 0.001 | unknown key & did you mean "zo_eps"?
ZO | optimizer.params.learning_rate = 1e-06 | unknown key & lr
ZO | optimizer.params.subspace_dim = 64 | unknown key
LOMO | optimizer.params.zo_eps = 0.001 | unknown key
LOMO | optimizer.params.adapter = {"lrr": 0.0001} | did you mean "lr"? | optimizer.params.adapter.lrr
ZO | optimizer.lr = 1e-06 | move it into optimizer.params
ZO | optimizer.parms = {} | did you mean "params"?
ZO | ds_zo.strem = {} | did you mean "stream"?
ZO | ds_zo.strict = true | unknown key
ZO | ds_zo.stream.device_slot = 2 | did you mean "device_slots"?
ZO | ds_zo.checkpoint.async = true | unknown key
ZO | zero_optimisation = {"stage": 0} | did you mean "zero_optimization"? & "_"
LSP | Gradient_clipping = 1.0 | did you mean "gradient_clipping"?
ZO | lr_scheduler = {} | did you mean "scheduler"?
ZO | ds_zoo = {"rounding": "nearest"} | ds_zo
ZO | stream = {"device_slots": 3} | belongs inside ds_zo, & move it
LOMO | device_memory_gb = 24 | belongs inside ds_zo.stream,
ZO | offload_param = {"device": "cpu"} | belongs inside zero_optimization,
# combinations of ours
ZO | ds_zo = {}, zero_optimization.ds_zo = {} | one place & remove one
ZO | ds_zo.params = {"zo_eps": 0.001} | goes with ds_zo.backend & optimizer.params
ZO | optimizer = DROP, ds_zo.params = {"zo_eps": 0.001} | must be named | optimizer.type
ZO | ds_zo.backend = "lomo" | one backend & "ZO" & "lomo" & remove ds_zo.backend
AdamW | ds_zo.backend = "zo" | without an optimizer block & "AdamW"
AdamW | ds_zo.rounding = "nearest" | must be named & "AdamW" | optimizer.type
Z0 |  | must be named & "Z0" | optimizer.type
ZO | ds_zo.stream.fuse_update = false | not a key & got false & remove it & --only no_fuse_update
LOMO | ds_zo.stream.overlap = false | not a key & got false & remove it & --only no_overlap
ZO | ds_zo.stream.reuse_buffers = 1 | not a key & got 1 & remove it
ZO | zero_optimization.offload_param = DROP, ds_zo.stream.device_memory_gb = 24 | needs block streaming & "cpu"
ZO | zero_optimization.offload_param.device = "none", ds_zo.stream.resident_blocks = 2 | needs block streaming
ZO | ds_zo.stream.wire_dtype = "fp8", zero_optimization = {} | needs block streaming | ds_zo.stream.wire_dtype
LOMO | ds_zo.stream.writeback_interval = 8 | belongs to ZO & lomo
ZO | ds_zo.stream.offload_activations = true | belongs to LOMO, AdaLOMO, LSP and Adapter
Adapter | ds_zo.stream.wire_dtype = "fp8" | must be auto
Adapter | optimizer.params.adam_w_mode = false | must be true
ZO | optimizer.params.num_members = 4 | needs noise "rank1" & got 4 & remove one
ZO | optimizer.params.noise = "rank1", optimizer.params.num_directions = 2 | needs noise "mezo" & remove one
ZO | optimizer.params.compute_dtype = "bf16", optimizer.params.noise = "rank1" | got autocast & set bf16.enabled
LSP | ds_zo.stream.wire_dtype = "fp8" | the model's fp32 under lsp & "fp8"
LSP | ds_zo.stream.master = "split" | belongs to ZO & under lsp
LOMO | ds_zo.checkpoint.trajectory = true | belongs to ZO
LSP | optimizer.params.subspace_dim = 8, optimizer.params.nonzeros_per_row = 16 | <= subspace_dim (8) & 16
LSP | zero_optimization.offload_optimizer.device = "none" | must run Adam on the host & remove offload_param
LSP | optimizer.params.update_rms = "adamw" | not a key & "adamw" & remove it
LSP | optimizer.params.fit_lr = 0.1 | not a key & 0.1 & remove it
LSP | optimizer.params.fit_beta = 0.0 | not a key & remove it
LSP | optimizer.params.fit_timeout_s = 60 | not a key & 60 & fit_steps
LSP | optimizer.params.payload_dtype = "int8" | float32 copies & "int8" & remove it
# combinations with stock keys
ZO | bf16.enabled = true, fp16.enabled = true | one dtype & set one of them to false | bf16.enabled
ZO | bf16.enabled = true, optimizer.params.compute_dtype = "fp16" | "auto" or "bf16" & "fp16"
ZO | fp16.enabled = true, optimizer.params.compute_dtype = "fp32" | "auto" or "fp16"
ZO | bf16.enabled = true, torch_autocast.dtype = "bfloat16", torch_autocast.enabled = true | disable one
ZO | torch_autocast = {"enabled": true, "dtype": "bf16"}, optimizer.params.compute_dtype = "fp16" | must be "auto"
ZO | torch_autocast = {"enabled": true, "dtype": "int8"} | bfloat16 or float16 & int8 | torch_autocast.dtype
ZO | torch_autocast = {"enabled": "yes"} | true or false | torch_autocast.enabled
LOMO | gradient_clipping = 1.0, optimizer.params.clip_grad_value = 0.5 | set gradient_clipping to 0
LOMO | gradient_accumulation_steps = 4 | must be 1 & got 4 & sequential
AdaLOMO | train_batch_size = 16 | must be 1 & got 4 | gradient_accumulation_steps
ZO | zero_optimization.offload_param.device = "nvme" | "nvme" & write "cpu"
LSP | zero_optimization.offload_optimizer = {"device": "nvme"} | "nvme" | zero_optimization.offload_optimizer.device
ZO | pipeline = {"stages": 2} | pipeline & remove the section
ZO | tensor_parallel = {"autotp_size": 4} | shards
LSP | tensor_parallel = {"tp": {"tp_size": 2}} | shards
LOMO | hybrid_engine = {"enabled": true} | hybrid engine
ZO | checkpoint = {"load_universal": true} | universal & set it to false | checkpoint.load_universal
ZO | expert_parallel = {"enabled": true} | experts
ZO | sequence_parallel_size = 2 | whole sequences & set it to 1
ZO | ds_zo.compile_blocks = true | belongs to LOMO, AdaLOMO and LSP
ZO | compile = {"deepcompile": true} | set it to false | compile.deepcompile
ZO | zero_optimization.zenflow = {"topk_ratio": 0.1} | ZenFlow
ZO | compression_training = {"weight_quantization": {}} | remove the key
ZO | flops_profiler = {"enabled": true} | wall_clock_breakdown
# stock keys, found wrong before DeepSpeed gets to them
ZO | gradient_accumulation_steps = "4" | must be an integer & write 4
ZO | gradient_accumulation_steps = 0 | >= 1
ZO | train_micro_batch_size_per_gpu = "auto" | "auto" & Trainer and Accelerate
ZO | train_batch_size = 16.0 | must be an integer & write 16
LOMO | gradient_clipping = "1.0" | must be a number
LOMO | gradient_clipping = -1.0 | >= 0
LOMO | gradient_clipping = NaN | finite
ZO | zero_optimization.stage = 4 | 0, 1, 2, 3 & got 4
ZO | zero_optimization.stag = 2 | did you mean "stage"?
ZO | zero_optimization.offload_param.device = "gpu" | none, cpu, nvme
ZO | zero_optimization.offload_param = "cpu" | must be an object
ZO | zero_optimization.offload_param = true | must be an object & write {"device": ...}
ZO | zero_optimization = null | must be an object
ZO | zero_optimization.cpu_offload_param = true | must be valid for DeepSpeed & correct it | zero_optimization
ZO | zero_optimization.leaf_module = 1 | must be a mapping & correct it | zero_optimization
ZO | optimizer = "ZO" | must be an object & write {"type": "ZO", "params": {...}}
ZO | bf16 = true | must be an object
LOMO | fp16.enabled = 3 | true or false
LOMO | fp16.enabled = true, fp16.initial_scale_power = 4000 | 0..126
LOMO | fp16.enabled = true, fp16.hysteresis = 0 | >= 1
LOMO | fp16.enabled = true, fp16.loss_scale = "big" | must be a number
ZO | scheduler = "WarmupLR" | must be an object
ZO | scheduler = {"type": "WarmUpLR", "params": {}} | did you mean "WarmupLR"? | scheduler.type
ZO | scheduler = {"type": "LinearLR"} | must be an object | scheduler.params
ZO | scheduler = {"type": "LinearLR", "params": {"warmup": 3}} | warmup | scheduler.params
LSP | scheduler.params.max_lr = 0.001, scheduler.params.total_steps = 10, scheduler.type = "OneCycleLR" | \
of OneCycleLR must be false & set cycle_momentum to false | scheduler.params.cycle_momentum
"""
)


@pytest.mark.parametrize(
    ("kind", "edits", "words", "location"),
    MALFORMED,
    ids=[f"{kind}-{json.dumps(e, default=lambda left_out: 'DROP')}" for kind, e, *_ in MALFORMED],
)
def test_malformed_is_one_line_with_rule_value_remedy_and_place(
    kind: str, edits: dict[str, Any], words: list[str], location: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(edited(base(kind), edits))
    message = str(caught.value)
    assert "\n" not in message
    named = len(re.findall(rf"(?<![\w.]){re.escape(location)}(?!\w|\.\w)", message))
    assert named == 1 if message.endswith(f"({location})") else named, message
    assert caught.value.location == location
    assert all(word in message for word in words), message
    assert ";" in message or ":" in message, f"no remedy in: {message}"


@pytest.mark.usefixtures("single_process")
def test_malformed_configs_fail_in_initialize_as_they_do_in_resolve() -> None:
    """Also where DeepSpeed reads, and would refuse, the key before an engine is made."""
    for kind, edits, _, where in MALFORMED:
        config = edited(base(kind), edits)
        model = torch.nn.Linear(2, 2)
        before = model.weight.data_ptr()
        with pytest.raises(ConfigError) as caught:
            deepspeed.initialize(model=model, config=config)
        assert where in str(caught.value), (kind, edits)
        assert "\n" not in str(caught.value)
        assert model.weight.data_ptr() == before


def test_every_malformed_case_is_right_without_its_edit() -> None:
    """A case could otherwise be refused for something else."""
    for kind in BACKENDS:
        assert resolve(base(kind)).backend == kind


def test_several_errors_are_counted() -> None:
    config = edited(base(), {"optimizer.params.lr": "x", "optimizer.params.zo_eps": -1, "optimizer.params.sed": 1})
    with pytest.raises(ConfigError, match=r"^lr must be a number.*; 2 more after this one \(optimizer.params.lr\)$"):
        resolve(config)


_ALONE = [case for case in MALFORMED if case[1].keys() == {case[3]} - {"optimizer.type"}]
"""Cases in which one key is wrong, whatever the other keys are."""


@pytest.mark.parametrize("seed", range(60))
def test_all_errors_are_found_in_three_rounds(seed: int) -> None:
    """Those of keys, then of a section's keys together, then of sections: never one that follows from another."""
    draw = random.Random(seed)
    kind = draw.choice(["ZO", "ZO", "LOMO", "LSP"])
    left: dict[str, dict[str, Any]] = {}
    for _, edits, _, location in draw.sample([case for case in _ALONE if case[0] == kind], k=4):
        if not any(f"{location}.".startswith(f"{at}.") or f"{at}.".startswith(f"{location}.") for at in left):
            left[location] = edits
    for _ in range(3):
        config = base(kind)
        for edits in left.values():
            config = edited(config, edits)
        try:
            resolve(config)
        except ConfigError as error:
            found = {each.location for each in (error, *error.also)}
            assert len(found) == 1 + len(error.also) and found <= left.keys()
            left = {location: edits for location, edits in left.items() if location not in found}
    assert not left


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(edited(base(), param("lr", "x\n" * 500)))
    assert len(str(caught.value)) < 200


SECTION = {"optimizer": DROP, "ds_zo.backend": "zo"}


@pytest.mark.parametrize(
    ("params", "words", "location"),
    [
        ({"lr": 1e-6}, ["belongs to the optimizer that the script makes", "1e-06", "set it there"], ".lr"),
        ({"weight_decay": 0.1}, ["belongs to the optimizer"], ".weight_decay"),
        ({"zo_epss": 1e-3}, ['did you mean "zo_eps"?'], ".zo_epss"),
        ({"betas": [0.9, 0.999]}, ["unknown key"], ".betas"),
        ({"seed": "7"}, ["write 7 without quotes"], ".seed"),
        ([1e-3], ["must be an object"], ""),
    ],
)
def test_malformed_params_of_the_section(params: Any, words: list[str], location: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(edited(base(), {**SECTION, "ds_zo.params": params}), client_optimizer=True)
    assert caught.value.location == f"ds_zo.params{location}"
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_params_of_the_section_are_those_of_its_backend() -> None:
    params = {"zo_eps": 1e-2, "num_directions": 2, "seed": 7, "lr": None}
    config = resolve(edited(base(), {**SECTION, "ds_zo.params": params}), client_optimizer=True)
    assert config.optimizer == ZOParams(zo_eps=1e-2, num_directions=2, seed=7)
    wrong = {**SECTION, "bf16.enabled": True, "ds_zo.params": {"compute_dtype": "fp16"}}
    with pytest.raises(ConfigError, match=r"\(ds_zo\.params\.compute_dtype\)"):
        resolve(edited(base(), wrong))


def test_client_optimizer_beside_an_optimizer_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"ds_zo": \{"backend": "zo"\}'):
        resolve(base(), client_optimizer=True)


def test_refusing_takes_no_memory_and_does_not_edit_the_json() -> None:
    config = edited(base(), {"ds_zo.stream.device_slots": 1})
    before = copy.deepcopy(config)
    with pytest.raises(ConfigError):
        resolve(config)
    resolve(edited(config, {"ds_zo.stream.device_slots": 2}))
    assert config == before
    assert not torch.cuda.is_initialized()


VALID = rows(
    """
ZO |  | backend zo & dtype torch.float32 & stream True & pin_memory True & ignored () & warnings ()
aDaLoMo |  | backend adalomo
ZO | ds_zo = null | backend zo
ZO | ds_zo.backend = "ZO" | backend zo
ZO | ds_zo.stream = {"resident_blocks": "auto", "writeback_interval": "auto", "blocks": null} | stream True
ZO | ds_zo.stream.wire_dtype = "auto" | stream True
ZO | ds_zo.stream = {"blocks": ["encoder.layers", "decoder.layers"], "device_memory_gb": 24} | stream True
ZO | ds_zo.stream.blocks = [] | stream True
ZO | ds_zo.stream.wire_dtype = "fp32", bf16.enabled = true | dtype torch.bfloat16
ZO | ds_zo.stream.fuse_update = true | ignored ('ds_zo.stream.fuse_update',)
LSP | ds_zo.stream.overlap = true | ignored ('ds_zo.stream.overlap',)
ZO | ds_zo.stream.reuse_buffers = null | ignored ()
ZO | bfloat16 = {"enabled": true} | dtype torch.bfloat16
ZO | bf16 = {"enabled": "auto"} | dtype torch.float32
ZO | optimizer.params.compute_dtype = "tf32" | dtype torch.float32
ZO | optimizer.params.compute_dtype = "bf16", bf16.enabled = true | dtype torch.bfloat16
ZO | torch_autocast = {"enabled": true, "dtype": "bfloat16"} | autocast torch.bfloat16 & dtype torch.float32
ZO | torch_autocast = {"enabled": false, "dtype": "nonsense"} | autocast None
ZO | zero_optimization = {} | stream False & pin_memory False
ZO | zero_optimization = true | zero_stage 1 & stream False
ZO | zero_optimization.stage = 3 | zero_stage 3 & stream True
ZO | zero_optimization.offload_param = {"device": "cpu", "pin_memory": false} | stream True & pin_memory False
ZO | gradient_accumulation_steps = 8 | gradient_accumulation_steps 8
ZO | train_batch_size = 16 | gradient_accumulation_steps 4
ZO | gradient_clipping = 0 | gradient_clipping 0.0 & clipping_explicit True
ZO |  | gradient_clipping 1.0 & clipping_explicit False
ZO | fp16 = {"enabled": true, "loss_scale": 0} | dtype torch.float16 & ignored ('fp16.loss_scale',)
ZO | pipeline = {"stages": "auto"}, tensor_parallel = {"autotp_size": 1} | backend zo
ZO | hybrid_engine = {"enabled": false} | backend zo
ZO | compile = {"deepcompile": false}, sequence_parallel_size = 1, zero_optimization.zenflow = null | backend zo
ZO | zero_optimization = {}, ds_zo.stream.device_slots = 3 | ignored ('ds_zo.stream.device_slots',)
ZO | ds_zo = {"checkpoint": {"trajectory_dir": "logs"}} | ignored ('ds_zo.checkpoint.trajectory_dir',)
ZO | ds_zo = {"checkpoint": {"trajectory": true, "trajectory_dir": "logs"}} | ignored ()
ZO | ds_zo = {"cuda_graphs": true, "rounding": "stochastic"} | ignored ()
LOMO | ds_zo = {"cuda_graphs": true, "rounding": "stochastic"} | ignored ('ds_zo.cuda_graphs',)
LSP | ds_zo = {"cuda_graphs": false} | ignored ()
AdamW | ds_zo = {"backend": "adapter", "rounding": "stochastic"} | ignored ('ds_zo.rounding',)
AdamW | ds_zo = {"backend": "adapter", "rounding": "nearest"} | ignored ()
LOMO | gradient_accumulation_steps = 4, optimizer.params.accumulation = "sequential" | gradient_accumulation_steps 4
LOMO | optimizer.params.clip_grad_value = 0.5 | gradient_clipping 0.0 & clipping_explicit False
LOMO | gradient_clipping = 0, optimizer.params.clip_grad_value = 0.5 | gradient_clipping 0.0
LOMO | optimizer.params.adapter = {"lr": 0.0001, "betas": [0.9, 0.99], "weight_decay": 0.01} | backend lomo
LOMO | zero_optimization.offload_optimizer = {"device": "cpu"} | \
offload_optimizer False & ignored ('zero_optimization.offload_optimizer',)
LOMO | zero_optimization.offload_optimizer = {"device": "none"} | ignored ()
LSP | zero_optimization = {"stage": 2, "offload_optimizer": {"device": "cpu"}} | offload_optimizer True & ignored ()
LSP | optimizer.params.betas = [0.9, 0.99] | ignored () & offload_optimizer True
LOMO | flops_profiler = {"enabled": true} | backend lomo
LSP | scheduler = {"type": "OneCycleLR", "params": {"max_lr": 0.001, "total_steps": 10, "cycle_momentum": false}} | \
backend lsp
"""
)
"""The third part of a line has attributes of the resolved configuration, each with its value."""


@pytest.mark.parametrize(("kind", "edits", "expected", "_"), VALID, ids=[f"{row[0]}-{row[1]}" for row in VALID])
def test_valid(kind: str, edits: dict[str, Any], expected: list[str], _: str) -> None:
    config = resolve(edited(base(kind), edits))
    assert [f"{text.split(' ')[0]} {getattr(config, text.split(' ')[0])}" for text in expected] == expected


@pytest.mark.parametrize("params", [None, DROP, {}, {"lr": "auto", "zo_eps": None, "betas": "auto"}])
def test_parameters_left_out_have_their_defaults(params: Any) -> None:
    config = resolve(edited(base("zo"), {"optimizer.params": params}))
    assert (config.optimizer, config.ignored) == (ZOParams(), ())


def test_accumulation_steps_follow_the_world_size() -> None:
    config = edited(base(), {"train_batch_size": 16})
    assert resolve(config, world_size=2).gradient_accumulation_steps == 2


def test_backend_without_an_optimizer_block() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "ds_zo": {"backend": "lsp"}}
    assert backend_of(config) == "lsp"
    assert resolve(config, client_optimizer=True).backend == "lsp"


def test_loss_scale_is_read_and_says_what_was_written() -> None:
    config = edited(base("LOMO"), {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 50}})
    scale = resolve(config).loss_scale
    assert (scale.loss_scale, scale.initial_scale_power, scale.loss_scale_window) == (0, 12, 50)
    assert scale.written == ("initial_scale_power", "loss_scale_window")


STOCK_ZERO_OFFLOAD: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": False},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "torch_adam": False},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
}


@pytest.mark.parametrize("kind", ["ZO", "LOMO", "AdaLOMO"])
def test_stock_offload_json_with_only_the_type_edited(kind: str) -> None:
    config = resolve(edited(STOCK_ZERO_OFFLOAD, {"optimizer.type": kind}))
    assert config.ignored == (
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.torch_adam",
        *(f"zero_optimization.{key}" for key in STOCK_ZERO_OFFLOAD["zero_optimization"]),
    )
    assert config.optimizer.lr == 3e-5
    assert "AdamW's rates do not suit it" in str(far_rate(config, 3e-5, at="lr", num_trained=7 * 10**9))


@pytest.mark.parametrize(
    ("kind", "lr", "said"),
    [
        (
            "LOMO",
            2e-5,
            "got 2e-05, which is far below them; AdamW's rates do not suit it; start from 0.03 with",
        ),
        ("AdaLOMO", 0.5, "got 0.5, which is far above them; AdamW's rates do not suit it; start from 0.0005 (here)"),
        ("AdaLOMO", 2e-5, "far below"),
        ("ZO", 1e-3, "1e-07 to 1e-05, got 0.001, which is far above them; AdamW's rates do not suit it; start from"),
        ("ZO", 1e-9, "far below"),
        ("LSP", 0.1, "far above them; start from 2e-05 (here)"),
        ("Adapter", 0.1, "far above"),
        *[("ZO", lr, "") for lr in (0.0, 1e-8, 1e-6, 5e-4)],
        *[("LOMO", lr, "") for lr in (1e-3, 1e-2, 0.1, 1.0)],
        *[("AdaLOMO", lr, "") for lr in (1e-4, 2e-3)],
        *[(kind, lr, "") for kind in ("LSP", "Adapter") for lr in (5e-7, 1e-3)],  # DPO's and SmolLM2's
    ],
)
def test_a_learning_rate_far_from_the_table_is_warned_of(kind: str, lr: float, said: str) -> None:
    config = base(kind)
    if kind == "Adapter":
        config["ds_zo"], config["optimizer"]["type"] = {"backend": "adapter"}, "AdamW"
    found = far_rate(resolve(config), lr, at="here")
    assert (said in found) if found and said else (found is None and not said), found


def test_a_learning_rate_left_out_is_that_of_the_table() -> None:
    for kind, lr in (("ZO", 1e-6), ("LOMO", 1e-2), ("AdaLOMO", 5e-4), ("LSP", 2e-5)):
        assert resolve(base(kind)).optimizer.lr == lr


def test_the_rate_that_zo_is_warned_of_falls_with_the_number_of_parameters() -> None:
    rates = [largest_rate("zo", round(size)) for size in (1e6, 1.4e8, 1.3e9, 1.3e10)]
    assert rates == [5e-4, pytest.approx(7e-5, rel=0.1), 1e-5, 1e-5]
    assert rates[1] > 3e-5, "which trains a model of 135M in the shipped grids"


def test_stock_eps_is_not_the_perturbation() -> None:
    config = resolve(edited(base(), param("eps", 1e-8)))
    assert isinstance(config.optimizer, ZOParams)
    assert config.optimizer.zo_eps == 1e-3
    assert config.ignored == ("optimizer.params.eps",)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {}),
        ("WarmupLR", {"warmup_max_lr": 1e-6}),
        ("WarmupLR", {"warmup_max_lr": 5e-5}),
        ("WarmupDecayLR", {}),
        ("WarmupDecayLR", {"warmup_max_lr": None}),
        ("WarmupDecayLR", {"warmup_max_lr": 1e-6}),
        ("WarmupCosineLR", {}),
    ],
)
def test_a_scheduler_is_warned_of_where_it_climbs_to_another_rate(kind: str, params: dict[str, Any]) -> None:
    """What DeepSpeed's schedulers reach is found by running them."""
    params = {"warmup_num_steps": 3, **params, **({} if kind == "WarmupLR" else {"total_num_steps": 10})}
    group = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-6)
    scheduler, rates = getattr(lr_schedules, kind)(group, **params), []
    for _ in range(6):
        scheduler.step()
        rates.append(group.param_groups[0]["lr"])
    peak = max(rates)
    config = edited(base(), {**param("lr", 1e-6), "scheduler": {"type": kind, "params": params}})
    found = [line for line in resolve(config).warnings if "warmup_max_lr" in line]
    assert len(found) == (peak != pytest.approx(1e-6))
    assert all(f"warmup_max_lr {peak:g}" in line for line in found)


DOCUMENTED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler communication_data_type
prescale_gradients gradient_predivide_factor sparse_gradients fp16 bf16 bfloat16 torch_autocast amp gradient_clipping
zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown
dump_state memory_breakdown autotuning flops_profiler activation_checkpointing sparse_attention data_efficiency
curriculum_learning tensorboard wandb comet csv_monitor comms_logger elasticity compression_training checkpoint
data_types aio hybrid_engine pipeline tensor_parallel compile timers weight_quantization nebula progressive_layer_drop
eigenvalue quantize_training use_data_before_expert_parallelism sequence_parallel_size data_parallel_size
disable_allgather dataloader_drop_last load_universal_checkpoint fp32_allreduce graph_harvesting
seq_parallel_communication_data_type managed_gradient_accumulation gradient_allreduce_op expert_parallel log_level
vocabulary_size
""".split()
FOREIGN = """
my_comment comment comments _note //optimizer #zero_optimisation _stream wandb_project wandb_name run_name model dtype
seed precision version description tensorboard_dir checkpoint_dir log_dir optimizer_name fp32 fp8 eval_batch_size
max_grad_norm
""".split()


def test_keys_of_deepspeed_and_of_the_user_are_left_alone() -> None:
    for key in (*DOCUMENTED, *FOREIGN, *known_keys()):
        check_top_level({**base(), key: {}})
    read_where_optional = {"optimizer", "scheduler", "flops_profiler", "activation_checkpointing", "aio", "csv_monitor"}
    assert read_where_optional <= known_keys(), "those that DeepSpeed asks for by another method than get"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_section_may_stand_in_zero_optimization(backend: str) -> None:
    section = {"backend": backend, "stream": {"device_slots": 3}}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1, "ds_zo": section}}
    before = copy.deepcopy(config)
    assert backend_of(config) == backend
    found = resolve(config, client_optimizer=True)
    assert (found.backend, found.zero_stage, found.section.stream.device_slots) == (backend, 1, 3)
    assert config == before


def test_an_optimizer_block_spelt_another_way_is_never_ignored() -> None:
    with pytest.raises(ConfigError, match=r'write "optimizer"$'):
        backend_of({"optimiser": {"type": "ZO"}})
    assert backend_of({"optimiser": {"type": "AdamW"}}) is None
    assert backend_of({"_optimizer": {"type": "ZO"}}) is None, "switched off"
    assert backend_of({"optimizers": {"type": "ZO"}, "optimizer": {"type": "AdamW"}}) is None


def test_stage_3_that_shards_nothing_and_serialising_clip_scope_are_warned_of() -> None:
    (warning,) = resolve(edited(base(stream=False), {"zero_optimization.stage": 3})).warnings
    assert "stage 3 shards no weights here: every rank keeps the whole model" in warning
    assert resolve(edited(base(stream=True), {"zero_optimization.stage": 3})).warnings == ()
    assert "clip_scope" in resolve(edited(base("LSP"), param("clip_scope", "global"))).warnings[0]


@pytest.mark.parametrize(
    "config",
    [
        None,
        "ds_config.json",
        {},
        {"optimizer": None},
        {"optimizer": "ZO"},
        {"optimizer": {"params": {"lr": 1}}},
        {"optimizer": {"type": None}},
        {"optimizer": {"type": "Z0"}},
        {"optimizer": {"type": "LOMOO"}},
        {"optimizer": {"type": "AdamW"}, "ds_zo": {"stream": {}}},
        {"ds_zo": None},
        {"ds_zo": {"backend": None}},
        STOCK_ZERO_OFFLOAD,
    ],
)
def test_stock_configurations_name_none_of_ours(config: Any) -> None:
    assert backend_of(config) is None


@pytest.mark.parametrize("section", [3, [], False, "", "auto"])
def test_a_section_that_is_no_object_is_never_taken_for_a_stock_configuration(section: Any) -> None:
    for config in ({"ds_zo": section}, {"zero_optimization": {"ds_zo": section}}):
        with pytest.raises(ConfigError, match=r"^ds_zo must be an object, got "):
            backend_of(config)


@pytest.mark.parametrize("name", ["zoo", "AdamW", 3, True, ["zo"]])
def test_a_wrong_backend_name_is_never_taken_for_a_stock_configuration(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"zo, lomo, adalomo, lsp.*\(ds_zo.backend\)$"):
        backend_of({"ds_zo": {"backend": name}})


@pytest.mark.parametrize("key", ["ds-zo", "dszo", "DS_ZO", "ds_zoo"])
def test_a_section_spelt_another_way_is_never_ignored(key: str) -> None:
    for config in ({key: {"backend": "zo"}}, {**base("ZO"), key: {}}):
        with pytest.raises(ConfigError, match=r'write "ds_zo"$'):
            backend_of(config)


def test_a_remedy_names_the_place_that_this_json_has() -> None:
    with pytest.raises(ConfigError, match=r"set ds_zo\.params\.accumulation"):
        resolve({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "ds_zo": {"backend": "lomo"}})


def test_adapter_takes_a_stock_adamw_of_the_json_or_of_the_script() -> None:
    json: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.9]}},
        "ds_zo": {"backend": "adapter"},
    }
    found = resolve(json)
    assert (found.backend, found.params_at, found.optimizer.lr) == ("adapter", "optimizer.params", 3e-4)
    assert (found.ignored, found.warnings) == ((), ())
    with pytest.raises(ConfigError, match=r"one optimizer must be given, got optimizer.type \"AdamW\""):
        resolve(json, client_optimizer=True)
    with pytest.raises(ConfigError, match=r'of type adamw or adam, got "adapter" beside .* "SGD"; .*, or write adamw'):
        resolve({**json, "optimizer": {"type": "SGD"}})
    with pytest.raises(ConfigError, match="selects without an optimizer block"):
        resolve({**json, "ds_zo": {"backend": "lsp"}})
    del json["optimizer"]
    assert resolve(json, client_optimizer=True).params_at == "ds_zo.params"
    json["ds_zo"]["params"] = {"betas": [0.9, 0.9]}
    with pytest.raises(ConfigError, match="betas belongs to the optimizer that the script makes"):
        resolve(json, client_optimizer=True)
