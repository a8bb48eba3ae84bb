"""Trains every mixture of experts of the installed transformers, and eight vision-language models, beside plain loops.

    python -m tests.helpers.support_sweep             # trains every model on the CPU, writes its rows and the page
    python -m tests.helpers.support_sweep --render    # writes docs/support.md from the rows, trains nothing

A streamed run by LOMO must give the bits of plain SGD, and one by LoRA those of AdamW. With an encoder and a decoder it
may be the bits of a plain loop that adds gradients as streamed blocks do: see `families.summed_by_block`.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo import ConfigError
from ds_zo.records.environment import commit, versions
from tests.helpers import families
from tests.helpers.lomo_runs import start, train, train_plain, weights_of
from tests.helpers.moe_configs import moe_configs
from tests.helpers.ranks import run_job
from tests.helpers.support_matrix import PAGE, ROWS, uploaded_bytes
from tests.helpers.weights import Weights

FILE = ROWS["cpu"].with_name("cpu_model_kinds.jsonl")
METHODS = {"LOMO": "LOMO as SGD", "LoRA": "LoRA by AdamW", "experts": "LoRA on weights of experts"}
"""And their columns on the page."""
RATES = {"LOMO": 0.05, "LoRA": 0.01, "experts": 0.01}
EQUAL, BY_BLOCK = "equal bit for bit", "equal bit for bit, gradients added by block"
NUM_STEPS = 3
Cell = tuple[str, str]
"""Kind of model and method."""
Found = dict[str, Any]
"""The entry `outcome` of a row, and its measurements."""
Run = tuple[list[float], Weights]
"""Losses of each step, and the weights after the last one."""


def model_of(kind: str, method: str) -> nn.Module | None:
    """None if the model has no weight that holds all experts of a layer."""
    import peft

    model = families.case(kind).make()
    model.config.use_cache = False  # a cache of linear attention alone refuses a length
    if method == "LOMO":
        return model
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    targets: dict[str, Any] = {"target_modules": [n for n in linear if not n.endswith(("out_proj", "lm_head"))]}
    if method == "experts":
        experts = [name for name, p in model.named_parameters() if p.ndim == 3 and "expert" in name]
        if not experts:
            return None
        targets = {"target_modules": [], "target_parameters": experts}
    torch.manual_seed(0)
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
    return adapted.train()


def config_of(method: str) -> dict[str, Any]:
    by_lomo = method == "LOMO"
    params = {"lr": RATES[method], **({} if by_lomo else {"weight_decay": 0.0, "torch_adam": True})}
    section = {"stream": {"resident_blocks": 0}, **({} if by_lomo else {"backend": "adapter"})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "LOMO" if by_lomo else "AdamW", "params": params},
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}, "ds_zo": section},
        "steps_per_print": 1000,
    }


def plain_run(model: nn.Module, method: str, data: list[Any]) -> Run:
    trained = [p for p in model.parameters() if p.requires_grad]
    make = torch.optim.SGD if method == "LOMO" else torch.optim.AdamW
    torch.manual_seed(1)  # of dropout, and of noise on routers
    losses, _ = train_plain(model, data, make(trained, lr=RATES[method], weight_decay=0.0))
    return losses, weights_of(model)


def with_rounding_errors(model: nn.Module) -> nn.Module:
    """The same model. A rounding error of float32 is added to each weight, or subtracted from it."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 6e-8 * (2 * torch.randint(2, p.shape, generator=draw) - 1))
    return model


def difference(a: Weights, b: Weights) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def outcome(kind: str, method: str) -> Found | None:
    """How a streamed run compares with a plain loop. None if the method does not apply."""
    make = partial(model_of, kind, method)
    model = make()
    if model is None:
        return None
    data = [families.case(kind).batch(seed) for seed in range(NUM_STEPS)]
    trained = [p for p in model.parameters() if p.requires_grad]
    before = weights_of(model)
    losses, weights = plain_run(make(), method, data)
    if sum(not torch.equal(before[name], weights[name]) for name in before) < len(trained) / 2:
        return {"outcome": "the plain loop changed few weights"}
    try:
        engine = start(config_of(method), model, model_parameters=trained)
    except ConfigError as error:
        return {"outcome": f"refused: {error}"}
    try:
        torch.manual_seed(1)
        streamed_losses = train(engine, data)
        state = engine.module.state_dict()
        streamed = {name: state[name] for name in weights}
        if not uploaded_bytes(engine.backend):
            return {"outcome": "nothing was streamed"}
    finally:
        engine.destroy()
    differ_by = difference(streamed, weights)
    if streamed_losses == losses and not differ_by:
        return {"outcome": EQUAL}
    if model.config.is_encoder_decoder:
        losses, summed = plain_run(families.summed_by_block(make()), method, data)
        if streamed_losses == losses and not difference(streamed, summed):
            _, rounded = plain_run(with_rounding_errors(make()), method, data)
            return {"outcome": BY_BLOCK, "differ_by": differ_by, "rounding_moves": difference(rounded, weights)}
    return {"outcome": f"weights differ by {differ_by:.1e}"}


