"""The recipe "Add a storage format" of CONTRIBUTING.md: LoRA trains over a base in formats that the tests add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from ds_zo import load_pretrained, ops
from ds_zo.config import ConfigError, resolve
from ds_zo.config.docs import key_tables
from ds_zo.config.section import FROZEN_DTYPES
from ds_zo.ops import FrozenFormat
from ds_zo.streaming.budget import decodes_by_matrix
from ds_zo.streaming.placement import WIRE, plan_units, register_format
from tests.backends.outside import int4, int8
from tests.helpers.adapter_runs import adapted, adapter_json, assert_moved, assert_same, batches, run, start, train
from tests.helpers.decoded_values import decoded, with_decoded_base
from tests.helpers.loaded_models import lora_over
from tests.helpers.tiny_models import tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import zo_json

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for added in (int4.ENTRY, int8.ENTRY):
        register_format(added)
    yield
    for added in (int4.ENTRY, int8.ENTRY):
        del ops.PACKED[added.form.dtype], WIRE[added.form.name]
        FROZEN_DTYPES.remove(added.form.name)


@pytest.mark.parametrize(("added", "nbytes"), [(int4.ENTRY, 500), (int8.ENTRY, 1000)])
def test_values_are_those_of_the_grid(added: FrozenFormat, nbytes: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    packed, scales = added.quantise(values)
    found = decoded(values, added.form.name)
    assert (packed.numel(), scales.numel()) == (nbytes, 16)
    assert torch.equal(found, decoded(found, added.form.name))
    assert (found - values).abs().max() <= 0.51 * scales.max()


@pytest.mark.parametrize(("form", "dtype"), [("int4", torch.float32), ("int8", torch.bfloat16)])
def test_lora_over_it_equals_lora_over_its_values(form: str, dtype: torch.dtype) -> None:
    """Streamed, on the device, and decoded matrix by matrix; the module that stays on the device holds the values."""
    model, data = adapted(dtype=dtype, hidden_size=64, intermediate_size=160), batches(3)
    placement = plan_units(model, [], frozen_wire=WIRE[form], split=False)
    tight = int(4.9 * max(unit.scratch_nbytes for unit in placement.blocks))
    assert decodes_by_matrix(placement, budget_nbytes=tight)
    more: dict[str, Any] = {"bf16": {"enabled": dtype is torch.bfloat16}}
    expected = run(with_decoded_base(model, form), data, offload=False, **more)
    assert_moved(with_decoded_base(model, form), expected[1])
    for options in ({}, {"resident_blocks": 3}, {"device_memory_gb": tight / 1e9, "resident_blocks": 1, "tiles": 1}):
        assert_same(run(model, data, frozen_dtype=form, **options, **more), expected)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    model, data, json = adapted("wide"), batches(4), adapter_json(frozen_dtype="int4")
    whole = start(adapted("wide"), json)
    train(whole, data)
    first = start(model, json)
    train(first, data[:2])
    first.save_checkpoint(str(tmp_path))
    assert {part.stored_as for unit in first.backend.blocks.units for part in unit.parts} == {"float32", "int4"}
    first.destroy()
    resumed = start(adapted("wide"), json)
    resumed.load_checkpoint(str(tmp_path))
    train(resumed, data[2:])
    assert_equal(weights(resumed.module), weights(whole.module))


def test_a_base_on_disk_is_read_block_by_block(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    load: Any = partial(load_pretrained, hf.AutoModelForCausalLM, str(tmp_path), dtype=torch.float32)
    runs = []
    for base, form in ((load(frozen_dtype="int4"), "auto"), (load(), "int4")):
        model = lora_over(base, target_modules=["q_proj", "down_proj"])
        engine = start(model, adapter_json(frozen_dtype=form))
        runs.append((train(engine, batches(2)), weights(engine.module)))
        engine.destroy()
    assert_same(*runs)


def test_zo_trains_over_it() -> None:
    ends = []
    model = adapted("rslora")
    for base, form in ((model, "int4"), (with_decoded_base(model, "int4"), "auto")):
        engine = start(base, zo_json(frozen_dtype=form))
        train(engine, batches(3))
        ends.append(weights(engine.module))
        engine.destroy()
    assert_equal(*ends)


def test_the_configuration_knows_it() -> None:
    assert "`auto` or `bf12` or `fp8` or `nf4` or `nf4_nested` or `mxfp4` or `int4` or `int8`" in key_tables()
    with pytest.raises(ConfigError, match=r'one of auto, .*, mxfp4, int4, int8, got "int44"; did you mean "int4"'):
        resolve(adapter_json(own=False, frozen_dtype="int44"))


@pytest.mark.parametrize("taken", [("int4", torch.bits16), ("mine", torch.bits2x4), ("mine", torch.uint8)])
def test_a_name_and_a_dtype_are_taken_once(taken: tuple[str, torch.dtype]) -> None:
    form = ops.Format(*taken, scale_dtype=torch.float16, scale_numel=1)
    with pytest.raises(ValueError, match="needs a name and a dtype of its own, got"):
        register_format(FrozenFormat(form, int4.quantise, int4.dequantise_))


@pytest.mark.parametrize("wrong", [{"scale_dtype": None}, {"group_numel": 96}, {"packed_numel": 3}])
def test_scales_and_divisors_of_256_are_needed(wrong: dict[str, Any]) -> None:
    form = replace(int4.INT4, name="mine", dtype=torch.bits16, **wrong)
    with pytest.raises(ValueError, match=r"divide 256, got .*'mine'.*; change them"):
        register_format(FrozenFormat(form, int4.quantise, int4.dequantise_))
