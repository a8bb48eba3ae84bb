"""The support matrix: trains every model family under every backend, streamed and resident, on one rank and on two.

    python -m tests.helpers.support_matrix                 # trains every case on the CPU, writes its rows and the page
    python -m tests.helpers.support_matrix --device gpu    # the same on this machine's GPU
    python -m tests.helpers.support_matrix --render        # writes docs/support.md from the rows, trains nothing

The page is made from rows, and a row is made by a run. tests/pages/test_support.py trains every case on the CPU again
and compares the outcomes with the rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_zo import ConfigError
from ds_zo.records.environment import commit, versions
from tests.helpers import families
from tests.helpers.equivalence_runs import on_device
from tests.helpers.lomo_runs import config_for, lively, start, weights_of
from tests.helpers.lsp_runs import lsp_json
from tests.helpers.ranks import job
from tests.helpers.tiny_models import tiny_batch
from tests.helpers.zoo import CASES, Case

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "support.md"
ROWS = {device: REPO / "benchmarks" / "results" / f"{device}_support.jsonl" for device in ("cpu", "gpu")}

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral (mixture of experts)",
    "mixtral-router-loss": "Mixtral with `output_router_logits`",
    "qwen2": "Qwen2",
    "opt": "OPT",
    "opt-350m": "OPT-350M (projected embedding)",
    "gpt2": "GPT-2",
    "gpt-neox": "GPT-NeoX, Pythia",
    "bloom": "BLOOM",
    "roberta": "RoBERTa (classification head)",
    "t5": "T5 (encoder and decoder)",
    "qwen3": "Qwen3",
    "gemma3": "Gemma 3",
    "phi3": "Phi-3, Phi-4",
    "qwen3-moe": "Qwen3-MoE",
    "gpt-oss": "gpt-oss (mixture of experts)",
    "qwen2-vl": "Qwen2-VL (images and text)",
    "llava": "LLaVA (images and text)",
}
"""The names that the page shows."""
BACKENDS = ("ZO", "LOMO", "AdaLOMO", "LSP", "Adapter")
PLACEMENTS = ("resident", "streamed")
RANKS = (1, 2)
NUM_STEPS = 3
WEIGHT_ATOL = 1e-6
LOSS_RTOL = 1e-3
TRAINS, REFUSED = "trains", "refused"

Cell = tuple[str, str, str, int]
"""Family, backend, placement, number of ranks."""
CELLS: list[Cell] = list(itertools.product(FAMILIES, BACKENDS, PLACEMENTS, RANKS))


# Runs


def case_of(family: str) -> Case:
    """The model and the batches of `zoo.CASES` or `families`. The Mixtral of `zoo` has the router's loss."""
    if family in (*families.TEXT, *families.VISION):
        return families.case(family)
    if family == "mixtral":
        return Case(partial(lively, family), lambda seed: tiny_batch(family, seed=seed, batch_size=2, length=8))
    return CASES["mixtral" if family == "mixtral-router-loss" else family]


def with_lora(model: nn.Module) -> nn.Module:
    """The model with LoRA on all linear layers. The base is frozen."""
    import peft

    torch.manual_seed(0)
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    return adapted.train()


def config_of(backend: str, placement: str) -> dict[str, Any]:
    config = lsp_json(lr=1e-3) if backend == "LSP" else config_for(backend, lr=1e-3)
    section: dict[str, Any] = {}
    if backend == "Adapter":
        config["optimizer"]["type"] = "AdamW"
        section["backend"] = "adapter"
    place = {"stage": 0, **config.get("zero_optimization", {})}
    if placement == "streamed":
        place["offload_param"] = {"device": "cpu"}
        interval = {"writeback_interval": 2} if backend == "ZO" else {}
        section["stream"] = {"resident_blocks": 0, **interval}
    return {**config, "zero_optimization": place, "ds_zo": section, "steps_per_print": 1000}


def uploaded_bytes(backend: Any) -> int:
    """Bytes of blocks that were copied from the host to the device. 0 if no block is streamed."""
    store = backend.store.blocks if hasattr(backend, "store") else backend.blocks.store
    return 0 if store is None else store.runtime.transport.bytes_up


def train_case(rank: int, family: str, backend: str, placement: str) -> dict[str, Any]:
    """Trains one model for NUM_STEPS steps in a process group that exists. Returns losses and weights, or the message
    of a refusal."""
    case = case_of(family)
    model = with_lora(case.make()) if backend == "Adapter" else case.make()
    before = {name: value for name, value in weights_of(model).items() if model.get_parameter(name).requires_grad}
    try:
        engine = start(config_of(backend, placement), model, model_parameters=list(model.parameters()))
    except ConfigError as error:
        return {"refused": str(error)}
    losses = []
    for step in range(NUM_STEPS):
        loss = engine(**on_device(engine, case.batch(10 * step + rank))).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = engine.module.state_dict()
    after = {name: state[name].detach().to("cpu", copy=True) for name in before}
    uploaded = uploaded_bytes(engine.backend)
    engine.destroy()
    num_moved = sum(not torch.equal(before[name], after[name]) for name in before)
    return {"losses": losses, "weights": after, "moved": num_moved / len(before), "uploaded_bytes": uploaded}


def train_all(rank: int) -> dict[Any, dict[str, Any]]:
    """Runs in every rank of a job."""
    return {case: train_case(rank, *case) for case in itertools.product(FAMILIES, BACKENDS, PLACEMENTS)}


def are_equal(a: dict[str, Any], b: dict[str, Any], *, atol: float = 0.0) -> bool:
    return all(torch.allclose(a["weights"][name], b["weights"][name], rtol=0, atol=atol) for name in a["weights"])


