"""Adapters over a streamed frozen base train as in a plain PEFT loop, bit for bit in float32."""

from __future__ import annotations

import copy
import random
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

from ds_zo import ConfigError
from ds_zo.backends.adapter.trained import AdapterParameters
from tests.helpers.adapter_runs import (
    METHODS,
    adapted,
    adapter_json,
    assert_moved,
    assert_same,
    batches,
    peft,
    run,
    run_plain,
    start,
    train,
)
from tests.helpers.decoded_values import decoded, with_decoded_base
from tests.helpers.tiny_models import tiny_model
from tests.helpers.weights import weights

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("method", METHODS)
def test_streamed_and_resident_runs_equal_a_plain_loop(method: str) -> None:
    model, data = adapted(method), batches(4)
    expected = run_plain(model, data)
    assert_moved(model, expected[1])
    placements: list[dict[str, Any]] = [{"resident_blocks": 1, "offload_activations": True}]
    if method == "lora":
        placements += [{}, {"own": False, "offload": False}]
    for options in placements:
        assert_same(run(model, data, **options), expected)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("nf4", torch.float32),
        ("nf4", torch.bfloat16),
        ("nf4_nested", torch.bfloat16),
        ("fp8", torch.float32),
        ("bf12", torch.bfloat16),
    ],
)
def test_a_stored_base_equals_its_decoded_values(form: str, dtype: torch.dtype) -> None:
    model, data = adapted(dtype=dtype), batches(3)
    more: dict[str, Any] = {"bf16": {"enabled": dtype is torch.bfloat16}}
    expected = run(with_decoded_base(model, form), data, offload=False, **more)
    if dtype is torch.float32:
        assert_same(expected, run_plain(with_decoded_base(model, form), data))
    for options in ({}, {"resident_blocks": 1, "offload_activations": True}):
        assert_same(run(model, data, frozen_dtype=form, **options, **more), expected)


def test_accumulation_clipping_and_schedulers_equal_a_plain_loop() -> None:
    model, data = adapted(), batches(6)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    expected = run_plain(model, data, accumulation=2, clipping=0.05, schedule=schedule)
    more = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05}
    ours = copy.deepcopy(model)
    engine = start(ours, adapter_json(**more), lr_scheduler=schedule)
    torch.manual_seed(7)
    losses = train(engine, data)
    assert_same((losses, weights(engine.module)), expected)
    assert engine.get_global_grad_norm() > 0.05
    assert engine.get_lr() == pytest.approx([1e-2 * 0.5**3])


def test_nothing_is_written_back_and_trained_tensors_are_on_the_device() -> None:
    model = adapted("wide")
    engine = start(model)
    store = engine.backend.blocks.store
    before = [unit.store_buffer.clone() for unit in store.placement.blocks]
    train(engine, batches(2))
    assert store.runtime.transport.bytes_down == 0 and len(before) == 3
    assert all(unit.streamed and not unit.trainable for unit in store.placement.blocks)
    assert all(torch.equal(u.store_buffer, was) for u, was in zip(store.placement.blocks, before, strict=True))
    states = [state["exp_avg"] for state in engine.optimizer.state.values()]
    assert len(states) == sum(p.requires_grad for p in model.parameters())


