"""The engine inside DeepSpeed: who gets it, what it keeps of DeepSpeed's behaviour, and what it leaves alone.

Where the mathematics does not matter a plain SGD stands in for a backend, so that a run can be held byte for byte
against DeepSpeed's own engine with torch's SGD.
"""

from __future__ import annotations

import contextvars
import copy
import gc
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

import ds_zo
from ds_zo import checkpoint, planner
from ds_zo.backends import Backend, GroupedOptimizer, StepOutcome
from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.config import ConfigError, registry
from ds_zo.plugin.startup import ModelFacts, format_bytes, startup_table
from tests.helpers.client_jsons import OF_CLIENTS
from tests.helpers.processes import REPO
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal

pytestmark = pytest.mark.usefixtures("single_process")


class SGDBackend(Backend):
    """Plain SGD under the name of a backend whose JSON asks nothing else of it."""

    name = "lomo"

    def step(self) -> StepOutcome:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        applied = bool(norm.isfinite())
        if applied:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.sub_(p.grad + group["weight_decay"] * p, alpha=group["lr"])
        self.zero_grad()
        return StepOutcome(applied=DeferredScalar(norm.isfinite()), grad_norm=DeferredScalar(norm))


@pytest.fixture
def sgd_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._entries, "lomo", replace(registry.entry_of("lomo"), backend=SGDBackend))


def sgd_config(*, ours: bool = True, accumulation: int = 1, **extra: Any) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": 0.1}
    if ours and accumulation > 1:
        params["accumulation"] = "sequential"
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "LOMO" if ours else "SGD", "params": params},
        **extra,
    }


def zo_config(**extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "ZO", "params": {"lr": 1e-4, "zo_eps": 1e-3}},
        **extra,
    }


def start(config: dict[str, Any], model: torch.nn.Module | None = None, **kwargs: Any) -> DeepSpeedEngine:
    return deepspeed.initialize(model=model or tiny_model("llama"), config=config, **kwargs)[0]


def on(engine: DeepSpeedEngine, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(engine.device) for name, value in batch.items()}


def train(engine: DeepSpeedEngine, num_micro_steps: int, *, first: int = 0) -> list[float]:
    losses = []
    for seed in range(first, first + num_micro_steps):
        loss = engine(**on(engine, tiny_batch("llama", seed=seed))).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def printed(output: str, mark: str) -> list[Any]:
    """What a script printed as JSON behind a mark, among DeepSpeed's own lines."""
    return [json.loads(line.removeprefix(mark)) for line in output.splitlines() if line.startswith(mark)]


# Who gets our engine.


STOCK_RUN = """
import hashlib, json, sys
from pathlib import Path
if sys.argv[1] == "with":
    import ds_zo
import deepspeed, torch
from tests.helpers.tiny_models import tiny_batch, tiny_model

offload = {"device": "cpu", "pin_memory": False}
for zero in ({"stage": 0}, {"stage": 2, "offload_optimizer": offload}, {"stage": 3, "offload_optimizer": offload}):
    # torch_adam without offload: DeepSpeed's own fused kernel is a JIT build of minutes, of no interest here
    params = {"lr": 1e-2, "torch_adam": zero["stage"] == 0}
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": zero["stage"] > 0}, "zero_optimization": zero,
              "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW", "params": params}}
    engine = deepspeed.initialize(model=tiny_model("llama"), config=config)[0]
    losses = []
    for seed in range(6):
        batch = {name: value.to(engine.device) for name, value in tiny_batch("llama", seed=seed).items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    digest = hashlib.sha256()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for parameter in engine.module.parameters():
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    engine.save_checkpoint(sys.argv[2], tag=f"stage{zero['stage']}")
    print("RUN", json.dumps([type(engine).__name__, type(engine.optimizer).__name__, losses, digest.hexdigest()]))
saved = sorted(path for path in Path(sys.argv[2]).rglob("*") if path.is_file())
for path in saved:
    name = str(path.relative_to(sys.argv[2]))
    print("SAVED", json.dumps([name, hashlib.sha256(path.read_bytes()).hexdigest()]))
"""