def fault_of(found: dict[str, Any], resident: dict[str, Any], *, is_streamed: bool, on_cpu: bool) -> str | None:
    """Why a run does not count as training. None if it counts.

    Streamed weights must be the resident ones within WEIGHT_ATOL on a CPU. GPU kernels add in any order, and Adam
    enlarges what this changes; there the losses must agree within LOSS_RTOL.
    """
    if not all(map(math.isfinite, found["losses"])):
        return f"losses {found['losses']}"
    if found["moved"] < 0.9:  # biases of keys and experts without a token have no gradient
        return f"only {found['moved']:.0%} of the weights changed"
    if (found["uploaded_bytes"] > 0) != is_streamed:
        return f"{found['uploaded_bytes']} bytes were uploaded"
    if on_cpu and not are_equal(found, resident, atol=WEIGHT_ATOL):
        return "streamed and resident weights differ"
    pairs = zip(found["losses"], resident["losses"], strict=True)
    if not all(math.isclose(a, b, rel_tol=LOSS_RTOL) for a, b in pairs):
        return "streamed and resident losses differ"
    return None


def outcomes(*, on_cpu: bool = True) -> dict[Cell, str]:
    """Trains all cells. The value is `TRAINS`, `REFUSED` or what went wrong."""
    found: dict[Cell, str] = {}
    for num_ranks in RANKS:
        ranks = job(train_all, num_ranks, timeout_s=600, wait=300)
        for case, mine in ranks[0].items():
            family, backend, placement = case
            cell = (family, backend, placement, num_ranks)
            if any("refused" in rank[case] for rank in ranks):
                found[cell] = REFUSED
            elif not all(are_equal(rank[case], mine) for rank in ranks):
                found[cell] = "the ranks' weights differ"
            else:
                resident = ranks[0][family, backend, "resident"]
                fault = fault_of(mine, resident, is_streamed=placement == "streamed", on_cpu=on_cpu)
                found[cell] = fault or TRAINS
    return found


# Rows and the page


def read_rows() -> dict[str, dict[Cell, str]]:
    """Outcomes by device. A device without a file of rows is left out."""
    found: dict[str, dict[Cell, str]] = {}
    for device, file in ROWS.items():
        if file.is_file():
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            found[device] = {(r["family"], r["backend"], r["placement"], r["ranks"]): r["outcome"] for r in rows}
    return found


def write_rows(device: str, found: Mapping[Cell, str]) -> None:
    about = {
        "device": torch.cuda.get_device_name() if device == "gpu" else "cpu",
        "commit": commit(),
        "versions": versions(),
    }
    keys = ("family", "backend", "placement", "ranks")
    rows = [{**dict(zip(keys, cell, strict=True)), "outcome": outcome, **about} for cell, outcome in found.items()]
    ROWS[device].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def status(cell: Cell, rows: Mapping[str, Mapping[Cell, str]]) -> str:
    """The words of the page for one cell."""
    by_device = {device.upper(): outcomes[cell] for device, outcomes in rows.items() if cell in outcomes}
    trained = [device for device, outcome in by_device.items() if outcome == TRAINS]
    refused = [device for device, outcome in by_device.items() if outcome == REFUSED]
    failed = [device for device in by_device if device not in trained and device not in refused]
    if failed:
        return f"fails on {' and '.join(failed)}"
    if refused:
        return "refused" if not trained else f"refused on {' and '.join(refused)}"
    return f"tested on {' and '.join(trained)}" if trained else "untested"


BEGIN = "<!-- matrix: written by `python -m tests.helpers.support_matrix --render`, not by hand -->"
END = "<!-- end of matrix -->"


def page(rows: Mapping[str, Mapping[Cell, str]], text: str) -> str:
    """The page `text` with the table between its markers made from the rows."""
    lines = [f"| family | {' | '.join(BACKENDS)} |", f"|{' --- |' * (len(BACKENDS) + 1)}"]
    lines += [
        f"| {title} | {' | '.join(_in_words(family, backend, rows) for backend in BACKENDS)} |"
        for family, title in FAMILIES.items()
    ]
    files = ", ".join(f"`{ROWS[device].name}`" for device in rows)
    made = "\n".join([*lines, "", f"Rows: {files} in `benchmarks/results`."])
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}"


def _in_words(family: str, backend: str, rows: Mapping[str, Mapping[Cell, str]]) -> str:
    """The status that most of the four cells have, and each cell that differs."""
    places = list(itertools.product(PLACEMENTS, RANKS))
    found = {(place, ranks): status((family, backend, place, ranks), rows) for place, ranks in places}
    usual = max(found.values(), key=list(found.values()).count)
    names = {cell: f"{cell[0]} on {'one rank' if cell[1] == 1 else 'two ranks'}" for cell in places}
    if found["streamed", 1] == found["streamed", 2] != usual:
        return f"{usual}; streamed: {found['streamed', 1]}"
    return "; ".join([usual, *(f"{names[cell]}: {words}" for cell, words in found.items() if words != usual)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(ROWS), default="cpu")
    parser.add_argument("--render", action="store_true", help="write the page from the rows and train nothing")
    args = parser.parse_args()
    if not args.render:
        on_cpu = args.device == "cpu"
        assert on_cpu or torch.cuda.is_available(), "--device gpu needs a CUDA device, and torch sees none"
        if on_cpu:
            os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")  # for the ranks, which are not started yet
        found = outcomes(on_cpu=on_cpu)
        write_rows(args.device, found)
        faults = {cell: text for cell, text in found.items() if text not in (TRAINS, REFUSED)}
        print("\n".join(f"{cell}: {text}" for cell, text in faults.items()) or f"{len(found)} cells, no fault")
    PAGE.write_text(page(read_rows(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    from tests.helpers import support_matrix  # ranks import this file by that name

    support_matrix.main()
