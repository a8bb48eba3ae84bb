"""Two gloo ranks, through Accelerate and through Trainer: they stay together, and are one rank of twice the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integrations.library_runs import (
    ENGINE_BACKENDS,
    Batch,
    batches,
    config_for,
    fresh_libraries,  # noqa: F401
    start,
    train,
    weights_of,
)

SCRIPT = """
import os, sys
import ds_zo
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, InitProcessGroupKwargs
from tests.helpers.tiny_models import tiny_model
from tests.integrations.library_runs import arguments, batches, config_for, engine_of, forget, loop, trainer_for
from tests.integrations.library_runs import weights_of
from pathlib import Path

way, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])
for backend in sys.argv[3:]:
    forget()
    config = config_for(backend, stream=backend != "lsp")  # whose streamed weights are one rank's
    if way == "trainer":
        # Trainer deals every second batch to a rank: batches 0, 2, 4, 6 to the first, 1, 3, 5, 7 to the second
        run = arguments(folder / backend, config, num_train_epochs=1, save_strategy="steps", save_steps=2)
        trainer = trainer_for(run, 8)
        trainer.train()
        engine = engine_of(trainer)
    else:
        handlers = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=handlers)
        model = tiny_model("llama", seed=rank)  # the second rank's own weights are replaced by the first's
        engine, optimizer = accelerator.prepare(model, DummyOptim(model.parameters()))
        mine = [{name: value.to(accelerator.device) for name, value in batch.items()} for batch in batches(8)[rank::2]]
        loop(accelerator, engine, optimizer, mine)
    assert engine.dp_world_size == 2 and engine.global_steps == 4
    torch.save(weights_of(engine), folder / f"{backend}-{rank}.pt")
torch.distributed.destroy_process_group()  # ends gloo's threads, which must not release tensors while Python ends
"""


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with what a job of two ranks ended with. One job a way: starting ranks costs more than training."""
    folders: dict[str, Path] = {}

    def run(way: str) -> Path:
        if way not in folders:
            folders[way] = tmp_path_factory.mktemp(way)
            run_ranks(SCRIPT, way, str(folders[way]), *ENGINE_BACKENDS)
        return folders[way]

    return run


def joined(a: Batch, b: Batch) -> Batch:
    return {name: torch.cat([a[name], b[name]]) for name in a}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["accelerate", "trainer"])
@pytest.mark.parametrize("backend", ENGINE_BACKENDS)
def test_two_ranks_are_one_of_twice_the_batch(backend: str, way: str, job: Callable[[str], Path]) -> None:
    first, second = (torch.load(job(way) / f"{backend}-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)

    data = batches(8)
    config = {**config_for(backend, stream=backend != "lsp"), "train_micro_batch_size_per_gpu": 8}
    engine = start(config)
    train(engine, [joined(a, b) for a, b in zip(data[::2], data[1::2], strict=True)])
    for name, value in weights_of(engine).items():
        # The mean over eight rows and the mean of two means round differently; ZO multiplies that by 1 / (2 zo_eps).
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-5, msg=name)