@pytest.mark.slow
def test_stock_configs_give_the_same_bytes_with_and_without_the_import(run_python, tmp_path):
    outputs = [run_python(STOCK_RUN, way, str(tmp_path / way), timeout_s=600) for way in ("with", "without")]
    runs = [printed(output, "RUN ") for output in outputs]
    assert runs[0] == runs[1]
    with_import, without = (dict(printed(output, "SAVED ")) for output in outputs)
    assert with_import == without and len(without) > 6, "the checkpoints' files, byte for byte"
    assert [engine for engine, *_ in runs[0]] == ["DeepSpeedEngine"] * 3
    assert len({optimizer for _, optimizer, *_ in runs[0]}) == 3  # three different engines' worth of code was compared


IMPORT_ORDER = """
from deepspeed import initialize
import json, sys
from tests.helpers.tiny_models import tiny_model

config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "ZO", "params": {"lr": 1e-4}}}

def attempt():
    try:
        return type(initialize(model=tiny_model("llama"), config=config)[0]).__name__
    except AssertionError as error:
        return str(error)

print("OUT", json.dumps(attempt()))
import ds_zo
print("OUT", json.dumps(attempt()))
ds_zo.uninstall()
print("OUT", json.dumps(attempt()))
ds_zo.install()
print("OUT", json.dumps(attempt()))
"""


def test_import_uninstall_and_install_decide_even_for_an_early_bound_initialize(run_python):
    out = printed(run_python(IMPORT_ORDER), "OUT ")
    refused = "ZO is not a supported DeepSpeed Optimizer"
    assert out == [refused, "PluginEngine", refused, "PluginEngine"]


IMPORT_COST = """
import sys, time
import deepspeed
before = set(sys.modules)
started = time.process_time()
import ds_zo
print("SECONDS", time.process_time() - started)
import torch
assert not torch.cuda.is_initialized()
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert not new & {"triton", "transformers", "accelerate", "datasets"}, new
"""


def test_import_is_cheap_and_touches_no_device(run_python):
    seconds = float(run_python(IMPORT_COST, fresh=True).split("SECONDS ")[1])
    assert seconds < 0.5


def test_the_package_exports_what_pages_import():
    assert set(ds_zo.__all__) <= set(dir(ds_zo))
    assert ds_zo.plan is planner.plan
    assert ds_zo.newest_complete is checkpoint.newest_complete
    assert (ds_zo.EMBEDDED_MODEL / "config.json").is_file()
    assert ds_zo.Preemption().requested() is False
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        ds_zo.plam  # noqa: B018
    pages = [*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("ds_configs/*.md"), *REPO.glob("ds_zo/*/*.md")]
    for page in (*pages, *REPO.glob("launch/examples/*.py")):
        imported = re.findall(r"^ *from (ds_zo\.[\w.]+) import ([\w, ]+)", page.read_text("utf-8"), flags=re.MULTILINE)
        names = {name for _, listed in imported for name in listed.replace(",", " ").split()}
        assert not names & {*ds_zo.__all__, "FOLDER"}, page


def test_config_errors_come_before_anything_moves(sgd_backend):
    model = tiny_model("llama")
    before = {name: (p.data_ptr(), p.dtype, p.device) for name, p in model.named_parameters()}
    config = zo_config(bf16={"enabled": True})
    config["optimizer"]["params"]["zo_esp"] = 1e-3
    with pytest.raises(ConfigError, match="zo_esp"):
        start(config, model)
    assert {name: (p.data_ptr(), p.dtype, p.device) for name, p in model.named_parameters()} == before


def test_a_misspelt_type_is_told_from_stock_ones():
    for written, remedy in {"MeZO": "ZO", "Ada-LOMO": "AdaLOMO", "AdmW": "adamw"}.items():
        with pytest.raises(ConfigError, match=rf'got "{written}"; did you mean "{remedy}"\?$'):
            start(zo_config(optimizer={"type": written}), torch.nn.Linear(2, 2))
    assert type(start(zo_config(optimizer={"type": "RMSprop"}), torch.nn.Linear(2, 2))) is DeepSpeedEngine


