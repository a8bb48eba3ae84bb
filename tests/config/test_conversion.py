"""`convert`: every valid JSON of stock DeepSpeed, and of ours, becomes a valid JSON of every backend."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recipes
from ds_zo.config import BACKENDS, ConfigError, backend_of
from ds_zo.config.convert import Conversion, check, convert
from ds_zo.config.draft import ABSENT
from ds_zo.config.learning_rates import STARTING_RATES, starting_rate
from ds_zo.config.stock import lookup, read_stock
from ds_zo.training.arguments import parse_args
from ds_zo.training.json_config import read_config
from tests.helpers.client_jsons import BUCKETS, OF_CLIENTS, ON_HOST, PRECISION, STAGE3, WARMUP

REPO = Path(__file__).parents[2]
SHIPPED = sorted((REPO / "ds_configs").glob("*.json"))


def converted(config: dict[str, Any], to: str, **options: Any) -> Conversion:
    """The conversion, after a look at what must hold for each."""
    before = copy.deepcopy(config)
    found = convert(config, to=to, **options)
    assert config == before, "the input changed"
    assert check(found.config).backend == backend_of(found.config) == to
    assert applied(config, found) == found.config, "a change is not in the record"
    again = convert(found.config, to=to)
    assert (again.config, again.changes) == (found.config, ())
    return found


def applied(config: dict[str, Any], found: Conversion) -> dict[str, Any]:
    """The input with the recorded changes, and without sections of ours that they left empty."""
    config = copy.deepcopy(config)
    for change in found.changes:
        assert change.why and "{" not in change.why and "\n" not in str(change)
        *parents, key = change.key.split(".")
        inner = config
        for name in parents:
            inner[name] = inner = inner.get(name) or {}
        assert inner.get(key, ABSENT) == change.old
        if change.new is ABSENT:
            del inner[key]
        else:
            inner[key] = copy.deepcopy(change.new)
    for outer in (config, config.get("zero_optimization") or {}):
        section = outer.get("ds_zo") or {}
        for key in [key for key, value in section.items() if value == {}]:
            del section[key]
        if outer.get("ds_zo") == {}:
            del outer["ds_zo"]
    return config


def some(rng: random.Random, *choices: Any) -> Any:
    return copy.deepcopy(rng.choice(choices))


def random_stock(seed: int) -> dict[str, Any]:
    """A valid JSON of stock DeepSpeed."""
    rng = random.Random(seed)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": some(rng, 1, 8, "auto")}
    optional: dict[str, tuple[Any, ...]] = {
        "train_batch_size": (64, "auto"),
        "gradient_accumulation_steps": (1, 4, "auto"),
        "gradient_clipping": (0, 0.5, 1.0, "auto"),
        "communication_data_type": ("fp16",),
        "zero_allow_untested_optimizer": (True,),
        "zero_force_ds_cpu_optimizer": (True, False),
        "prescale_gradients": (True,),
        "steps_per_print": (100,),
        "wall_clock_breakdown": (True,),
        "activation_checkpointing": ({"partition_activations": True},),
        "flops_profiler": ({"enabled": True}, {"enabled": False}),
        "compile": ({"deepcompile": True},),
        "checkpoint": ({"load_universal": True, "tag_validation": "Warn"}, {"load_universal": False}),
        "aio": ({"block_size": 1048576},),
        "tensorboard": ({"enabled": False},),
        "_comment": ("the user's own",),
    }
    for key, choices in optional.items():
        if rng.random() < 0.4:
            config[key] = some(rng, *choices)
    precision = rng.choice(("bf16", "fp16", "auto", "autocast", "fp32"))
    if precision in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] |= some(
            rng, {}, {"loss_scale": 0, "initial_scale_power": 12}, {"fp16_master_weights_and_grads": False}
        )
    if precision == "auto":
        config |= copy.deepcopy(PRECISION)
    if precision == "autocast":
        config["torch_autocast"] = {"enabled": True} | some(rng, {}, {"dtype": "bfloat16"}, {"dtype": "float16"})
    zero = {"stage": rng.randrange(4)} | {k: v for k, v in {**BUCKETS, **STAGE3}.items() if rng.random() < 0.3}
    places = ({"device": "cpu"}, ON_HOST, {"device": "none"}, {"device": "auto"}, {"device": "nvme", "nvme_path": "/n"})
    for place in ("offload_optimizer", "offload_param"):
        if rng.random() < 0.5:
            zero[place] = some(rng, *places)
    if zero["stage"] and rng.random() < 0.1:
        zero["zenflow"] = {"topk_ratio": 0.1}
    if rng.random() < 0.05:
        zero = {"stage": 2, "cpu_offload": True}
    config["zero_optimization"] = some(rng, *[zero] * 19, True)
    lr: Any = some(rng, "auto", 1e-5, 3e-4)
    if rng.random() < 0.6:
        config["optimizer"] = {"type": some(rng, "AdamW", "Adam", "SGD", "Lion"), "params": {"lr": lr}}
        for key, choices in {
            "weight_decay": (0.0, 0.01, "auto"),
            "betas": ([0.9, 0.95], "auto"),
            "eps": (1e-8, "auto"),
        }.items():
            if rng.random() < 0.5:
                config["optimizer"]["params"][key] = some(rng, *choices)
        if rng.random() < 0.1:
            del config["optimizer"]["params"]
    schedulers: tuple[dict[str, Any], ...] = (
        {"type": "WarmupLR", "params": dict(WARMUP)},
        {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_min_lr": 1e-7, "warmup_max_lr": 3e-4}},
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}},
        {"type": "OneCycleLR", "params": {"max_lr": [1e-3, 1e-4], "total_steps": 10}},
        {"type": "CosineAnnealingLR", "params": {"T_max": 10, "eta_min": 1e-6}},
    )
    if rng.random() < 0.6:
        config["scheduler"] = some(rng, *schedulers)
    return config


@pytest.mark.parametrize("to", BACKENDS)
def test_every_stock_json_becomes_a_valid_one_without_idle_keys(to: str) -> None:
    for seed in range(50):
        stock = random_stock(seed)
        read_stock({key: value for key, value in stock.items() if value != "auto"}, world_size=1)
        try:
            found = converted(stock, to)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {json.dumps(stock)}") from error
        resolved = check(found.config)
        assert resolved.ignored == (), seed
        placed = (found.config["zero_optimization"].get("offload_param") or {}).get("device")
        warnings = [text for text in resolved.warnings if "loss scaling of fp16" not in text]
        assert not warnings or placed == "auto", (seed, resolved.warnings)
        kept = {"stage", "offload_param", "offload_optimizer", "ds_zo"}
        assert found.config["zero_optimization"].keys() <= kept, seed


@pytest.mark.parametrize("to", BACKENDS)
def test_a_section_keeps_no_idle_keys(to: str) -> None:
    for seed in range(50):
        rng = random.Random(seed)
        choices: dict[str, tuple[Any, ...]] = {
            "rounding": ("stochastic", "nearest", "kahan"),
            "cuda_graphs": (True, False),
            "compile_blocks": (True, False),
            "stream": ({"wire_dtype": "fp8", "master": "wire"}, {"frozen_dtype": "nf4", "writeback_interval": 2}),
            "checkpoint": (
                {"trajectory_dir": "logs"},
                {"trajectory": True, "trajectory_dir": "logs"},
                {"keep_last": 2},
            ),
        }
        chosen = [key for key in choices if rng.random() < 0.6] or ["cuda_graphs"]
        section = {key: some(rng, *choices[key]) for key in chosen}
        stock = {**random_stock(seed), "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "ds_zo": section}
        assert check(converted(stock, to).config).ignored == (), (seed, section)


@pytest.mark.parametrize("to", BACKENDS)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_shipped_json_becomes_one_of_each_backend(path: Path, to: str) -> None:
    config = json.loads(path.read_text())
    found = converted(config, to)
    if backend_of(config) == to:
        assert {change.key for change in found.changes} <= ({"gradient_clipping"} if to == "zo" else set()), (
            "the shipped form is the converted one"
        )
    else:
        resolved = check(found.config)
        assert (resolved.ignored, resolved.warnings) == ((), ())
        start = starting_rate(to, is_clipped=config.get("gradient_clipping", 1) > 0)
        was_adamw = config["optimizer"]["type"] == "AdamW" and to == "lsp"
        assert found.config["optimizer"]["params"]["lr"] == found.lr == (2e-5 if was_adamw else start.lr)


@pytest.mark.parametrize("to", BACKENDS)
@pytest.mark.parametrize("name", OF_CLIENTS)
def test_auto_stays_where_clients_fill_it(name: str, to: str) -> None:
    config = OF_CLIENTS[name]
    found = converted(config, to)
    new = found.config
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert new[key] == "auto"
    assert ("gradient_clipping" in new) == (to != "zo")
    if "optimizer" in config:
        params = new["optimizer"]["params"]
        assert params["lr"] == params["weight_decay"] == "auto" and ("betas" in params) == (
            to in ("lsp", "adapter") and name == "trainer_z3"
        )
        assert new["scheduler"] == config["scheduler"]
        assert any(f"learning rate to {found.lr:g}" in note for note in found.notes)
    else:
        assert new["zero_optimization"]["ds_zo"]["backend"] == to
        assert new.get("zero_force_ds_cpu_optimizer", True) == (to != "lsp")
        assert any(f"set it to {found.lr:g}" in note for note in found.notes)
    waits = [note for note in found.notes if "gradient_accumulation_steps to 1" in note]
    assert len(waits) == (to in ("lomo", "adalomo"))


@pytest.mark.parametrize(
    ("name", "to", "zero"),
    [
        ("z2_offload", "zo", {"stage": 0}),
        ("z2_offload", "lsp", {"stage": 1, "offload_optimizer": ON_HOST}),
        ("z3", "zo", {"stage": 3, "offload_param": ON_HOST}),  # ZO divides no weights among GPUs
        ("z3", "lomo", {"stage": 3}),  # LOMO does
        ("z3", "lsp", {"stage": 1, "offload_optimizer": ON_HOST}),
        ("z3_offload", "adalomo", {"stage": 3, "offload_param": ON_HOST}),
        ("z3_offload", "lsp", {"stage": 1, "offload_param": ON_HOST, "offload_optimizer": ON_HOST}),
    ],
)
def test_placement_and_stage_are_those_that_the_backend_has(name: str, to: str, zero: dict[str, Any]) -> None:
    found = converted(OF_CLIENTS[name], to).config["zero_optimization"]
    assert {key: value for key, value in found.items() if key != "ds_zo"} == zero


def test_the_plan_decides_about_streaming() -> None:
    shipped = json.loads((REPO / "ds_configs" / "zero3.json").read_text())
    assert converted(shipped, "zo", stream=False).config["zero_optimization"] == {"stage": 0}
    streamed = converted(OF_CLIENTS["z0"], "lsp", stream=True, device_memory_gb=8.0).config["zero_optimization"]
    assert streamed["offload_param"] == streamed["offload_optimizer"] == ON_HOST
    assert streamed["ds_zo"]["stream"] == {"device_memory_gb": 8.0}
    assert converted(shipped, "zo", num_parameters=13_000_000_000).lr == 1e-7


def test_schedule_and_decay_follow_the_learning_rate() -> None:
    warmup = {"warmup_min_lr": 2e-6, "warmup_max_lr": 2e-5, "warmup_num_steps": 10}
    stock = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
    for to, lr in (("zo", 1e-6), ("lomo", 0.03), ("adalomo", 5e-4), ("lsp", 2e-5)):
        new = converted(stock, to).config
        params, schedule = new["optimizer"]["params"], new["scheduler"]["params"]
        assert params["lr"] == schedule["warmup_max_lr"] == lr
        assert schedule["warmup_min_lr"] == pytest.approx(lr / 10)
        assert params["lr"] * params["weight_decay"] == pytest.approx(2e-7)


FP16 = {"enabled": True, "loss_scale": 0}


@pytest.mark.parametrize(
    ("to", "stock", "at", "expected"),
    [
        ("adapter", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "optimizer.params.lr", 1e-4),  # of LoRA
        ("adapter", {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}, "optimizer.params.lr", 3e-4),  # chosen
        ("lomo", {"gradient_accumulation_steps": 8}, "optimizer.params.accumulation", "sequential"),
        ("adalomo", {"gradient_accumulation_steps": 8}, "optimizer.params.accumulation", "sequential"),
        ("zo", {"gradient_accumulation_steps": 8}, "optimizer.params.accumulation", None),
        ("zo", {"fp16": FP16}, "fp16", {"enabled": True}),  # it scales no losses
        ("lomo", {"fp16": FP16}, "fp16", FP16),
        ("lsp", {"fp16": FP16}, "fp16", FP16),
    ],
)
def test_a_value_is_that_of_the_backend(to: str, stock: dict[str, Any], at: str, expected: Any) -> None:
    found = converted({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, **stock}, to)
    assert lookup(found.config, at) == expected
    small_updates = "each micro-batch makes a small update" in str(found.changes)
    assert small_updates == (expected == "sequential")


def test_keys_of_another_backend_go() -> None:
    zo = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 0,
            "offload_param": ON_HOST,
            "ds_zo": {
                "backend": "zo",
                "params": {"zo_eps": 1e-3, "seed": 3},
                "stream": {"wire_dtype": "fp8", "device_slots": 3, "writeback_interval": 4},
                "checkpoint": {"trajectory": True},
            },
        },
    }
    assert converted(zo, "lomo").config["zero_optimization"]["ds_zo"] == {
        "backend": "lomo",
        "stream": {"device_slots": 3},
    }
    lsp = converted(zo, "lsp").config
    assert lsp["zero_optimization"]["ds_zo"]["params"] == {"seed": 3}
    assert lsp["zero_optimization"]["offload_optimizer"] == ON_HOST and lsp["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in converted(lsp, "zo").config


@pytest.mark.parametrize(
    ("broken", "at"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation"),
        ({"zero_optimization": {"offload_parm": {}}}, "zero_optimization.offload_parm"),
        ({"optimizer": {"params": {}}}, "optimizer.type"),
        ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params"),
        ({"gradient_clipping": "1"}, "gradient_clipping"),
        ({"scheduler": {"type": "WarmupLRR", "params": {}}}, "scheduler.type"),
        ({"scheduler": {"type": [], "params": {}}}, "scheduler.type"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "1e-5"}}}, "scheduler.params.warmup_max_lr"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "9"}}}, "scheduler.params.warmup_num_steps"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decay": "0.1"}}}, "optimizer.params.weight_decay"),
        ({"optimizer": {"type": "LOMO", "params": {"zo_eps": 1}}}, "optimizer.params.zo_eps"),
    ],
)
def test_an_error_of_the_input_is_not_taken_for_an_unused_key(broken: dict[str, Any], at: str) -> None:
    with pytest.raises(ConfigError) as raised:
        convert({"train_micro_batch_size_per_gpu": 1, **broken}, to="zo")
    assert raised.value.location == at


def paths(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*at, key)
        yield from paths(inner, (*at, key))


@pytest.mark.parametrize("kind", ["AdamW", "LOMO"])
@pytest.mark.parametrize("wrong", [None, "x", "auto", [], {"a": 1}], ids=repr)
def test_a_value_of_any_type_at_any_key_is_taken_or_refused(kind: str, wrong: Any, tmp_path: Path) -> None:
    """By `ds-zo convert` and by `ds-zo train`, in one line."""
    whole: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": kind, "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }
    path = tmp_path / "config.json"
    args = parse_args(["--deepspeed", str(path), "--model", "a/b", "--lr", "0.01", "--dtype", "fp32"])
    for place in paths(whole):
        config = copy.deepcopy(whole)
        inner = config
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = wrong
        path.write_text(json.dumps(config))
        for call in (partial(convert, config, to="zo"), partial(read_config, args)):
            with suppress(ValueError):
                call()


def test_starting_rates_are_those_of_the_recipes() -> None:
    lines = [line.split(" | ") for line in recipes.rates().splitlines()[2:]]
    table = {(cells[0].removeprefix("| "), cells[1]): float(cells[2]) for cells in lines}
    for rate in STARTING_RATES:
        assert table[rate.method, rate.model] == rate.lr, rate
