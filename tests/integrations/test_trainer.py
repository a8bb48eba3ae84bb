"""HF Trainer on our engines: losses of every kind, evaluation, best model, saving, resuming."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ds_zo.checkpoint import CheckpointError, newest_complete, writer
from ds_zo.config import BACKENDS
from tests.helpers.tiny_models import VOCAB, tiny_model
from tests.integrations.library_runs import (
    ENGINE_BACKENDS,
    LEARNING_RATE,
    MICRO_BATCH,
    arguments,
    assert_moved,
    assert_same,
    batches,
    config_for,
    engine_of,
    forget,
    fresh_libraries,  # noqa: F401
    logged,
    on_device,
    section_for,
    start,
    trainer_for,
    weights_of,
    zero_for,
)

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _adalomo_resumes_alone(backend: str, request: pytest.FixtureRequest) -> None:
    if backend not in ENGINE_BACKENDS and not request.node.name.startswith("test_resume"):
        pytest.skip("AdaLOMO's engine is LOMO's, and Adapter's is tested in backends/adapter: what they save differs")


def test_it_logs_loss_grad_norm_and_lr(backend: str, tmp_path: Path) -> None:
    lr = LEARNING_RATE[backend]
    args = arguments(tmp_path, config_for(backend), max_steps=4, lr_scheduler_type="linear")
    trainer = trainer_for(args, 4)
    trainer.train()
    # As with any DeepSpeed engine, which has moved the schedule on by the time Trainer looks.
    assert logged(trainer, "learning_rate") == pytest.approx([0.75 * lr, 0.5 * lr, 0.25 * lr, 0.0])
    assert all(3 < loss < 6 for loss in logged(trainer, "loss"))
    if backend == "zo":
        assert all(norm > 0 for norm in logged(trainer, "grad_norm"))


def test_auto_is_filled_from_the_arguments(backend: str, tmp_path: Path) -> None:
    config = config_for(backend)
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "train_batch_size": "auto"}
    config |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    config["optimizer"]["params"] |= {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": "auto"}
    config["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    }
    config["zero_optimization"] = {"stage": 2, "reduce_bucket_size": "auto"}
    args = arguments(tmp_path, config, max_steps=2, learning_rate=1e-4, weight_decay=0.1, warmup_steps=1)
    trainer = trainer_for(args, 2)
    trainer.train()
    settings = engine_of(trainer).resolved.optimizer
    assert (settings.lr, settings.weight_decay) == (1e-4, 0.1)
    assert engine_of(trainer).train_micro_batch_size_per_gpu() == MICRO_BATCH


def test_a_lost_window_at_an_epochs_end_is_stepped(backend: str, tmp_path: Path) -> None:
    """Five micro-batches in windows of two: Trainer steps after the second, the fourth, and the fifth."""
    config = config_for(backend, accumulation=2)
    trainer = trainer_for(arguments(tmp_path, config, num_train_epochs=1), 5)
    trainer.train()
    engine = engine_of(trainer)
    assert (trainer.state.global_step, engine.global_steps) == (3, 3)
    assert len(logged(trainer, "loss")) == 3


def reference_without_loss(backend: str, criterion: Any, num_steps: int) -> dict[str, torch.Tensor]:
    engine = start(config_for(backend))
    for batch in batches(num_steps):
        inputs = on_device(engine, batch)
        labels = inputs.pop("labels")
        loss = criterion(engine(**inputs).logits, labels)
        engine.backward(loss)
        engine.step()
    return weights_of(engine)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    flat = logits[:, :-1].reshape(-1, VOCAB)
    return torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), label_smoothing=smoothing)


def test_label_smoothing_differentiates_the_logits(backend: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, config_for(backend), max_steps=2, label_smoothing_factor=0.2)
    trainer = trainer_for(args, 2)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    after = weights_of(engine_of(trainer))
    expected = reference_without_loss(backend, lambda lo, la: cross_entropy(lo, la, 0.2), 2)
    for name, value in after.items():  # two spellings of the smoothed loss, each rounded its own way
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5, msg=name)
    assert max((after[name] - before[name]).abs().max() for name in before) > 1e-4


def test_compute_loss_func_is_the_loss(backend: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def compute(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.append(num_items_in_batch)
        return cross_entropy(outputs.logits, labels)

    trainer = trainer_for(arguments(tmp_path, config_for(backend), max_steps=2), 2, compute_loss_func=compute)
    trainer.train()
    assert len(seen) >= 2
    assert_same(weights_of(engine_of(trainer)), reference_without_loss(backend, cross_entropy, 2))


def saving(**changes: Any) -> dict[str, Any]:
    return {"save_strategy": "steps", "save_steps": 2, **changes}


@pytest.mark.parametrize("stream", [False, True])
def test_resume_equals_uninterrupted(backend: str, stream: bool, tmp_path: Path) -> None:
    """Every pair of backend, streaming and kind of optimizer (the script's own or the JSON's), not every triple."""
    own_optimizer = (list(BACKENDS).index(backend) % 2 == 0) == stream
    config = (section_for if own_optimizer else config_for)(backend, stream=stream)
    changes = saving(max_steps=5, lr_scheduler_type="linear", learning_rate=LEARNING_RATE[backend])
    whole = trainer_for(arguments(tmp_path, config, **changes), 5)
    whole.train()
    expected = weights_of(engine_of(whole))

    again = trainer_for(arguments(tmp_path, config, **changes), 5, tiny_model("llama", seed=1))
    if own_optimizer:
        again.evaluate()  # before there is one
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(expected, weights_of(engine_of(again)))
    # the log restored from the checkpoint has the first two steps; the rest was trained anew
    assert logged(again, "loss") == logged(whole, "loss")
    assert logged(again, "learning_rate") == logged(whole, "learning_rate")
    if stream:  # a Trainer that has trained already
        whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert_same(expected, weights_of(engine_of(whole)))


def test_a_save_that_was_killed_is_named_with_the_checkpoint_to_take_instead(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is copied when all files of the last asynchronous save are written but for its place: what a kill
    at that moment leaves."""
    if backend != "zo":
        pytest.skip("saving is the same for all backends")
    out, killed = tmp_path / "out", tmp_path / "killed"
    put_in_place = writer._put_in_place

    def copy_first(save: Any, temporary: Path) -> None:
        while save.tag == "global_step4" and not (out / "checkpoint-4" / "trainer_state.json").exists():
            time.sleep(0.01)
        if save.tag == "global_step4":
            shutil.copytree(out, killed)
        put_in_place(save, temporary)

    monkeypatch.setattr(writer, "_put_in_place", copy_first)
    config = config_for(backend, ds_zo={"checkpoint": {"asynchronous": True}})
    whole = trainer_for(arguments(out, config, **saving(max_steps=4)), 4)
    whole.train()
    engine_of(whole).wait_for_checkpoint()
    monkeypatch.undo()
    assert newest_complete(out) == str(out / "checkpoint-4")

    again = trainer_for(arguments(killed, config, **saving(max_steps=4)), 4, tiny_model("llama", seed=1))
    with pytest.raises(CheckpointError, match=r"checkpoint-4 was not completed; .* is .*checkpoint-2: train\("):
        again.train(resume_from_checkpoint=True)  # takes the newest, and would find a model in it
    assert newest_complete(tmp_path / "nothing") is None
    forget()
    again = trainer_for(arguments(killed, config, **saving(max_steps=4)), 4, tiny_model("llama", seed=1))
    again.train(resume_from_checkpoint=newest_complete(killed))
    assert_same(weights_of(engine_of(whole)), weights_of(engine_of(again)))
    engine_of(again).wait_for_checkpoint()
    assert newest_complete(killed) == str(killed / "checkpoint-4")