def train_all(rank: int, kinds: list[str]) -> dict[Cell, Found | None]:
    """Runs in the rank of a job."""
    found: dict[Cell, Found | None] = {}
    for kind in kinds:
        for method in METHODS:
            try:
                found[kind, method] = outcome(kind, method)
            except Exception as error:
                found[kind, method] = {"outcome": f"{type(error).__name__}: {error}"}
    return found


def outcomes(kinds: Iterable[str]) -> dict[Cell, Found]:
    [found] = run_job(train_all, 1, list(kinds), timeout_s=900, wait=300)
    assert isinstance(found, dict), found
    return {cell: of_cell for cell, of_cell in found.items() if of_cell is not None}


# Rows and the page


def read_rows() -> dict[Cell, Found]:
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return {(row["kind"], row["method"]): row for row in rows}


def write_rows(found: dict[Cell, Found]) -> None:
    about = {"device": "cpu", "commit": commit(), "versions": versions()}
    rows = [{"kind": kind, "method": method, **of_cell, **about} for (kind, method), of_cell in found.items()]
    FILE.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


BEGIN = "<!-- kinds: written by `python -m tests.helpers.support_sweep --render`, not by hand -->"
END = "<!-- end of kinds -->"
NOTE = (
    "Gradients added by block: {names}, whose blocks share the encoder's output ([Exactness](exactness.md)). The usual "
    "order gives weights that differ by up to {differ_by:.1e} after three steps. One rounding error in each first "
    "weight changes them by up to {moves:.1e}."
)


def page(rows: dict[Cell, Found], text: str) -> str:
    """The page `text` with the part between its markers made from the rows."""
    kinds = list(dict.fromkeys(kind for kind, _ in rows))
    vision = [kind for kind in kinds if kind in families.VISION]
    groups = {"mixtures of experts": [kind for kind in kinds if kind not in vision], "vision-language models": vision}
    lines = [f"| models | {' | '.join(METHODS.values())} |", f"|{' --- |' * (len(METHODS) + 1)}"]
    for title, members in groups.items():
        counts = (
            Counter(rows[kind, method]["outcome"] for kind in members if (kind, method) in rows) for method in METHODS
        )
        cells = ["; ".join(f"{number} {words}" for words, number in count.most_common()) for count in counts]
        lines.append(f"| {len(members)} {title} | {' | '.join(cell or 'do not apply' for cell in cells)} |")
    by_block = {cell: row for cell, row in rows.items() if row["outcome"] == BY_BLOCK}
    if by_block:
        note = NOTE.format(
            names=" and ".join(sorted({f"`{kind}`" for kind, _ in by_block})),
            differ_by=max(row["differ_by"] for row in by_block.values()),
            moves=max(row["rounding_moves"] for row in by_block.values()),
        )
        lines += ["", *textwrap.wrap(note, 118)]
    lines += ["", f"Rows: `{FILE.name}` in `benchmarks/results`.", ""]
    lines += ['<details markdown="1">', "<summary>The models, by their type in transformers</summary>", ""]
    for title, members in groups.items():
        words = f"{title}: {', '.join(f'`{kind}`' for kind in members)}."
        lines += textwrap.wrap(words, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    made = "\n".join([*lines, "", "</details>"])
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="write the page from the rows and train nothing")
    if not parser.parse_args().render:
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")  # for the rank, which is not started yet
        found = outcomes([*moe_configs(), *families.VISION])
        write_rows(found)
        faults = {cell: row["outcome"] for cell, row in found.items() if row["outcome"] not in (EQUAL, BY_BLOCK)}
        print("\n".join(f"{cell}: {words}" for cell, words in faults.items()) or f"{len(found)} runs, no fault")
    PAGE.write_text(page(read_rows(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    from tests.helpers import support_sweep  # the rank imports this file by that name

    support_sweep.main()