@pytest.mark.parametrize("kind", ["ZO", "LOMO", "AdaLOMO", "LSP"])
def test_embeddings_keep_their_size_while_an_engine_has_them(kind):
    model = tiny_model("llama")
    engine = start(zo_config(optimizer={"type": kind, "params": {"lr": 1e-4}}), model)
    num_tokens = model.config.vocab_size
    train(engine, 1)
    for owner in (model, model.model):
        with pytest.raises(ValueError, match=rf"from {num_tokens} to {num_tokens + 5} rows: call it before deepspeed"):
            owner.resize_token_embeddings(pad_to_multiple_of=8)
    assert model.resize_token_embeddings(num_tokens) is model.get_input_embeddings()
    train(engine, 1)
    copied = copy.deepcopy(model)
    assert copied.resize_token_embeddings(num_tokens + 8).num_embeddings == num_tokens + 8
    engine.destroy()
    assert model.resize_token_embeddings(num_tokens + 8).num_embeddings == num_tokens + 8


def test_pipeline_models_are_refused_by_name():
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    model = deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="PipelineEngine"):
        start(zo_config(), model)


# What DeepSpeed does around a step.


WARM_UP: dict[str, Any] = {"type": "LinearLR", "params": {"start_factor": 0.1, "total_iters": 3}}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sgd_backend_equals_deepspeeds_own_sgd(sgd_backend, accumulation):
    runs = []
    for ours in (True, False):
        engine = start(sgd_config(ours=ours, accumulation=accumulation, scheduler=WARM_UP))
        runs.append((train(engine, 6), engine.get_lr(), engine.global_steps, engine.global_samples, weights(engine)))
    assert runs[0][:-1] == runs[1][:-1]
    assert_equal(runs[0][-1], runs[1][-1])


def test_bf16_block_gives_bf16_parameters_and_no_master_copy(sgd_backend):
    """DeepSpeed's bf16 SGD would update a float32 master, so torch's is the reference."""
    engine = start(sgd_config(accumulation=2, scheduler=WARM_UP, bf16={"enabled": True}))
    losses = train(engine, 6)
    model = tiny_model("llama").to(engine.device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, **WARM_UP["params"])
    for seed in range(6):
        loss = model(**on(engine, tiny_batch("llama", seed=seed))).loss
        assert loss.item() == losses[seed]
        (loss / 2).backward()
        if seed % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert_equal(weights(engine), {name: p.detach() for name, p in model.named_parameters()})


def test_scale_wrt_gas_false_leaves_the_callers_scale(sgd_backend):
    ours = start(sgd_config(accumulation=2))
    theirs = start(sgd_config(accumulation=2))
    for seed in range(2):
        batch = on(ours, tiny_batch("llama", seed=seed))
        ours.backward(ours(**batch).loss)
        theirs.backward(theirs(**batch).loss / 2, scale_wrt_gas=False)
        ours.step()
        theirs.step()
    assert_equal(weights(ours), weights(theirs))


def test_no_sync_accumulates_and_refuses_to_step(sgd_backend):
    engine = start(sgd_config())
    with engine.no_sync():
        engine.backward(engine(**on(engine, tiny_batch("llama"))).loss)
        with pytest.raises(AssertionError, match="no_sync"):
            engine.step()
    assert all(p.grad is not None for p in engine.module.parameters())


def test_bare_backward_is_right_or_refused(sgd_backend):
    through, bare = start(sgd_config()), start(sgd_config())
    train(through, 1)
    bare(**on(bare, tiny_batch("llama"))).loss.backward()
    bare.step()
    assert_equal(weights(through), weights(bare))

    accumulating = start(sgd_config(accumulation=2))
    with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\)"):
        accumulating(**on(accumulating, tiny_batch("llama"))).loss.backward()


def test_backward_says_what_it_wants(sgd_backend):
    engine = start(sgd_config())
    with pytest.raises(ValueError, match=r"shape \(4, 12, 67\)"):
        engine.backward(engine(**on(engine, tiny_batch("llama"))).logits)
    with torch.no_grad():
        loss = engine(**on(engine, tiny_batch("llama"))).loss
    with pytest.raises(ValueError, match="requires_grad False"):
        engine.backward(loss)


