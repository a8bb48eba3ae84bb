"""Small runs of every backend and storage format, as data: what two versions of ds_zo must compute in the same bits.

python tests/helpers/recorded_runs.py --out FILE [--only REGEX] [--save FOLDER] [--load FOLDER] [--device cuda]

Each run trains three steps, saves, and goes on for two steps. Then it loads what it saved into another engine, and
makes these two steps again. With `--load` it makes these two steps alone, from the checkpoint that FOLDER has of it.
FILE gets a line of JSON for each rank of a run: its losses and the sums of its weights. `tools/same_bits.py` compares
two checkouts by these lines. This file imports no other helper: it also runs with a checkout whose helpers differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 3
"""Steps before the checkpoint."""


@dataclass(frozen=True)
class Run:
    """One engine: its optimizer, the keys of its JSON that matter, and its number of ranks."""

    optimizer: dict[str, Any]
    zero: dict[str, Any] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    clipping: float = 0.0
    accumulation: int = 1
    lora: bool = False
    ranks: int = 1

    def config(self) -> dict[str, Any]:
        section = {"stream": self.stream, **({"backend": "adapter"} if self.optimizer["type"] == "AdamW" else {})}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "steps_per_print": 1_000_000,
            **({"bf16": {"enabled": True}} if self.dtype == "bf16" else {}),
            **({} if self.optimizer["type"] == "AdamW" else {"optimizer": self.optimizer}),
            "zero_optimization": {"stage": 0, **self.zero},
            "ds_zo": section,
        }


_ZO = {"type": "ZO", "params": {"lr": 1e-4, "seed": 7}}
_LOMO = {"type": "LOMO", "params": {"lr": 1e-2}}
_ADALOMO = {"type": "AdaLOMO", "params": {"lr": 1e-3}}
_LSP = {"type": "LSP", "params": {"lr": 1e-3, "subspace_dim": 16, "fit_steps": 3, "check_interval": 2, "edge": "dense"}}
_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
_ON_HOST = {"offload_param": {"device": "cpu"}}
_ADAM_ON_HOST = {"offload_optimizer": {"device": "cpu"}}
_NONE_RESIDENT = {"resident_blocks": 0}
_ZO_STREAM = {**_NONE_RESIDENT, "writeback_interval": 2}

RUNS: dict[str, Run] = {
    "zo-float32": Run(_ZO, dtype="fp32"),
    "zo-bf16": Run(_ZO),
    "zo-directions": Run({"type": "ZO", "params": {**_ZO["params"], "num_directions": 2}}, _ON_HOST, _ZO_STREAM),
    "zo-accumulation": Run(_ZO, _ON_HOST, _ZO_STREAM, accumulation=2),
    "zo-split": Run(_ZO, _ON_HOST, _ZO_STREAM),
    "zo-some-resident": Run(_ZO, _ON_HOST, {"resident_blocks": 1, "writeback_interval": 2}),
    "zo-float32-streamed": Run(_ZO, _ON_HOST, _ZO_STREAM, dtype="fp32"),
    **{
        f"zo-{wire}-{master}": Run(_ZO, _ON_HOST, {**_ZO_STREAM, "wire_dtype": wire, "master": master})
        for wire in ("bf16", "bf12", "fp8")
        for master in (("wire",) if wire == "bf16" else ("split", "wire"))
    },
    "zo-lora-nf4": Run(_ZO, _ON_HOST, {**_ZO_STREAM, "frozen_dtype": "nf4"}, lora=True),
    "lomo-float32": Run(_LOMO, dtype="fp32", clipping=1.0),
    "lomo-bf16": Run(_LOMO),
    "lomo-streamed": Run(_LOMO, _ON_HOST, _NONE_RESIDENT),
    "lomo-streamed-clipped": Run(_LOMO, _ON_HOST, _NONE_RESIDENT, clipping=1.0),
    "adalomo": Run(_ADALOMO, clipping=1.0),
    "adalomo-streamed": Run(_ADALOMO, _ON_HOST, _NONE_RESIDENT),
    "lsp": Run(_LSP, _ADAM_ON_HOST, clipping=1.0),
    "lsp-accumulation": Run(_LSP, _ADAM_ON_HOST, clipping=1.0, accumulation=2),
    "lsp-streamed": Run(_LSP, {**_ADAM_ON_HOST, **_ON_HOST}, _NONE_RESIDENT),
    "lsp-float32": Run(_LSP, dtype="fp32"),
    "adapter-resident": Run(_ADAMW, lora=True, clipping=1.0),
    **{
        f"adapter-{frozen}": Run(_ADAMW, _ON_HOST, {**_NONE_RESIDENT, "frozen_dtype": frozen}, lora=True)
        for frozen in ("auto", "bf12", "fp8", "nf4")
    },
    "adapter-activations": Run(_ADAMW, _ON_HOST, {**_NONE_RESIDENT, "offload_activations": True}, lora=True),
    "zo-2-ranks": Run(_ZO, ranks=2),
    "zo-2-ranks-stage-3": Run(_ZO, {"stage": 3, **_ON_HOST}, _ZO_STREAM, ranks=2),
    "lomo-2-ranks": Run(_LOMO, ranks=2),
    "lomo-2-ranks-stage-3": Run(_LOMO, {"stage": 3, **_ON_HOST}, _NONE_RESIDENT, ranks=2),
    "lsp-2-ranks": Run(_LSP, {"stage": 1, **_ADAM_ON_HOST}, ranks=2),
    "adapter-2-ranks-stage-3": Run(_ADAMW, {"stage": 3, **_ON_HOST}, _NONE_RESIDENT, lora=True, ranks=2),
}


def make_engine(run: Run) -> Any:
    """An engine over a LLaMA of two blocks with random weights."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_zo  # noqa: F401

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=32, **shape))
    for number, p in enumerate(p for p in model.parameters() if p.dim() > 1):
        # Exact arithmetic: every processor starts from the same bits, and so does the base of adapters.
        mixed = (torch.arange(p.numel(), dtype=torch.float64) + 7919 * number) * 40503 % 65536
        p.data = ((mixed / 65536 - 0.5) / 8).view_as(p).float()
    model = model.to(torch.bfloat16 if run.dtype == "bf16" else torch.float32)
    if run.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    trained = [p for p in model.train().parameters() if p.requires_grad]
    own = run.optimizer["type"] == "AdamW"
    optimizer = torch.optim.AdamW(trained, **run.optimizer["params"]) if own else None
    chosen = {"optimizer": optimizer} if own else {"model_parameters": trained}
    return deepspeed.initialize(model=model, config=run.config(), **chosen)[0]


