"""The grids that ship with the package: the papers' own, the accuracy table's, and those of the curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.grid import Config, Grid, GridError, Method, grid_of_file


def _config(kind: str, *, clipping: float = 0.0, **more: Any) -> Config:
    params = more.pop("params", {})
    return {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clipping,
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": 0},
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # DeepSpeed's waits for the device, twice a step
        **more,
    }


def _zo(*, bf16: bool = False, **stream: Any) -> Config:
    offload = {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}}
    stream = {"writeback_interval": 8, **stream}  # the engine's own choice goes by times, which neighbours change
    config = _config("ZO", params={"zo_eps": 1e-3}, zero_optimization=offload, ds_zo={"stream": stream})
    return {**config, "bf16": {"enabled": True}} if bf16 else config


ADAMW = _config("AdamW", clipping=1.0, params={"torch_adam": True, "weight_decay": 0.0})
"""torch's, because DeepSpeed's own would compile for minutes at its first use."""
LOMO = _config("LOMO", clipping=1.0)
LSP = _config(
    "LSP",
    clipping=1.0,
    params={"subspace_dim": 256, "nonzeros_per_row": 4, "fit_steps": 40, "edge": "lsp"},
    zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
)
"""Of a feed-forward matrix's gradient (SmolLM2-135M) a fit of 40 steps loses 0.55, one of 100 steps 0.50; those of
attention are at the threshold after 15. Fits of up to 100 were most of the 22 s before the first update."""
ZERO_OFFLOAD_ADAMW = _config(
    "AdamW",
    clipping=1.0,
    params={"weight_decay": 0.0},
    zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
)
MEZO = _config("MeZO", params={"zo_eps": 1e-3})
SUPERGLUE_TASKS = ("sst2", "rte", "cb", "boolq", "wsc", "wic", "multirc", "copa")
GLUE_TASKS = ("cola", "mrpc", "qnli", "qqp", "mnli", "sst2", "rte", "stsb")
ON_ONE_GPU = (
    *("--tf32", "--max-length", "128", "--eval-batch-size", "64"),
    *("--group-by-length", "--pad-multiple", "16"),
)
"""For launch/train.py where many small runs share a device: passages and instructions keep their last 128 tokens, and
batches of like lengths spare a quarter of the tokens, which would be padding. Sixteen runs that score whole answers
must lie side by side: 128 of these would have 7 GB of logits and their logarithms in each."""
ZO_STEPS, ZO_BATCH = 1000, 8
"""A direction's noise is what a step suffers from, not the batch's: half of MeZO's 16, and twice the steps a second."""
FIRST_ORDER_STEPS = 120
"""Of 16: two epochs of 1,000 rows. Perplexity on Alpaca turns after one."""

MEZO_PAPER = Grid(
    {
        "zo": Method(_zo(), lrs=(1e-6, 1e-7), steps=20_000, eval_every=4000),
        "zo-lora": Method(
            {**_zo(), "optimizer": {"type": "ZO", "params": {"zo_eps": 1e-2}}},
            lrs=(1e-4, 5e-5),
            steps=20_000,
            eval_every=4000,
            lora_ranks=(8,),
            arguments=("--lora-alpha", "16"),
        ),
        "adamw": Method(ADAMW, lrs=(1e-5, 5e-5, 8e-5), steps=625, batch_size=8, eval_every=125, warmups=(0.0,)),
    },
    tasks=SUPERGLUE_TASKS,
)
"""Malladi et al. (2023), OPT: 1,000 training rows; 20k steps of 16 at a constant rate; AdamW five epochs of 8, linear.
They train most tasks on a softmax over the options, here the loss is the right option's tokens'."""