def test_a_skipped_step_is_counted_and_the_schedule_goes_on(sgd_backend):
    engine = start(sgd_config(scheduler={"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 2}}))
    before = weights(engine)
    engine.backward(engine(**on(engine, tiny_batch("llama"))).loss * float("nan"))
    engine.step()
    assert not engine.was_step_applied()
    assert (engine.skipped_steps, engine.global_steps) == (1, 1)
    assert engine.get_lr() == pytest.approx([0.075])
    assert_equal(before, weights(engine))
    train(engine, 1)
    assert engine.was_step_applied()
    assert (engine.skipped_steps, engine.global_steps) == (1, 2)


def test_a_step_between_boundaries_was_not_applied_whatever_the_last_one_did(sgd_backend):
    engine = start(sgd_config(accumulation=2))
    applied = []
    for seed in range(4):
        train(engine, 1, first=seed)
        if seed > 1:  # the outcome of the first boundary stays unread until then
            applied.append(engine.was_step_applied())
    assert applied == [False, True]


def test_grad_norm_is_a_float_read_on_demand(sgd_backend):
    engine = start(sgd_config())
    assert engine.get_global_grad_norm() is None
    train(engine, 1)
    assert isinstance(engine._global_grad_norm, DeferredScalar)
    norm = engine.get_global_grad_norm()
    assert isinstance(norm, float)
    assert norm > 0


def test_an_error_in_the_users_forward_surfaces_and_the_next_step_works(sgd_backend):
    engine = start(sgd_config(wall_clock_breakdown=True))
    with pytest.raises(IndexError):
        engine(input_ids=torch.full((1, 4), 10_000, device=engine.device))
    train(engine, 2)
    assert engine.global_steps == 2
    assert engine.get_wall_clock_timers()


def test_fp16_autocast_makes_no_gradient_scaler(sgd_backend):
    engine = start(sgd_config(torch_autocast={"enabled": True, "dtype": "float16"}))
    assert engine.torch_autocast_z0_gradscaler is None
    train(engine, 1)
    assert engine.was_step_applied()


# The user's own optimizer.


def test_client_groups_and_scheduler_are_honoured_and_no_state_is_made(sgd_backend):
    config = sgd_config(ds_zo={"backend": "lomo"})
    del config["optimizer"]

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        decayed = [p for name, p in named.items() if p.ndim > 1]
        plain = [p for p in named.values() if p.ndim == 1]
        return [{"params": decayed, "weight_decay": 0.1, "lr": 0.2}, {"params": plain}]

    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(groups(model), lr=0.05, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    engine = start(config, model, optimizer=optimizer, lr_scheduler=schedule)
    train(engine, 3)
    assert engine.optimizer is optimizer
    assert not optimizer.state

    reference = tiny_model("llama").to(engine.device)
    sgd = torch.optim.SGD(groups(reference), lr=0.05)
    steps = torch.optim.lr_scheduler.LinearLR(sgd, start_factor=0.5, total_iters=2)
    for seed in range(3):
        reference(**on(engine, tiny_batch("llama", seed=seed))).loss.backward()
        sgd.step()
        sgd.zero_grad()
        steps.step()
    assert engine.get_lr() == [group["lr"] for group in sgd.param_groups]
    for name, p in reference.named_parameters():
        torch.testing.assert_close(weights(engine)[name], p.detach(), rtol=1e-6, atol=1e-7, msg=name)


def test_a_client_group_without_a_learning_rate_is_refused(sgd_backend):
    config = sgd_config(ds_zo={"backend": "lomo"})
    del config["optimizer"]
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\['lr'\]"):
        start(config, model, optimizer=optimizer)


def test_the_optimizer_of_an_engine_does_not_step_by_itself(sgd_backend):
    engine = start(sgd_config())
    assert isinstance(engine.optimizer, GroupedOptimizer)
    with pytest.raises(RuntimeError, match="engine"):
        engine.optimizer.step()


# Checkpoints in DeepSpeed's layout.


def test_a_collected_engine_leaves_its_callers_context_alone():
    """Before Python 3.12 a collection may come inside `ContextVar.set`, which crashes if its context changes."""
    closed: contextvars.ContextVar[bool] = contextvars.ContextVar("closed", default=False)
    seen: list[Any] = []
    engine = start(zo_config())
    engine.backend.close = lambda: seen.append(closed.set(True))
    del engine
    gc.collect()
    assert len(seen) == 1 and not closed.get()


def test_a_process_that_was_forked_leaves_a_collected_engine_alone():
    """It has neither the engine's threads, for which an end would wait, nor the device."""
    closed: list[bool] = []
    engine = start(zo_config())
    engine.backend.close = lambda: closed.append(True)
    engine._process = -1  # as a child sees it
    del engine
    gc.collect()
    assert not closed


# ZeRO's own ways in.


@pytest.mark.parametrize("offload", [False, True])
def test_a_model_built_under_zero_init_trains_as_one_that_was_not(sgd_backend, offload):
    zero: dict[str, Any] = {"stage": 3}
    if offload:
        zero["offload_param"] = {"device": "cpu"}
    config = sgd_config(zero_optimization=zero)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = tiny_model("llama")
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = start(config, model)
    assert_equal(initial, weights(engine))
    assert {name for p in model.parameters() for name in vars(p) if name.startswith("ds_")} == {"ds_status"}  # for TRL

    plain = tiny_model("llama")
    plain.load_state_dict(initial, strict=False)
    reference = start(sgd_config(), plain)
    assert train(engine, 3) == train(reference, 3)
    assert_equal(weights(engine), weights(reference))


RANKS = """
import hashlib, json, os
import ds_zo
import deepspeed, torch
from tests.helpers.tiny_models import tiny_batch, tiny_model

rank = int(os.environ["RANK"])
deepspeed.init_distributed()
tiny_model("llama")  # transformers imports lazily, and not everything can be imported under zero.Init
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "ZO", "params": {"lr": 1e-3}}}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = tiny_model("llama", seed=rank)
engine = deepspeed.initialize(model=model, config=config)[0]
for seed in range(3):
    state = engine.module_state_dict()
    digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()
    print("OUT", json.dumps([digest, engine.get_global_grad_norm()]))
    batch = {name: value.to(engine.device) for name, value in tiny_batch("llama", seed=10 * seed + rank).items()}
    engine.backward(engine(**batch).loss)
    engine.step()
"""


@pytest.mark.slow
def test_ranks_under_zero_init_start_from_rank_zeros_weights_and_stay_together(run_ranks):
    first, second = (printed(output, "OUT ") for output in run_ranks(RANKS))
    assert first == second
    assert len({digest for digest, _ in first}) == 3, "each step moved them"


@pytest.mark.parametrize("name", ["z2_offload", "z3_offload"])
def test_a_stock_offload_json_with_only_the_type_edited_trains(name):
    zero = {key: value for key, value in OF_CLIENTS[name]["zero_optimization"].items() if value != "auto"}
    stock_params = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "ZO", "params": stock_params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 2}},
        "zero_optimization": zero,
        "wall_clock_breakdown": False,
    }
    engine = start(config)
    before = engine.module_state_dict()
    before = {key: value.clone() for key, value in before.items()}
    losses = train(engine, 3)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert (engine.global_steps, engine.skipped_steps) == (3, 0)
    assert any(not torch.equal(value, before[key]) for key, value in engine.module_state_dict().items())


class Seen(logging.Handler):
    """What a user sees with DeepSpeed's logger as it comes: it drops what is below WARNING, and so does its handler."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def seen() -> Iterator[list[logging.LogRecord]]:
    handler, level = Seen(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    yield handler.records
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_start_is_shown_once_with_what_was_ignored(seen):
    config = zo_config(gradient_clipping=1.0)
    config["optimizer"]["params"]["betas"] = [0.9, 0.999]
    start(config)
    ours = [record for record in seen if "ds_zo" in record.getMessage()]
    [table] = [record for record in ours if record.getMessage().startswith("ds_zo: backend zo on")]
    assert table.levelno == logging.INFO
    assert "all 3 blocks and the other modules on the device" in table_of([table])["weights"]
    assert len([record for record in ours if "optimizer.params.betas" in record.getMessage()]) == 1
    assert len([record for record in ours if "gradient_clipping" in record.getMessage()]) == 1


ROWS = ["method", "model", "weights", "device", "host", "learning rate", "batch", "ranks", "details"]


def table_of(records: list[logging.LogRecord]) -> dict[str, str]:
    """The rows of the only start-up table among the records."""
    [text] = [record.getMessage() for record in records if record.getMessage().startswith("ds_zo: backend")]
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in text.splitlines()[1:])


def streamed(kind: str, **more: Any) -> dict[str, Any]:
    offload = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2 if kind != "LOMO" else 1,
        "optimizer": {"type": kind, "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": offload if kind == "LSP" else {"offload_param": offload["offload_param"]},
        **more,
    }


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", ["ZO", "LOMO", "AdaLOMO", "LSP"])
def test_the_start_up_table(kind, is_streamed, seen):
    config = streamed(kind, scheduler=WARM_UP, gradient_accumulation_steps=1)
    if not is_streamed:
        del config["zero_optimization"]
    model = tiny_model("llama")
    first, *_ = model.model.layers
    first.requires_grad_(False)
    all_bytes, block_bytes = (sum(p.nbytes for p in m.parameters()) for m in (model, model.model.layers))
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    engine = start(config, model)
    rows = table_of(seen)
    assert [*rows] == [name for name in [*ROWS[:5], "write-back", *ROWS[5:]] if name != "write-back" or kind == "ZO"]
    assert rows["method"].startswith(f"{kind}: ")
    assert rows["model"].startswith(f"LlamaForCausalLM, 8,016 parameters, {num_trained:,} trained (")
    assert rows["learning rate"] == "1e-05 at first, LinearLR (largest known 0.0001), weight decay 0.1"
    assert rows["ranks"] == "1"
    summary = engine.backend.startup_summary()
    assert ("all 3 blocks stream" in rows["weights"]) == is_streamed
    if is_streamed:
        assert summary.device_bytes["weights"] >= all_bytes - block_bytes
        pages = 2 * 3 * 4096  # each block's trained and frozen parameters begin a page
        assert block_bytes <= summary.host_bytes["weights"] <= block_bytes + pages
        assert summary.device_bytes["slots"] >= 2 / 3 * block_bytes
        if kind == "ZO":
            assert rows["write-back"] == "every 16 steps, the default of streamed blocks with master split"
    else:
        assert summary.device_bytes["weights"] >= all_bytes and "weights" not in summary.host_bytes
        assert rows["host"].startswith("0 GB: ")
    assert rows["device"].startswith(format_bytes(sum(summary.device_bytes.values())))


@pytest.mark.parametrize(
    ("stream", "offload", "said"),
    [
        ({"writeback_interval": 5}, True, "every 5 steps, as ds_zo.stream.writeback_interval says"),
        ({}, False, "every step, because no block streams"),
        ({"master": "wire"}, True, "every 8 steps, the default of streamed blocks with master wire"),
    ],
)
def test_the_table_says_why_weights_are_written_back_so_often(stream, offload, said, seen):
    config = streamed("ZO", ds_zo={"stream": stream}, bf16={"enabled": True})
    if offload:
        stream["device_memory_gb"] = 1.5
    else:
        del config["zero_optimization"]
    start(config)
    rows = table_of(seen)
    assert rows["write-back"] == said
    assert ("of a budget of 1.5 GB" in rows["device"]) == offload
    assert rows["batch"] == "4 samples per rank and micro-batch, 2 micro-batches a step"
    assert ("without low bits" in rows["weights"]) == ("master" in stream)


def test_the_table_of_a_gpu(seen, monkeypatch):
    """Its texts, without a GPU: blocks are moved and the interval is chosen after the first step."""
    engine = start(streamed("ZO"), tiny_model("llama").to(torch.bfloat16))
    store = engine.backend.store
    store.must_choose_interval = store.blocks.may_fill_device = True
    model = ModelFacts.of(engine.module)
    summary = replace(engine.backend.startup_summary(), ranks=None)
    groups = [{"lr": 1e-3, "weight_decay": 0.0}, {"lr": 1e-4, "weight_decay": 0.0}]
    with monkeypatch.context() as gpu:
        gpu.setattr(engine, "device", torch.device("cuda:1"))
        gpu.setattr(engine, "dp_world_size", 3)
        gpu.setattr(engine.optimizer, "param_groups", groups)
        gpu.setattr(engine.backend, "startup_summary", lambda: summary)
        text = startup_table(engine, model)
    assert text.startswith("ds_zo: backend zo on cuda:1\n") and len(text.splitlines()) == 11
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in text.splitlines()[1:])
    assert "GPU" in rows and "device" not in rows
    assert rows["weights"].endswith("; blocks that fit move to the GPU after the first step")
    assert rows["write-back"] == "every 16 steps at first; measured times of the first step choose the interval"
    assert rows["model"].endswith("all trained, bfloat16"), "the model's dtype, which this JSON does not name"
    assert rows["learning rate"] == "0.001, 0.0001, no scheduler"
    assert rows["ranks"] == "3, each with its own batch"
    ring = "a pinned ring of 256 MiB over pageable memory"
    monkeypatch.setattr(store.blocks.store, "_ring", SimpleNamespace(nbytes=256 * 2**20))
    for pinned, said in ((0, ring), (999, f"1.0 kB pinned, the rest through {ring}")):
        monkeypatch.setattr(store.blocks.store, "pinned_nbytes", pinned)
        text = startup_table(engine, model)
        assert rows["host"].replace("not pinned", said) in text.splitlines()[5]
    assert [format_bytes(n) for n in (999, 10**6, 10**8, 14 * 10**9)] == ["1.0 kB", "1.0 MB", "0.10 GB", "14.00 GB"]


def test_details_are_shown_at_debug_only(seen):
    start(zo_config())
    assert not [record for record in seen if "ds_zo section" in record.getMessage()]
    seen.clear()
    logger.setLevel(logging.DEBUG)  # Trainer's --log_level debug leaves the handlers at WARNING
    engine = start(zo_config())
    [details] = [record for record in seen if "ds_zo section" in record.getMessage()]
    assert details.levelno == logging.DEBUG and engine.backend.describe() in details.getMessage()
    assert "details" not in table_of(seen)
    seen.clear()
    logger.setLevel(logging.ERROR)
    start(zo_config())
    assert not seen


def test_a_run_that_would_train_or_stream_nothing_says_so(seen):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    own = {"train_micro_batch_size_per_gpu": 4, "ds_zo": {"backend": "zo"}}
    with pytest.raises(ConfigError, match=r"none of them; make the optimizer of .* \(AdamW.param_groups\)"):
        start(own, model, optimizer=torch.optim.AdamW(other.parameters()))
    start(own, model, optimizer=torch.optim.AdamW([model.weight, other.weight]))
    start(zo_config(zero_optimization={"offload_param": {"device": "cpu"}}), model.requires_grad_(False))
    text = "\n".join(record.getMessage() for record in seen)
    assert "1 of 2 parameters are not the model's" in text
    assert "no parameter requires a gradient" in text
    assert "offload_param has no effect" in text
    assert text.count("AdamW's rates do not suit it") == 1, "of the script's own AdamW, and only there"


def test_what_a_small_model_on_a_cpu_does_not_get_is_said_once(seen):
    """Each in one line: 16 bits that the JSON does not name, fp16, and LSP without a matrix to project."""
    lsp = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "LSP", "params": {"lr": 1e-4}}}
    for config, model, said in (
        (zo_config(), torch.nn.Linear(2, 2).bfloat16(), "the model is in bfloat16, as its files are"),
        (zo_config(fp16={"enabled": True}), torch.nn.Linear(2, 2), "fp16 is slow on a CPU"),
        (lsp, torch.nn.Linear(2, 2), "so it is Adam: a matrix needs more than subspace_dim ** 2 = 262,144 elements"),
    ):
        seen.clear()
        start(config, model)
        texts = [record.getMessage() for record in seen]
        assert len([text for text in texts if said in text and "\n" not in text]) == 1, texts
    assert "as its files are" not in "".join(texts)


def told_of_rates(seen, config: dict[str, Any], model: torch.nn.Module | None = None, **kwargs: Any) -> list[str]:
    seen.clear()
    start({"train_micro_batch_size_per_gpu": 4, **config}, model or torch.nn.Linear(2, 2), **kwargs)
    return [text for record in seen if "AdamW's rates do not suit it" in (text := record.getMessage())]


def test_the_learning_rate_that_a_schedule_reaches_is_warned_of(seen, monkeypatch):
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}}
    model = torch.nn.Linear(2, 2)
    own = {"ds_zo": {"backend": "zo"}, "scheduler": cosine}
    [text] = told_of_rates(seen, own, model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert "got 0.001," in text and "the script's own optimizer and its scheduler" in text

    named = {"optimizer": {"type": "ZO", "params": {"lr": 1e-6}}}
    climbs = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3}}
    assert "got 0.002," in told_of_rates(seen, named | {"scheduler": climbs})[0]
    assert not told_of_rates(seen, named | {"scheduler": cosine})

    shipped = json.loads(REPO.joinpath("ds_configs", "zo.json").read_text())
    assert not told_of_rates(seen, shipped)
    shipped["optimizer"]["params"]["lr"] = 5e-4
    assert not told_of_rates(seen, shipped), "of a small model"
    monkeypatch.setattr("ds_zo.config.learning_rates.largest_rate", lambda backend, num_trained: 1e-5 * num_trained / 6)
    assert "got 0.0005," in told_of_rates(seen, shipped)[0], "of a larger one"


def test_a_script_that_builds_its_optimizer_is_told_of_the_schedulers_own_peak(seen):
    model = torch.nn.Linear(2, 2)
    for params, peaks in (({}, ["0.001"]), ({"warmup_max_lr": 1e-5}, [])):
        scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, **params}}
        config = {"train_micro_batch_size_per_gpu": 4, "ds_zo": {"backend": "zo"}, "scheduler": scheduler}
        seen.clear()
        start(config, model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5))
        found = [text for record in seen if "warmup_max_lr" in (text := record.getMessage())]
        assert len(found) == len(peaks)
        assert all(f"warmup_max_lr {peak}, not to the script's own 1e-05" in found[0] for peak in peaks)


# Through Accelerate and Trainer, which make the engine themselves.


SAFE_FORM = """
import json, sys
if sys.argv[1] == "with":
    import ds_zo
import deepspeed, torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from pathlib import Path
from tests.helpers.tiny_models import tiny_batch, tiny_model
from transformers import Trainer, TrainingArguments

section = {"backend": "zo", "params": {"zo_eps": 1e-2}}
config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
          "zero_optimization": {"stage": 0, "ds_zo": section}}