def train(engine: Any, *steps: int) -> list[float]:
    """Trains on a batch a step, another on each rank, and returns the losses."""
    import torch

    losses = []
    rank, accumulation = int(os.environ["RANK"]), engine.gradient_accumulation_steps()
    for step in steps:
        for micro in range(accumulation):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            ids = torch.randint(0, 128, (2, 16), generator=generator).to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def weights(engine: Any) -> dict[str, Any]:
    """The weights by name, as the engine's own writer gives them."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        rank = os.environ["RANK"]
        engine.save_16bit_model(f"{folder}/{rank}", "model.safetensors")
        path = Path(folder, rank, "model.safetensors")
        return load_file(path) if path.exists() else {}


def sums(values: dict[str, Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(name.encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def record(run: Run, folder: Path) -> dict[str, Any]:
    """Losses and sums of one run on this rank, uninterrupted and resumed."""
    engine = make_engine(run)
    losses = train(engine, *range(STEPS))
    engine.save_checkpoint(str(folder))
    losses += train(engine, STEPS, STEPS + 1)
    found = {"losses": losses, "weights": sums(weights(engine))}
    engine.destroy()
    return {**found, "resumed": resume(run, folder)}


def resume(run: Run, folder: Path) -> dict[str, Any]:
    """Losses and sums of the two steps after a checkpoint."""
    engine = make_engine(run)
    engine.load_checkpoint(str(folder))
    found = {"losses": train(engine, STEPS, STEPS + 1), "weights": sums(weights(engine))}
    engine.destroy()
    return found


def _prepare_rank(device: str) -> None:
    if device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    else:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import deepspeed
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(device != "cpu", warn_only=True)
    deepspeed.init_distributed("gloo" if device == "cpu" else None, auto_mpi_discovery=False, verbose=False)


def _records_of_a_rank(names: list[str], folder: Path, device: str, saved: Path | None) -> None:
    _prepare_rank(device)
    for name in names:
        try:
            found = record(RUNS[name], folder / name) if saved is None else resume(RUNS[name], saved / name)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        with (folder / f"{os.environ['RANK']}.jsonl").open("a", encoding="utf-8") as rows:
            rows.write(json.dumps({"run": name, **found}) + "\n")


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def start_ranks(arguments: list[str], *, num_ranks: int) -> None:
    """Runs this file with the arguments, on each of the ranks, in processes of their own."""
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, __file__, *arguments]
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.wait()


def record_all(
    names: list[str],
    folder: Path,
    *,
    device: str = "cpu",
    saved: Path | None = None,
    start: Callable[..., Any] = start_ranks,
) -> list[dict[str, Any]]:
    """The rows of all runs. Runs with as many ranks share their processes. `saved`: load the checkpoints in it."""
    rows = []
    for ranks in sorted({RUNS[name].ranks for name in names}):
        place = folder / f"{ranks}_ranks"
        place.mkdir(parents=True)
        chosen = ",".join(name for name in names if RUNS[name].ranks == ranks)
        arguments = ["--rank-of", chosen, "--save", str(place), "--device", device]
        start(arguments + ([] if saved is None else ["--load", str(saved)]), num_ranks=ranks)
        for rank in range(ranks):
            lines = (place / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
            rows += [{"rank": rank, **json.loads(line)} for line in lines]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the rows are written here")
    parser.add_argument("--only", default="", help="runs whose names match this regular expression")
    parser.add_argument("--save", type=Path, help="keep the checkpoints in this new folder")
    parser.add_argument("--load", type=Path, help="begin with the checkpoints in this folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        _records_of_a_rank(args.rank_of.split(","), args.save, args.device, args.load)
        return
    names = [name for name in RUNS if re.search(args.only, name)]
    with tempfile.TemporaryDirectory() as scratch:
        rows = record_all(names, args.save or Path(scratch, "runs"), device=args.device, saved=args.load)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
