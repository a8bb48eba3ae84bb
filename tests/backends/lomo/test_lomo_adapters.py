"""LoRA and LOMO together: adapters by AdamW, base weights by LOMO, in one backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.config import ConfigError
from tests.helpers.lomo_runs import batches, config_for, lively, lora_model, start, train, weights_of
from tests.helpers.weights import assert_close, assert_equal

pytestmark = pytest.mark.usefixtures("single_process")

WARMUP = {"warmup_min_lr": 0.05, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}
ADAPTER = {"lr": 1e-2, "betas": [0.8, 0.95], "weight_decay": 0.1}


def is_adapter(name: str) -> bool:
    return "lora_" in name


@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("scheduled", [False, True])
def test_it_is_adamw_beside_sgd(clipping: float, scheduled: bool) -> None:
    schedule = {"scheduler": {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 4}}}
    config = config_for(clipping=clipping, params={"adapter": ADAPTER}, **(schedule if scheduled else {}))
    model, reference, given = lora_model(), lora_model(), {}
    if clipping and scheduled:  # the user's optimizer, whose rates DeepSpeed's warm-up sets, whatever they were
        schedule["scheduler"] = {"type": "WarmupLR", "params": WARMUP}
        config |= schedule | {"ds_zo": {"backend": "lomo", "params": {"adapter": ADAPTER}}}
        del config["optimizer"]
        given["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    engine = start(config, model, **given)
    named = dict(reference.named_parameters())
    sgd = torch.optim.SGD([p for n, p in named.items() if not is_adapter(n)], lr=0.1)
    adapters = [p for n, p in named.items() if is_adapter(n)]
    adamw = torch.optim.AdamW(adapters, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    before = weights_of(reference)
    for step, batch in enumerate(batches("llama", 8)):
        factor = 0.5 + 0.5 * min(max(step - bool(given), 0), 4) / 4 if scheduled else 1.0  # WarmupLR begins twice
        sgd.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = 0.1 * factor, 1e-2 * factor
        train(engine, [batch])
        reference(**batch).loss.backward()
        if clipping:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), clipping)
            assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-4)  # adapters count
        for optimizer in (sgd, adamw):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights_of(engine.module), weights_of(reference), atol=1e-5)
    assert all(not torch.equal(before[n], p) for n, p in engine.module.named_parameters())
    moments = engine.backend.state_dict()["moments"]
    assert len(moments) == len(adapters) and all(is_adapter(name) for name in moments)


def test_adapters_resume_with_their_moments(tmp_path: Path) -> None:
    config = config_for("AdaLOMO", clipping=1.0, lr=1e-2, params={"adapter": ADAPTER})
    whole = start(config, lora_model())
    train(whole, batches("llama", 2))
    whole.save_checkpoint(str(tmp_path))
    train(whole, batches("llama", 2, first=2))
    resumed = start(config, lora_model())
    resumed.load_checkpoint(str(tmp_path))
    other = start(config_for("AdaLOMO", clipping=1.0, lr=1e-2), lora_model())
    with pytest.raises(CheckpointError, match=r"lora_.*was trained as an adapter.*load_optimizer_states=False"):
        other.load_checkpoint(str(tmp_path))
    train(resumed, batches("llama", 2, first=2))
    assert_equal(weights_of(whole.module), weights_of(resumed.module))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_resumed_run_keeps_the_rates_of_adapters_whatever_its_json_says(scheduled: bool, tmp_path: Path) -> None:
    """The groups of a resumed run have the learning rates of the checkpoint. Adapters follow these."""
    schedule = {"scheduler": {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 4}}}
    found = []
    for lr in (None, 0.03, 0.4):
        more = schedule if scheduled else {}
        engine = start(config_for(lr=lr or 0.1, params={"adapter": ADAPTER}, **more), lora_model())
        if lr is None:
            train(engine, batches("llama", 2))
            engine.save_checkpoint(str(tmp_path))
        else:
            engine.load_checkpoint(str(tmp_path))
        train(engine, batches("llama", 2, first=2))
        found.append(weights_of(engine.module))
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


def test_a_frozen_base_stays() -> None:
    model = lora_model(train_base=False)
    before = weights_of(model)
    train(start(config_for(params={"adapter": ADAPTER}), model), batches("llama", 3))
    for name, p in model.named_parameters():
        assert torch.equal(before[name], p) != is_adapter(name)


def test_a_model_without_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"get_peft_model.*\(optimizer\.params\.adapter\)"):
        start(config_for(params={"adapter": ADAPTER}), lively("llama"))