@pytest.mark.parametrize("stream", [False, True])
def test_a_trajectory_moves_no_checkpoint_to_another_step(backend: str, stream: bool, tmp_path: Path) -> None:
    """Two steps are recorded after the first checkpoint. Neither loading the best model nor resuming replays them."""
    if backend != "zo":
        pytest.skip("only ZO has trajectories")
    kept: list[dict[str, torch.Tensor]] = []

    def metric(prediction: Any) -> dict[str, float]:
        kept.append(weights_of(engine_of(trainer)))
        return {"score": -float(len(kept))}

    config = config_for(backend, stream=stream, ds_zo={"checkpoint": {"trajectory": True}})
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "load_best_model_at_end": True}
    trainer = trainer_for(arguments(tmp_path, config, **saving(max_steps=4, **best)), 4, compute_metrics=metric)
    trainer.train()
    assert_same(weights_of(engine_of(trainer)), kept[0])
    assert_moved(kept[0], kept[1])

    again = trainer_for(arguments(tmp_path, config, **saving(max_steps=4)), 4, tiny_model("llama", seed=1))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == engine_of(again).global_steps == 4
    assert_same(weights_of(engine_of(again)), kept[1])


def test_save_model_loads_with_from_pretrained(backend: str, tmp_path: Path) -> None:
    trainer = trainer_for(arguments(tmp_path, config_for(backend, stream=True), max_steps=3), 3)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="float32")
    assert_same(loaded.state_dict(), weights_of(engine_of(trainer)))
    engine = engine_of(trainer)
    engine.eval()
    batch = on_device(engine, batches(1)[0])
    loaded.to(engine.device)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).loss, engine(**batch).loss, rtol=1e-6, atol=0)