LOMO_PAPER = Grid(
    {
        "lomo": Method(LOMO, lrs=(5e-2, 3e-2), warmups=(0.05, 0.1, 0.2), steps=625, eval_every=62),
        "lora": Method(ADAMW, lrs=(5e-4,), warmups=(0.05,), lora_ranks=(2,), steps=625, eval_every=62),
        "lora+lomo": Method(
            _config("LOMO", clipping=1.0, params={"adapter": {"lr": 5e-4}}),
            lrs=(5e-3, 1e-3, 5e-4),
            warmups=(0.05, 0.1),
            lora_ranks=(1, 2, 4, 8),
            steps=625,
            eval_every=62,
            arguments=("--train-base",),
        ),
    },
    tasks=("rte", "copa", "boolq", "wsc", "multirc"),
)
"""Lv et al. (2023), Table 4: ten epochs of 1,000 rows, batch 16, linear schedule, gradient norm 1.0, LoRA on q and v
with alpha 16."""

_BOOLQ: dict[str, Any] = {"steps": FIRST_ORDER_STEPS, "eval_every": 20}

LORA_LOMO = Grid(
    {
        "lomo": Method(LOMO, lrs=(5e-2, 3e-2), warmups=(0.1,), **_BOOLQ),
        "lora": Method(ADAMW, lrs=(5e-4,), warmups=(0.05,), lora_ranks=(1, 2, 4, 8), **_BOOLQ),
        "lora+lomo": Method(
            _config("LOMO", clipping=1.0, params={"adapter": {"lr": 5e-4}}),
            lrs=(5e-3, 5e-4),
            warmups=(0.05,),
            lora_ranks=(1, 2, 4, 8),
            arguments=("--train-base",),
            steps=FIRST_ORDER_STEPS,
            eval_every=FIRST_ORDER_STEPS // 2,
        ),
    },
    tasks=("boolq",),
    arguments=ON_ONE_GPU,
)
"""Lv et al. (2023), Figures 3 to 5, cut down to minutes: what LOMO adds to LoRA at each rank (few looks at dev, which
cost more than the steps), and loss and validation accuracy by step of LOMO and LoRA. `python -m benchmarks.pages`
draws both."""


_LORA_LOMO_RUN: dict[str, Any] = {"warmups": (0.05,), "lora_ranks": (1, 2, 4, 8), **_BOOLQ}

LORA_LOMO_RATES = Grid(
    {
        "lora": Method(ADAMW, lrs=(5e-4, 2e-3), **_LORA_LOMO_RUN),
        **{
            f"lora+lomo-{adapter:g}": Method(
                _config("LOMO", clipping=1.0, params={"adapter": {"lr": adapter}}),
                lrs=(5e-3,),
                arguments=("--train-base",),
                **_LORA_LOMO_RUN,
            )
            for adapter in (5e-4, 2e-3)
        },
    },
    tasks=("boolq",),
    seeds=(0, 1),
    arguments=ON_ONE_GPU,
)
"""LoRA + LOMO beside LoRA, two rates of the adapters each, the same ones, two seeds, and as many looks at dev."""