file = Path(sys.argv[2], "config.json")
file.write_text(json.dumps(config))

def raw(model, optimizer):
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=str(file))[0]
    engine.backward(engine(**tiny_batch("llama")).loss)
    engine.step()
    return engine

def accelerate(model, optimizer):
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    engine, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(engine(**tiny_batch("llama")).loss)
    optimizer.step()
    return engine

def trainer(model, optimizer):
    arguments = TrainingArguments(output_dir=sys.argv[2], deepspeed=str(file), max_steps=1, report_to=[],
                                  per_device_train_batch_size=4, use_cpu=not torch.cuda.is_available(),
                                  max_grad_norm=1.0, save_strategy="no", dataloader_pin_memory=False)
    rows = [{name: value[0] for name, value in tiny_batch("llama", seed=seed).items()} for seed in range(4)]
    found = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    found.train()
    return found.model_wrapped

for route in (raw, accelerate, trainer):
    AcceleratorState._reset_state(reset_partial_state=True)
    model = tiny_model("llama")
    try:
        engine = route(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
        told = [type(engine).__name__, engine.resolved.backend, engine.resolved.optimizer.zo_eps, engine.global_steps]
    except Exception as error:
        told = f"{type(error).__name__} {error}"
    print("OUT", json.dumps(told))
    file.write_text(json.dumps(config))
"""


def test_a_section_inside_zero_optimization_is_refused_where_the_import_is_forgotten(run_python, tmp_path):
    """Through DeepSpeed, Accelerate and Trainer; with the import it trains."""
    for told in (forgotten := printed(run_python(SAFE_FORM, "without", str(tmp_path)), "OUT ")):
        assert "ValidationError" in told and "DeepSpeedZeroConfig" in told and "ds_zo" in told, told
    trained = printed(run_python(SAFE_FORM, "with", str(tmp_path)), "OUT ")
    assert trained == [["PluginEngine", "zo", 1e-2, 1]] * 3
    assert len(forgotten) == 3


def test_fp16_on_a_cpu_without_fp16_instructions_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: None)  # DeepSpeed's own answer there
    with pytest.raises(ConfigError, match=r"FP16 instructions.*use bf16\.enabled.*\(fp16\.enabled\)"):
        start(zo_config(fp16={"enabled": True}))