def test_the_best_model_is_loaded_at_the_end_and_early_stopping_stops(backend: str, tmp_path: Path) -> None:
    """The metric is made to get worse after the second evaluation, so the best checkpoint is not the last."""
    scores = iter([1.0, 3.0, 2.0, 1.0, 0.5])
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def metric(prediction: Any) -> dict[str, float]:
        kept[trainer.state.global_step] = weights_of(engine_of(trainer))
        return {"score": next(scores)}

    args = arguments(
        tmp_path,
        config_for(backend, stream=True),
        **saving(save_steps=1, max_steps=5),
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = trainer_for(args, 5, compute_metrics=metric, callbacks=[stop])
    trainer.train()
    assert trainer.state.global_step == 4  # two evaluations without a better score
    assert Path(trainer.state.best_model_checkpoint or "").name == "checkpoint-2"
    assert_same(weights_of(engine_of(trainer)), kept[2])
    assert_moved(kept[2], kept[4])
    scores = iter([1.0])
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(loss_of(kept[2], 2), rel=1e-4)


def test_evaluation_on_the_way_changes_nothing(backend: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 4}
    # LSP's Adam is on the CPU where blocks stream, and else on the device: it rounds otherwise there, if that is CUDA.
    plain = trainer_for(arguments(tmp_path, config_for(backend, stream=backend == "lsp"), **changes), 4)
    plain.train()
    changes |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    evaluated = trainer_for(arguments(tmp_path, config_for(backend, stream=True), **changes), 4)
    evaluated.train()
    assert len(logged(evaluated, "eval_loss")) == 5
    assert_same(weights_of(engine_of(plain)), weights_of(engine_of(evaluated)))
    assert logged(evaluated, "eval_loss")[0] == pytest.approx(loss_of(tiny_model("llama").state_dict(), 2), rel=1e-4)
    assert logged(evaluated, "eval_loss")[4] == pytest.approx(loss_of(weights_of(engine_of(plain)), 2), rel=1e-4)


def test_evaluate_before_train_and_train_again(backend: str, tmp_path: Path) -> None:
    """Trainer refuses the first below stage 3, loses the JSON's optimizer at it, and cannot do the second at all with
    DeepSpeed's own engines."""
    stage = {"zo": 2, "lomo": 3, "adalomo": 2, "lsp": 3}[backend]  # Trainer's doing depends on it, not on the backend
    config = config_for(backend, zero_optimization=zero_for(backend, stage=stage))
    config["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    }
    changes: dict[str, Any] = {"max_steps": 3, "warmup_steps": 1}
    model = tiny_model("llama")
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    expected = loss_of(initial, 2)
    trainer = trainer_for(arguments(tmp_path, config, **changes), 3, model)
    before = trainer.evaluate()["eval_loss"]
    length = batches(1)[0]["labels"].shape[1]
    by_all_labels = expected * (length - 1) / length  # transformers 4 also counts the first label, which has no logits
    assert before in (pytest.approx(expected, rel=1e-5), pytest.approx(by_all_labels, rel=1e-5))
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == before
    trainer.train()

    once, first_losses = weights_of(engine_of(trainer)), logged(trainer, "loss")
    assert_moved(initial, once)
    trainer.train()

    for weights, after, losses in (
        (initial, once, first_losses),
        (once, weights_of(engine_of(trainer)), logged(trainer, "loss")),
    ):
        unset_hf_deepspeed_config()  # under a stage 3 JSON a model is made in pieces
        model = tiny_model("llama")
        model.load_state_dict(weights)
        other = trainer_for(arguments(tmp_path, config, **changes), 3, model)
        other.train()
        assert logged(other, "loss") == losses
        assert_same(weights_of(engine_of(other)), after)


def loss_of(weights: dict[str, torch.Tensor], num_batches: int) -> float:
    model = tiny_model("llama").eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return sum(model(**batch).loss.item() for batch in batches(num_batches)) / num_batches


def test_an_auto_inside_ds_zo_is_refused_by_the_libraries(backend: str, tmp_path: Path) -> None:
    config = config_for(backend, stream=True, ds_zo={"stream": {"device_memory_gb": "auto"}})
    trainer = trainer_for(arguments(tmp_path, config, max_steps=1), 1)
    with pytest.raises(ValueError, match=r"ds_zo\.stream\.device_memory_gb"):
        trainer.train()