def test_16_bit_adapters_have_float32_masters() -> None:
    """Equal to a loop that keeps masters by hand. A step of 1e-5 is far below the spacing of bfloat16."""
    model, data = adapted(dtype=torch.bfloat16), batches(4)
    plain = copy.deepcopy(model)
    plain.config.use_cache = False
    trained = [p for p in plain.parameters() if p.requires_grad]
    masters = [torch.nn.Parameter(p.detach().float()) for p in trained]
    optimizer = torch.optim.AdamW(masters, lr=1e-5)
    torch.manual_seed(7)
    losses = []
    for i, batch in enumerate(data):
        loss = plain(**batch).loss
        (loss / 2).backward()
        losses.append(loss.item())
        for p, master in zip(trained, masters, strict=True):
            master.grad = p.grad.float() if master.grad is None else master.grad + p.grad
            p.grad = None
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
            for p, master in zip(trained, masters, strict=True):
                p.data.copy_(master.data)
    ours = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    engine = start(model, adapter_json(bf16={"enabled": True}, gradient_accumulation_steps=2), optimizer=ours)
    torch.manual_seed(7)
    assert train(engine, data) == losses
    for t, master in zip(engine.backend._trained, masters, strict=True):
        assert torch.equal(t.master, master)
        assert torch.equal(t.parameter, master.bfloat16())
        assert torch.equal(t.parameter.get_full_hp_param(), master)
    with torch.no_grad():
        trained_here = engine.backend._trained._trained[0].parameter
        trained_here.fill_(2.0)
    train(engine, data[:2])
    assert (trained_here - 2.0).abs().max() < 0.1, "the master takes over what a user has written"


@pytest.mark.parametrize("seed", range(4))
def test_writes_between_steps_are_read_back_in_float32(seed: int) -> None:
    """Elements that a user writes are read back at once, and other elements keep the low bits of their masters."""
    generator = random.Random(seed)
    engine = start(adapted(dtype=torch.bfloat16), adapter_json(bf16={"enabled": True}))
    train(engine, batches(1))
    expected = {t.name: t.master.detach().clone() for t in engine.backend._trained}
    for _ in range(8):
        t = generator.choice(list(engine.backend._trained))
        value = torch.rand(t.parameter.shape)
        chosen = torch.rand(t.parameter.shape) < 0.3
        way = generator.choice(["full", "gathered", "in place"])
        if way == "full":
            safe_set_full_fp32_param(t.parameter, value)
            expected[t.name] = value
        else:
            rounded = value.bfloat16()
            gathers = way == "gathered"
            with torch.no_grad(), deepspeed.zero.GatheredParameters([t.parameter] if gathers else [], modifier_rank=0):
                t.parameter[chosen] = rounded[chosen]
            changed = chosen & (expected[t.name].bfloat16() != rounded)
            expected[t.name] = torch.where(changed, rounded.float(), expected[t.name])
        for t in engine.backend._trained:
            assert torch.equal(safe_get_full_fp32_param(t.parameter), expected[t.name]), (way, t.name)
            assert torch.equal(t.parameter, expected[t.name].bfloat16()), (way, t.name)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    train(engine, batches(1))
    assert all(torch.equal(t.master, expected[t.name]) for t in engine.backend._trained)


def test_fp16_scales_the_loss_and_skips_overflows() -> None:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}}
    model = adapted(dtype=torch.float16)
    before = weights(model)
    engine = start(model, adapter_json(**fp16))
    train(engine, batches(2))
    assert engine.skipped_steps == 2 and engine.optimizer.cur_scale == 2.0**38
    assert all(torch.equal(value, before[name]) for name, value in weights(engine.module).items())
    fp16["fp16"]["initial_scale_power"] = 8
    engine = start(adapted(dtype=torch.float16), adapter_json(**fp16))
    losses = train(engine, batches(1) * 6)
    assert engine.skipped_steps == 0 and losses[-1] < losses[0]


