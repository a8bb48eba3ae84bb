"""A backend of ten lines, registered from outside the package, trains by every route that the built-in ones have.

It shows what adding a backend takes: its class, its parameters' class where it has keys of its own, and one call of
`ds_zo.register_backend`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from pydantic import Field
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_zo
from ds_zo.backends import Backend, StepOutcome, backend_class
from ds_zo.config import BACKENDS, ConfigError, OptimizerParams, backend_of, registry, resolve
from ds_zo.config.docs import key_tables
from ds_zo.planner import Estimate, Limits, Model, plan
from ds_zo.plugin.engine import PluginEngine
from tests.helpers.lomo_runs import train as train_on
from tests.helpers.ranks import job
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_close, assert_equal

pytestmark = pytest.mark.usefixtures("single_process")
NUM_STEPS = 6
LR = 0.1


class PlainSGD(Backend):
    @torch.no_grad()
    def step(self) -> StepOutcome:
        self.average_gradients()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + group["weight_decay"] * p, alpha=group["lr"])
        self.zero_grad()
        return StepOutcome(applied=True)


class GlideParams(OptimizerParams):
    """`lr`, `weight_decay` and a key of its own."""

    friction: float = Field(0.5, ge=0, lt=1)
    """A key that no other backend has."""


@pytest.fixture(autouse=True)
def registered(own_backends: None) -> Iterator[None]:
    ds_zo.register_backend("PlainSGD", PlainSGD)
    yield
    unset_hf_deepspeed_config()


def config(*, kind: str = "PlainSGD", accumulation: int = 1, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": kind, "params": {"lr": LR, "weight_decay": 0.01}},
        **extra,
    }


def start(ds_config: dict[str, Any]) -> PluginEngine:
    engine = deepspeed.initialize(model=tiny_model("llama"), config=ds_config)[0]
    assert isinstance(engine, PluginEngine)
    return engine


def train(engine: PluginEngine, seeds: range) -> None:
    train_on(engine, [tiny_batch("llama", seed=seed) for seed in seeds])


@torch.no_grad()
def mean_loss(model: torch.nn.Module) -> float:
    """Over the batches that every run here trains on."""
    device = next(model.parameters()).device
    batches = [{name: v.to(device) for name, v in tiny_batch("llama", seed=seed).items()} for seed in range(4)]
    return sum(float(model(**batch).loss) for batch in batches) / len(batches)


def torch_sgd(seeds: range, *, device: torch.device, accumulation: int = 1) -> dict[str, torch.Tensor]:
    model = tiny_model("llama").to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.01, foreach=False)
    for index, seed in enumerate(seeds, start=1):
        batch = {name: value.to(device) for name, value in tiny_batch("llama", seed=seed).items()}
        (model(**batch).loss / accumulation).backward()
        if index % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def weights(engine: PluginEngine) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in engine.module_state_dict().items()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_trains_through_initialize_as_torchs_sgd(accumulation: int) -> None:
    engine = start(config(accumulation=accumulation))
    train(engine, range(NUM_STEPS))
    assert_close(weights(engine), torch_sgd(range(NUM_STEPS), device=engine.device, accumulation=accumulation))
    assert engine.global_steps == NUM_STEPS // accumulation
    assert mean_loss(engine.module) < mean_loss(tiny_model("llama").to(engine.device))


def test_a_script_with_its_own_optimizer_selects_it_in_the_section() -> None:
    ds_config = {name: value for name, value in config().items() if name != "optimizer"}
    model = tiny_model("llama")
    groups = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.01)
    ds_config["ds_zo"] = {"backend": "plainsgd"}
    engine = deepspeed.initialize(model=model, optimizer=groups, config=ds_config)[0]
    train(engine, range(3))
    assert_close(weights(engine), torch_sgd(range(3), device=engine.device))


@pytest.mark.parametrize("num_before", [4, 3], ids=["at-a-boundary", "inside-a-window"])
def test_a_resumed_run_equals_an_uninterrupted_one(num_before: int, tmp_path: Path) -> None:
    whole = start(config(accumulation=2))
    train(whole, range(8))
    expected = weights(whole)
    first = start(config(accumulation=2))
    train(first, range(num_before))
    first.save_checkpoint(str(tmp_path))
    resumed = start(config(accumulation=2))
    resumed.load_checkpoint(str(tmp_path))
    train(resumed, range(num_before, 8))
    assert_equal(weights(resumed), expected)
    assert resumed.global_steps == whole.global_steps == 4


def test_it_trains_saves_and_resumes_through_trainer(tmp_path: Path) -> None:
    examples = [
        {name: value[i] for name, value in tiny_batch("llama", seed=seed).items()}
        for seed in range(4)
        for i in range(4)
    ]

    def trainer_for(folder: Path) -> Trainer:
        args = TrainingArguments(
            output_dir=str(folder),
            deepspeed=config(gradient_clipping="auto", zero_optimization={"stage": 0}),
            per_device_train_batch_size=4,
            learning_rate=LR,
            weight_decay=0.01,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            max_steps=4,
            save_steps=2,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        return Trainer(model=tiny_model("llama"), args=args, train_dataset=examples)

    trainer = trainer_for(tmp_path / "run")
    trainer.train()
    engine = trainer.model_wrapped
    assert isinstance(engine, PluginEngine) and isinstance(engine.backend, PlainSGD)
    assert mean_loss(engine.module) < mean_loss(tiny_model("llama").to(engine.device))
    expected = weights(engine)
    resumed = trainer_for(tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_equal(weights(resumed.model_wrapped), expected)


def average(rank: int) -> dict[str, Any]:
    """In a rank: its weights after training on every second batch, and one process's after all batches."""
    size = torch.distributed.get_world_size()
    ds_zo.register_backend("PlainSGD", PlainSGD)
    engine = start(config())
    train(engine, range(rank, 6, size))
    return {"mine": weights(engine), "alone": torch_sgd(range(6), device=engine.device, accumulation=2)}