def lsp_glue(width: int) -> Grid:
    """Chen et al. (LSP-Offload), GLUE: d = 512 of RoBERTa's 768, so two thirds of a model's `width`; r = 16, threshold
    0.3, batch 16. GaLore's rank is half of d, which takes about the memory of LSP's states. Two epochs of 1,000 rows;
    `--steps` and `--case-seconds` give each the paper's equal hour."""
    dim = max(16, round(width * 512 / 768))
    lsp = {"subspace_dim": dim, "nonzeros_per_row": 16, "bias_threshold": 0.3}
    shared: dict[str, Any] = {"steps": 126, "eval_every": 63, "arguments": ("--head", "classifier")}
    return Grid(
        {
            "lsp": Method(_config("LSP", clipping=1.0, params=lsp), lrs=(5e-5,), **shared),
            "adamw": Method(ADAMW, lrs=(5e-5,), **shared),
            "galore": Method(_galore(dim // 2), lrs=(5e-5, 4e-4), **shared),
        },
        tasks=GLUE_TASKS,
        seeds=(0, 1, 2),
        arguments=ON_ONE_GPU,
    )


def _galore(rank: int) -> Config:
    """Its projectors and states stay on the device. An update's entries are 0.25 sqrt(rank / shorter side) times
    AdamW's at the same rate, so it takes a higher one."""
    return _config("GaLore", clipping=1.0, params={"rank": rank})


def _lsp(dim: int, **params: Any) -> Config:
    params = {"subspace_dim": dim, "nonzeros_per_row": 4, "edge": "lsp", **params}
    return {**LSP, "optimizer": {"type": "LSP", "params": params}}


_ZO_RUN: dict[str, Any] = {"steps": ZO_STEPS, "batch_size": ZO_BATCH, "eval_every": ZO_STEPS // 2}
_FIRST_ORDER_RUN: dict[str, Any] = {
    "steps": FIRST_ORDER_STEPS,
    "eval_every": FIRST_ORDER_STEPS // 2,
    "warmups": (0.05,),
}

ACCURACY = Grid(
    {
        "zero-shot": Method(ADAMW, steps=0, seeds=(0,)),
        "adamw": Method(ADAMW, lrs=(1e-5, 3e-5, 1e-4, 3e-4), **_FIRST_ORDER_RUN),
        "lora": Method(ADAMW, lrs=(5e-4, 2e-3, 5e-3), lora_ranks=(2,), **_FIRST_ORDER_RUN),
        "mezo": Method(MEZO, lrs=(3e-6,), lr_of="zo", seeds=(0,), **_ZO_RUN),
        "mezo-bf16": Method({**MEZO, "bf16": {"enabled": True}}, lrs=(3e-6,), lr_of="zo", **_ZO_RUN),
        "zo": Method(_zo(), lrs=(3e-6, 1e-5, 3e-5), **_ZO_RUN),
        "zo-bf16": Method(_zo(bf16=True), lrs=(3e-6,), lr_of="zo", **_ZO_RUN),
        "zo-bf16-wire": Method(_zo(bf16=True, master="wire"), lrs=(3e-6,), lr_of="zo", seeds=(0,), **_ZO_RUN),
        "zo-fp8": Method(_zo(bf16=True, wire_dtype="fp8"), lrs=(3e-6,), lr_of="zo", **_ZO_RUN),
        "zo-fp8-wire": Method(
            _zo(bf16=True, wire_dtype="fp8", master="wire"), lrs=(3e-6,), lr_of="zo", seeds=(0,), **_ZO_RUN
        ),
        "sgd": Method(_config("SGD", clipping=1.0), lrs=(3e-2,), lr_of="lomo", **_FIRST_ORDER_RUN),
        "lomo": Method(LOMO, lrs=(1e-2, 3e-2, 1e-1), **_FIRST_ORDER_RUN),
        "adalomo": Method(_config("AdaLOMO", clipping=0.0), lrs=(5e-4, 2e-3), **_FIRST_ORDER_RUN),
        "lsp": Method(LSP, lrs=(3e-5, 1e-4, 3e-4), **_FIRST_ORDER_RUN),
        "lsp-512": Method(_lsp(512), lrs=(3e-5, 1e-4, 2e-4, 3e-4), **_FIRST_ORDER_RUN),
        "lsp-512-dense": Method(_lsp(512, edge="dense"), lrs=(1e-4,), lr_of="lsp-512", **_FIRST_ORDER_RUN),
    },
    tasks=("sst2", "rte", "copa", "boolq", "alpaca"),
    seeds=(0, 1, 2),
    arguments=ON_ONE_GPU,
)
"""The accuracy table: rates are tried on SST-2 and RTE with seed 0, and the best by dev is used everywhere. Sized for
eight minutes of an H200 with SmolLM2-135M, a dozen runs at once, by what fills the device: float32 runs multiply
matrices in TF32, and dev decides between two states a run. What only one seed is needed for has one: zero-shot, the
reference that takes ZO's own steps, and storage without a low plane. `lsp` has d = 256 of SmolLM2's 576, `lsp-512` is
what its papers and ours time, and the last has the tied embedding whole."""

_LSP_VARIANTS: dict[str, dict[str, Any]] = {
    "512-learned": {},
    "512-random": {"projector": "random"},
    "512-r1": {"nonzeros_per_row": 1},
    "512-refit": {"check_interval": 25},
    "512-dense": {"edge": "dense"},
    "512-dense-random": {"edge": "dense", "projector": "random"},
    "512-dense-global": {"edge": "dense", "clip_scope": "global"},
    "512-dense-refit": {"edge": "dense", "check_interval": 25},
    "128-dense": {"subspace_dim": 128, "edge": "dense"},
    "128-dense-random": {"subspace_dim": 128, "edge": "dense", "projector": "random"},
}

_ON_DEVICE: Config = {"zero_optimization": {"stage": 0}}
"""Adam on the device: many runs share the host's cores."""

LSP_GAP = Grid(
    {
        "adamw": Method(ADAMW, lrs=(1e-4,), **_FIRST_ORDER_RUN),
        **{
            f"lsp-{name}": Method({**_lsp(512, **params), **_ON_DEVICE}, lrs=(1e-4,), **_FIRST_ORDER_RUN)
            for name, params in _LSP_VARIANTS.items()
        },
    },
    tasks=("sst2", "rte", "copa", "boolq", "alpaca"),
    seeds=(0, 1, 2),
    arguments=ON_ONE_GPU,
)
"""LSP beside AdamW at AdamW's rate: learned and random projectors, one non-zero a row, fits again every 25 steps, the
tied embedding whole, clipping by the norm of all gradients, and a smaller subspace."""

ACCURACY_SEEDS = replace(
    ACCURACY,
    methods={name: replace(ACCURACY.methods[name], seeds=None) for name in ("mezo", "zo-bf16-wire", "zo-fp8-wire")},
    seeds=(1, 2),
)
"""Their other seeds, where time is left: with `--rates-from` the accuracy table's rows, which these stand beside."""

EQUAL_Z = Grid(
    {
        "mezo": Method(MEZO, lrs=(3e-6,), steps=300, eval_every=100),
        "zo": Method(_zo(), lrs=(3e-6,), steps=300, eval_every=100),
    },
    tasks=("sst2", "copa"),
)
"""ZO beside MeZO with the same noise, products in float32: the same losses all along."""

CURVES = Grid(
    {
        "zo": Method(_zo(), lrs=(1e-5,), steps=10**6, batch_size=ZO_BATCH, eval_every=100),
        "lomo": Method(LOMO, lrs=(5e-2,), steps=10**6, eval_every=20),
        "lsp": Method(_lsp(512), lrs=(5e-5,), steps=10**6, eval_every=20, lr_of="lsp-512"),
        "lsp-dense": Method(_lsp(512, edge="dense"), lrs=(5e-5,), steps=10**6, eval_every=20),
        "zero-offload": Method(ZERO_OFFLOAD_ADAMW, lrs=(5e-5,), steps=10**6, eval_every=20, lr_of="adamw"),
    },
    tasks=("sst2", "alpaca"),
    arguments=ON_ONE_GPU,
)
"""Learning curves at equal time: constant rates, half of what the accuracy table's decaying schedules begin with, which
is their mean, to be ended by `--case-seconds`, one job at a time."""

_BF16: Config = {"bf16": {"enabled": True}}
_OVERLAPPED = {**ZERO_OFFLOAD_ADAMW["zero_optimization"], "overlap_comm": True, "contiguous_gradients": True}
_TIMED: dict[str, Any] = {
    "steps": 200,
    "batch_size": 4,
    "eval_every": 20,
    "warmups": (0.05,),
    "lrs": (2.5e-5, 5e-5, 1e-4),
}

LSP_EQUAL_TIME = Grid(
    {
        "lsp-512": Method({**_lsp(512), **_BF16}, **_TIMED),
        "lsp-512-dense": Method({**_lsp(512, edge="dense"), **_BF16}, **_TIMED),
        "zero-offload": Method({**ZERO_OFFLOAD_ADAMW, **_BF16, "zero_optimization": _OVERLAPPED}, **_TIMED),
    },
    tasks=("alpaca",),
    seeds=(0, 1),
    arguments=("--max-length", "256", "--pad-multiple", "16", "--eval-batch-size", "64"),
)
"""Perplexity against the clock, one job at a time and no other process on the device. Batches are of four texts, as the
paper's. All sides have bf16, clipping by 1.0, the same rates and seeds, and ZeRO-Offload's copies are overlapped."""

QWEN_STEPS, QWEN_ZO_STEPS = 60, 300
_ON_QWEN: dict[str, Any] = {"steps": QWEN_STEPS, "eval_every": QWEN_STEPS // 2, "warmups": (0.05,)}
_ZO_ON_QWEN: dict[str, Any] = {"steps": QWEN_ZO_STEPS, "batch_size": ZO_BATCH, "eval_every": QWEN_ZO_STEPS // 2}
_LSP_SHIPPED = {**LSP, **_BF16, "optimizer": {"type": "LSP", "params": {"subspace_dim": 512, "edge": "dense"}}}
_ZO_RESIDENT = _config("ZO", params={"zo_eps": 1e-3}, **_BF16)

QWEN = Grid(
    {
        "zero-shot": Method(
            _config("MeZO", params={"lr": 0.0, "zo_eps": 1e-3}, **_BF16), steps=0, seeds=(0,), device_gb=10
        ),
        "adamw": Method({**ADAMW, **_BF16}, lrs=(1e-5, 3e-5), device_gb=40, **_ON_QWEN),
        "lora": Method({**ADAMW, **_BF16}, lrs=(2e-4, 6e-4), lora_ranks=(2,), device_gb=14, **_ON_QWEN),
        "lomo": Method({**LOMO, **_BF16}, lrs=(3e-2, 1e-1), device_gb=14, **_ON_QWEN),
        "adalomo": Method({**_config("AdaLOMO"), **_BF16}, lrs=(1.5e-4, 5e-4), device_gb=14, **_ON_QWEN),
        "lsp": Method(_LSP_SHIPPED, lrs=(1e-5, 3e-5), device_gb=22, **_ON_QWEN),
        "zo": Method(_ZO_RESIDENT, lrs=(1e-6, 3e-6), device_gb=14, **_ZO_ON_QWEN),
        "mezo": Method({**MEZO, **_BF16}, lrs=(1e-6,), lr_of="zo", device_gb=18, **_ZO_ON_QWEN),
    },
    tasks=("sst2", "rte", "alpaca"),
    seeds=(0, 1),
    arguments=("--max-length", "128", "--eval-batch-size", "32", "--group-by-length", "--pad-multiple", "16"),
)
"""Qwen2.5-Coder-1.5B in bf16 as the shipped JSONs train it, all weights on the device, sized for about eight minutes of
an H200. The rates come from those that SmolLM2's rows chose. AdamW, LoRA and ZO try a third and a tenth of theirs, for
eleven times as many parameters. LSP tries AdamW's. LOMO and AdaLOMO try the chosen rate and a third: clipping fixes the
norm of LOMO's step, and AdaLOMO's step is relative to the weights. One epoch of 1,000 rows; ZO and MeZO 300 steps of
eight."""

_ADAPTER_BF16: Config = {
    **_config("AdamW", clipping=1.0, params={"weight_decay": 0.0}),
    **_BF16,
    "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}},
    "ds_zo": {"backend": "adapter"},
}
_ADAPTER_NF4: Config = {**_ADAPTER_BF16, "ds_zo": {"backend": "adapter", "stream": {"frozen_dtype": "nf4"}}}
_LORA_RUN: dict[str, Any] = {
    "lora_ranks": (16,),
    "arguments": ("--lora-targets", "all-linear"),
    **_FIRST_ORDER_RUN,
}
_ZO_LORA_RUN: dict[str, Any] = {**_ZO_RUN, "lrs": (3e-4, 1e-3, 3e-3), "lora_ranks": (8,)}


def _zo_lora(**stream: Any) -> Config:
    return {**_zo(bf16=True, **stream), "optimizer": {"type": "ZO", "params": {"zo_eps": 1e-2}}}


NF4 = Grid(
    {
        "lora": Method(_ADAPTER_BF16, lrs=(1e-3,), **_LORA_RUN),
        "lora-nf4": Method(_ADAPTER_NF4, lrs=(1e-3,), lr_of="lora", **_LORA_RUN),
        "zo-lora": Method(_zo_lora(), **_ZO_LORA_RUN),
        "zo-lora-nf4": Method(_zo_lora(frozen_dtype="nf4"), lr_of="zo-lora", **_ZO_LORA_RUN),
    },
    tasks=("sst2", "alpaca"),
    seeds=(0, 1, 2),
    arguments=ON_ONE_GPU,
)
"""Adapters over a base in NF4 beside adapters over the same base in bf16, with equal steps, seeds and rates: LoRA by
AdamW (backend `adapter`), and LoRA by ZO. ZO chooses its rate over the bf16 base on SST-2 with seed 0
(`--choose-rates --tasks sst2`)."""

_ON_CODE: dict[str, Any] = {"steps": 150, "batch_size": 8, "eval_every": 150, "warmups": (0.05,)}

QWEN_CODE = Grid(
    {
        "zero-shot": replace(QWEN.methods["zero-shot"], device_gb=24),
        "adamw": replace(QWEN.methods["adamw"], lrs=(1e-5,), device_gb=44, **_ON_CODE),
        "lora": replace(QWEN.methods["lora"], lrs=(2e-4,), device_gb=24, **_ON_CODE),
        "lsp": replace(QWEN.methods["lsp"], lrs=(1e-5,), device_gb=30, **_ON_CODE),
        "zero-offload": Method(
            {**ZERO_OFFLOAD_ADAMW, **_BF16, "zero_optimization": _OVERLAPPED},
            lrs=(1e-5,),
            lr_of="adamw",
            device_gb=24,
            **{**_ON_CODE, "steps": 90},
        ),
    },
    tasks=("humaneval",),
    seeds=(0, 1),
    arguments=("--max-length", "512", "--eval-batch-size", "24", "--group-by-length", "--pad-multiple", "16"),
)
"""The LSP paper's table of code: training on functions of installed packages, then HumanEval. Rates are those that grid
`qwen` chose (`--rates-from`). LSP and ZeRO-Offload run one at a time (`--jobs 1`); ZeRO-Offload's 90 steps are about as
many as fit the time of LSP's 150, and `--case-seconds` ends them at LSP's time (`train_s` of its rows)."""


def _members(num_members: int, *, zo_eps: float = 3e-3, **params: Any) -> Config:
    noise = {"noise": "rank1", "num_members": num_members, "zo_eps": zo_eps, **params}
    return _config("ZO", params=noise, bf16={"enabled": True}, ds_zo={"stream": {"master": "split"}})


_SCALED: Config = {"antithetic": False, "shaping": "zscore"}
_BY_ACCURACY = ("--objective", "accuracy")
MEMBERS = Grid(
    {
        "8-each": Method(_members(1024, **_SCALED), lrs=(3.5e-5, 7e-5, 1.4e-4, 2.8e-4), steps=120, batch_size=128),
        "16-of-16": Method(_members(16), lrs=(3e-5, 6e-5, 1.2e-4, 2.4e-4), steps=300, batch_size=256),
        "32-of-8-by-accuracy": Method(
            _members(32, zo_eps=1e-2, shaping="zscore"),
            lrs=(3e-5, 6e-5, 1.2e-4, 2.4e-4),
            steps=250,
            batch_size=256,
            arguments=_BY_ACCURACY,
        ),
        "8-each-by-accuracy": Method(
            _members(1024, zo_eps=1e-2, **_SCALED),
            lrs=(1e-4, 3e-4, 1e-3),
            steps=110,
            batch_size=128,
            arguments=_BY_ACCURACY,
        ),
    },
    tasks=("sst2",),
    seeds=(0, 1, 2),
    arguments=("--max-length", "128", "--group-by-length", "--pad-multiple", "16", "--eval-batch-size", "128"),
)
"""Members of rank-1 noise on SmolLM2-135M within 8 s, by loss and by accuracy alone. A rate decays over `steps`."""

SMOKE = Grid(
    {
        "zero-shot": Method(ADAMW, steps=0, seeds=(0,)),
        "adamw": Method(ADAMW, lrs=(1e-3,), steps=8, batch_size=4, eval_every=4, warmups=(0.25,)),
        "lora": Method(ADAMW, lrs=(1e-2,), steps=4, batch_size=4, eval_every=4, lora_ranks=(2,)),
        "mezo": Method(MEZO, lrs=(1e-4,), steps=4, batch_size=4, eval_every=4, lr_of="zo"),
        "zo": Method(_zo(), lrs=(1e-4, 1e-3), steps=4, batch_size=4, eval_every=4),
        "lomo": Method(LOMO, lrs=(1e-2,), steps=4, batch_size=4, eval_every=4, warmups=(0.25,)),
    },
    tasks=("code_or_text",),
)
"""A few steps of each with the embedded model: does everything run here?"""

PROBE = Grid(
    {
        f"{name}/{key}": replace(
            method,
            lrs=method.lrs[:1],
            lora_ranks=method.lora_ranks[:1],
            warmups=method.warmups[:1],
            steps=min(method.steps, 8),
            eval_every=4,
            lr_of=None,
            seeds=None,
        )
        for name, methods in {
            "accuracy": ACCURACY.methods,
            "lora-lomo": {"lora+lomo": LORA_LOMO.methods["lora+lomo"]},
            "lsp-glue": lsp_glue(576).methods,
            "curves": {"zero-offload": CURVES.methods["zero-offload"]},
        }.items()
        for key, method in methods.items()
    },
    tasks=("sst2",),
    arguments=(*ON_ONE_GPU, "--num-eval", "8"),
)
"""Every way to train that the grids of many runs have, for a few steps: what can't run shows before they begin, and
kernels are built once."""

GRIDS: dict[str, Grid] = {
    "accuracy": ACCURACY,
    "accuracy-seeds": ACCURACY_SEEDS,
    "lsp-gap": LSP_GAP,
    "mezo": MEZO_PAPER,
    "lomo": LOMO_PAPER,
    "lora-lomo": LORA_LOMO,
    "lora-lomo-rates": LORA_LOMO_RATES,
    "lsp-glue": lsp_glue(576),
    "equal-z": EQUAL_Z,
    "curves": CURVES,
    "lsp-equal-time": LSP_EQUAL_TIME,
    "qwen": QWEN,
    "qwen-code": QWEN_CODE,
    "nf4": NF4,
    "members": MEMBERS,
    "smoke": SMOKE,
    "probe": PROBE,
}


def read_grid(name: str) -> Grid:
    """A grid that ships with the package, or a JSON file."""
    if name in GRIDS:
        return GRIDS[name]
    if not Path(name).is_file():
        raise GridError(f"looked for a grid named {name!r} or a file of that name: the grids are {', '.join(GRIDS)}")
    return grid_of_file(Path(name))