@pytest.mark.parametrize("form", [{"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "fp16"}}])
def test_a_direct_backward_is_refused_where_the_loss_is_scaled(form: dict[str, Any]) -> None:
    """Its gradients would be divided by a scale that they do not have."""
    model = adapted(dtype=torch.float16 if "fp16" in form else torch.float32)
    engine = start(model, adapter_json(offload=False, **form))
    before = weights(engine.module)
    [batch] = batches(1)
    with pytest.raises(RuntimeError, match=r"loss scale.*engine\.backward\(loss\).*bf16"):
        engine(**batch).loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in weights(engine.module).items())
    train(engine, [batch])


@pytest.mark.parametrize("offload", [True, False])
def test_parameters_that_the_optimizer_gets_later_are_refused(offload: bool) -> None:
    """Their gradients would be neither averaged nor clipped, and would add up from step to step."""
    engine = start(adapted(), adapter_json(offload=offload))
    train(engine, batches(1))
    engine.module.add_adapter("second", METHODS["lora"]())
    engine.module.set_adapter("second")
    late = [p for name, p in engine.module.named_parameters() if ".second." in name]
    engine.optimizer.add_param_group({"params": late})
    with pytest.raises(ValueError, match=r"had when deepspeed\.initialize ran.*before initialize"):
        train(engine, batches(1))


@pytest.mark.parametrize("seed", range(3))
def test_parameters_of_the_optimizer_that_are_not_the_models_are_not_trained(seed: int) -> None:
    """As the warning at the start says. Their gradients do not add up, and do not change the others."""
    torch.manual_seed(seed)
    model, own = adapted(seed=seed), torch.nn.Parameter(torch.ones(()))
    found = []
    for has_foreign in (True, False):
        copied = copy.deepcopy(model)
        given = [p for p in copied.parameters() if p.requires_grad] + [own] * has_foreign
        json = adapter_json(offload=seed == 0, gradient_clipping=[0.0, 1e-2, 1.0][seed])
        engine = start(copied, json, optimizer=torch.optim.SGD(given, lr=0.1))
        torch.manual_seed(seed)
        for batch in batches(3):
            engine.backward(engine(**batch).loss * own)
            engine.step()
        found.append(weights(engine.module))
        if has_foreign:
            assert own.grad is None and own.item() == 1.0
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_stored_parameter_that_is_asked_to_train_is_refused() -> None:
    model = adapted()
    engine = start(model, adapter_json(frozen_dtype="nf4"))
    train(engine, batches(1))
    name, weight = next((n, p) for n, p in model.named_parameters() if "k_proj" in n)
    weight.requires_grad_(True)
    with pytest.raises(ValueError, match=f"{name} was frozen .* stored as nf4, which cannot be trained: unfreeze"):
        train(engine, batches(1))


def test_a_parameter_outside_the_blocks_that_is_unfrozen_later_is_refused() -> None:
    """It is on the device in its own dtype, so its gradient would come, and stay from step to step."""
    model = adapted()
    engine = start(model, adapter_json(), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(engine, batches(1))
    embeddings = model.get_input_embeddings().weight
    embeddings.requires_grad_(True)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight was frozen .* unfreeze it before initialize"):
        train(engine, batches(1))
    embeddings.requires_grad_(False)
    train(engine, batches(1))


def test_frozen_dtype_needs_a_frozen_base() -> None:
    model = adapted()
    model.requires_grad_(True)
    with pytest.raises(ConfigError, match="got nf4 and a model that trains all of them: freeze the base model"):
        start(model, adapter_json(frozen_dtype="nf4"))


def test_prefix_tuning_and_weights_of_bitsandbytes_are_refused() -> None:
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    engine = start(peft.get_peft_model(tiny_model("llama"), prefix).train())
    with pytest.raises(ValueError, match=r"takes no key-value cache in training, .* take prompt tuning in place"):
        engine(**batches(1)[0])
    for attribute in ("quant_state", "SCB"):  # as bitsandbytes marks weights in 4 and 8 bits
        model = adapted()
        setattr(next(p for n, p in model.named_parameters() if "k_proj" in n), attribute, None)
        with pytest.raises(
            ValueError, match=r"must not be quantised .*, got .*k_proj.* by bitsandbytes: load the model"
        ):
            start(model)


def test_the_base_is_the_reference_of_dpo_and_a_frozen_adapter_is_exact() -> None:
    """A second adapter that is frozen stays in its own dtype beside an NF4 base."""
    model = adapted()
    model.add_adapter("reference", METHODS["rslora"]())
    engine = start(model, adapter_json(frozen_dtype="nf4"))
    batch = batches(1)[0]
    plain = with_decoded_base(adapted(), "nf4")
    plain.config.use_cache = False
    for logits in (False, True):
        with torch.set_grad_enabled(logits), engine.module.disable_adapter(), plain.disable_adapter():
            assert torch.equal(engine(**batch).logits.detach(), plain(**batch).logits.detach())
    names = {p.name for u in engine.backend.blocks.store.placement.blocks for p in u.placed}
    assert not any("lora" in name for name in names)
    engine.eval()
    with torch.no_grad(), plain.disable_adapter():
        assert not torch.equal(engine(**batch).logits, plain(**batch).logits)


def losses_of_two_adapters(call: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a forward without adapters, and of one with each of two, all made before the backward."""
    trained = [p for p in model.parameters() if p.requires_grad]
    with model.disable_adapter():
        loss = call(**batch).loss
    for weight, name in ((1.0, "default"), (-0.5, "other")):
        model.set_adapter(name)
        for p in trained:
            p.requires_grad_(True)  # `set_adapter` freezes the other adapter
        loss = loss + weight * call(**batch).loss
    return loss


def test_blocks_are_computed_again_with_the_adapters_of_their_forward() -> None:
    base = adapted()
    base.add_adapter("other", METHODS["rslora"]())
    for name, p in base.named_parameters():
        p.requires_grad_("lora" in name)
    found = []
    for streams in (False, True):
        model = copy.deepcopy(base)
        model.config.use_cache = False
        engine = start(model, adapter_json(offload=streams))
        torch.manual_seed(7)  # of dropout
        for batch in batches(2):
            engine.backward(losses_of_two_adapters(engine, model, batch))
            engine.step()
        found.append(weights(model))
        assert model.active_adapters == ["other"]
    assert_moved(base, found[0])
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_adapters_that_are_invoked_by_tokens_equal_a_plain_loop() -> None:
    """PEFT passes the places of these tokens by hooks that it removes after the forward."""
    data = batches(3)
    for batch in data:
        batch["input_ids"][:, 3] = 5
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    model = peft.get_peft_model(tiny_model("llama"), config).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    expected = run_plain(model, data)
    assert_moved(model, expected[1])
    assert_same(run(model, data), expected)


class Leaking(nn.Module):
    """Returns a frozen weight beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(self.base(x) + self.shift), self.base.weight


class Odd(nn.Module):
    """`outside`: the first block's weight is used where the block does not run."""

    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Leaking() for _ in range(4))
        self.outside = outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: Any = self.layers[0].base.weight if self.outside else 0.0
        for number, layer in enumerate(self.layers, 1):
            x, weight = layer(x)
            total = total + number * weight
        return (x @ total).square().mean()


@pytest.mark.parametrize("num_resident", [0, 4])
def test_a_block_may_return_its_encoded_weight(num_resident: int) -> None:
    x = torch.ones(2, 8)
    engine = start(Odd(outside=False), adapter_json(frozen_dtype="bf12", resident_blocks=num_resident))
    plain = Odd(outside=False)
    for layer in plain.layers:
        layer.base.weight.data = decoded(layer.base.weight.data, "bf12")
    expected = plain(x)
    assert torch.equal(engine(x), expected)
    with torch.no_grad():
        assert torch.equal(engine(x), expected)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("num_resident", [0, 4])
def test_an_encoded_weight_that_is_used_outside_its_block_is_refused(num_resident: int, trains: bool) -> None:
    engine = start(Odd(outside=True), adapter_json(frozen_dtype="bf12", resident_blocks=num_resident))
    with (
        torch.set_grad_enabled(trains),
        pytest.raises(ValueError, match=r"layers\.0\.base\.weight was used outside the forward of the block"),
    ):
        engine(torch.ones(2, 8))


def test_ranks_that_train_nothing_average_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    model = nn.Linear(2, 2)
    AdapterParameters(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen=()).average_gradients()