@pytest.mark.slow
def test_two_ranks_average_their_gradients() -> None:
    for found in job(average, 2):
        assert_close(found["mine"], found["alone"])


# What the configuration says of it.


def test_its_own_keys_are_typed_suggested_and_listed() -> None:
    ds_zo.register_backend("Glide", PlainSGD, params=GlideParams)
    ds_config = config(kind="glide")
    ds_config["optimizer"]["params"]["friction"] = 0.25
    found = resolve(ds_config).optimizer
    assert isinstance(found, GlideParams) and found.friction == 0.25
    ds_config["optimizer"]["params"]["frction"] = 0.25
    with pytest.raises(ConfigError, match=r'unknown key "frction".*did you mean "friction"'):
        resolve(ds_config)
    tables = key_tables()
    assert '### `optimizer.params` with `"type": "Glide"`\n' in tables and "A key that no other backend has." in tables
    assert "`adapter` or `plainsgd` or `glide`" in tables


def test_names_are_suggested_where_one_is_misspelt() -> None:
    with pytest.raises(ConfigError, match='did you mean "PlainSGD"'):
        start(config(kind="PlainSDG"))
    with pytest.raises(ConfigError, match='one of zo, lomo, adalomo, lsp, adapter, plainsgd, got "planesgd"'):
        backend_of({"ds_zo": {"backend": "planesgd"}})


def test_settings_that_it_cannot_serve_are_refused_or_reported(log: pytest.LogCaptureFixture) -> None:
    refused = {
        "offload_param.device must be": {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        "compile_blocks belongs to LOMO": {"ds_zo": {"compile_blocks": True}},
        "checkpoint.trajectory belongs to ZO": {"ds_zo": {"checkpoint": {"trajectory": True}}},
        "kahan rounding belongs": {"ds_zo": {"rounding": "kahan"}},
    }
    for text, extra in refused.items():
        with pytest.raises(ConfigError, match=text):
            resolve(config(**extra))
    offloaded = config(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert resolve(offloaded).ignored == ("zero_optimization.stage", "zero_optimization.offload_optimizer")
    start(config(gradient_clipping=1.0))
    assert "gradient_clipping 1 does not change PlainSGD" in log.text


def estimate_sgd(model: Model, limits: Limits, *, params: OptimizerParams, **options: Any) -> Estimate:
    assert set(options) == {"stream", "offload", "checkpointing"}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Planned", "params": {"lr": params.lr}}}
    device = {"weights": model.weights_nbytes}
    return Estimate("planned", "plain", device=device, host={}, step_s=1.0, config=config, limits=limits)


def test_the_planner_uses_the_estimate_of_its_entry_and_says_if_there_is_none() -> None:
    with pytest.raises(ValueError, match="no estimate for a backend registered from outside ds_zo, got 'plainsgd'"):
        plan("random:opt-125m", backends=["plainsgd"])
    ds_zo.register_backend("Planned", PlainSGD, planner=f"{__name__}:estimate_sgd", refuses_fp16=True)
    found = plan("random:opt-125m", backends=["planned"], params={"lr": 0.5}, stream={"master": "wire"})
    assert found["planned"].device_nbytes > 2e8 and found["planned"].config["optimizer"]["params"] == {"lr": 0.5}
    with pytest.raises(ValueError, match="planned can't train in fp16"):
        plan("random:opt-125m", backends=["planned"], dtype="fp16")
    with pytest.raises(ConfigError, match="Planned does not scale losses"):
        resolve(config(kind="planned", fp16={"enabled": True}))


def test_config_planner_and_plugin_ask_for_capabilities_and_not_for_names() -> None:
    """A backend is one folder and one entry: no other code compares its name or the class of its parameters."""
    asks = re.compile(
        r"(backend|name|contender) (==|!=|in) [(\[{]?\"(zo|lomo|adalomo|lsp)|"
        r"(isinstance|issubclass)\(.*(ZO|LOMO|LSP)(Params|Backend)|params is \w+Params"
    )
    package = Path(ds_zo.__file__).parent
    files = [path for folder in ("config", "planner", "plugin", "commands") for path in (package / folder).glob("*.py")]
    assert files and not [path.name for path in files if asks.search(path.read_text())]


# What may be registered.


def test_a_place_is_imported_on_first_use() -> None:
    ds_zo.register_backend("Elsewhere", "a_module_that_is_not_there:Backend")
    resolve(config(kind="elsewhere"))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        backend_class("elsewhere")
    ds_zo.register_backend("ByPlace", f"{__name__}:PlainSGD")
    assert backend_class("byplace") is PlainSGD


def test_a_name_is_taken_once() -> None:
    ds_zo.register_backend("PlainSGD", PlainSGD)  # the same entry: nothing changes
    for taken in ("zo", "plainsgd", "AdamW", "RMSprop"):
        with pytest.raises(ValueError, match=f'optimizer type of its own.*"{taken}"'):
            ds_zo.register_backend(taken, PlainSGD, clips_gradients=True)
    assert registry.backend_names() == (*BACKENDS, "plainsgd")
    assert all(resolve(config(kind=kind)).backend == kind for kind in BACKENDS)


def test_what_is_registered_must_be_a_backend() -> None:
    for given in (True, False):
        with pytest.raises(TypeError, match='no keyword of this name, got stream; did you mean "streams"'):
            ds_zo.register_backend("NoBackend", dict, stream=given)
    ds_zo.register_backend("NoBackend", dict)
    with pytest.raises(TypeError, match=r"subclass of ds_zo\.backends\.Backend"):
        start(config(kind="NoBackend"))
