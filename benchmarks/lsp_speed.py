"""LSP beside AdamW on the GPU, ZeRO-Offload, ZenFlow and the ceiling of forward and backward alone.

python -m benchmarks.lsp_speed run --preset issue --total-s 550 --out rows.jsonl
python -m benchmarks.lsp_speed run --preset speed --only 1.3b/4 --out rows.jsonl
python -m benchmarks.lsp_speed run --preset breakdown --out rows.jsonl
python -m benchmarks.lsp_speed run --preset schedule --total-s 300 --out rows.jsonl
python -m benchmarks.lsp_speed run --preset hosts --out rows.jsonl
python -m benchmarks.lsp_speed run --preset figure5 --total-s 550 --out rows.jsonl
python -m benchmarks.lsp_speed report rows.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks import presets
from benchmarks.lsp_cases import LSPCase
from benchmarks.report import report
from ds_zo.bench.runner import WARM, Case

TINY = {**presets.TINY, "num_hidden_layers": 2}

_CASES = "benchmarks.lsp_cases"
_SPEED = f"{_CASES}:speed"
_WARM = (*WARM, _CASES)

BATCHES = (4, 1)

Contenders = dict[str, tuple[str, Mapping[str, Any]]]
"""Case name: method, and what it changes of the optimizer's parameters."""


def _lsp(dim: int, **params: Any) -> tuple[str, Mapping[str, Any]]:
    """Random projectors: fitted ones cost the same a step; what a fit costs is a case of its own."""
    return "lsp", {"subspace_dim": dim, "projector": "random", **params}


CONTENDERS: Contenders = {
    "ceiling": ("forward_backward", {}),
    "adamw": ("adamw", {}),
    "adamw-torch": ("adamw-torch", {}),
    "lsp-256": _lsp(256),
    "lsp-512": _lsp(512),
    "lsp-1024": _lsp(1024),
    "lsp-none": ("lsp", {"projector": "none"}),
    "zero2-offload": ("zero2-offload", {}),
    "zenflow": ("zenflow", {}),
}


COMPILED: Contenders = {f"{name}-compiled": CONTENDERS[name] for name in ("ceiling", "adamw", "lsp-512")}
"""With compiled blocks, which anybody may have."""


def _cases(shape: str, batch: int, contenders: Contenders, *, prefix: str = "", **more: Any) -> list[Case]:
    cases = []
    for name, (method, params) in contenders.items():
        slow = method in ("zero2-offload", "zenflow") or params.get("projector") == "none"
        case = LSPCase(f"llama-{shape}", method, batch=batch, params=params, **{"length": 1024, **more})
        host_gb = {"1.3b": 45.0, "3b": 100.0}.get(shape, 60.0) if slow else 12.0
        host_gb += 16.0 if case.stream is not None else 0.0
        timeout_s = 240 if slow or case.compiled else 120
        cases.append(
            case.to_run(f"{prefix}{shape}/{batch}/{name}", _SPEED, timeout_s=timeout_s, planned_host_gb=host_gb)
        )
    return cases


def speed_cases() -> list[Case]:
    """One run for every ratio of a shape and batch size."""
    cases = []
    for shape in ("1.3b", "3b"):
        for batch in (4, 1):
            cases += _cases(shape, batch, CONTENDERS)
            if shape == "1.3b":
                cases += _cases(shape, batch, COMPILED, compiled=True)
    return cases


def breakdown_cases() -> list[Case]:
    names = ("ceiling", "lsp-512", "lsp-none", "zero2-offload")
    chosen = {name: CONTENDERS[name] for name in names}
    ceiling, *_ = _cases("1.3b", 4, chosen, prefix="breakdown/")
    _, *taken_apart = _cases("1.3b", 4, chosen, prefix="breakdown/", take_apart=True)
    return [ceiling, *(replace(case, timeout_s=300, planned_host_gb=45.0) for case in taken_apart)]


def ablation_cases() -> list[Case]:
    """What each choice is worth, at d = 512."""
    contenders = {
        "lsp-512": _lsp(512),
        "sync": _lsp(512, schedule="sync"),
        "clip-global": _lsp(512, clip_scope="global"),
        "freeze-edge": _lsp(512, edge="freeze"),
    }
    fit = _cases("1.3b", 4, {"fit": ("lsp", {"subspace_dim": 512})}, prefix="ablation/")
    return [*_cases("1.3b", 4, contenders, prefix="ablation/"), *fit]


def capped_cases() -> list[Case]:
    """The paper's laptop and workstation cards: 1.3B at 1 x 384 within 4 GB, 6.7B at 4 x 1024 within 24 GB; the latter
    with weights on the host within 8."""
    small = _cases("1.3b", 1, {"lsp-512": _lsp(512)}, prefix="capped/", cap_gb=4, length=384)
    large = _cases("7b", 4, {"lsp-512": _lsp(512)}, prefix="capped/", cap_gb=24)
    within_8 = {"cap_gb": 8, "stream": {"device_memory_gb": 8}}
    streamed = _cases("7b", 4, {"lsp-512-streamed": _lsp(512)}, prefix="capped/", **within_8)
    return [*small, *large, *streamed]


_SCHEDULES: dict[str, tuple[str, ...]] = {
    "lsp-512": (),
    "late-uploads": ("early uploads",),
    "first-come": ("last first",),
    "late-first-come": ("early uploads", "last first"),
}


def schedule_cases() -> list[Case]:
    """What the parts of Algorithm 3 are worth at four sequences a step and at one, on the machine's link and on one of
    10 GB/s."""
    cases = [_schedule_case("ceiling", None, ())]
    for link in (None, 10.0):
        cases += [_schedule_case(name, link, without) for name, without in _SCHEDULES.items()]
    return cases


def _schedule_case(name: str, link: float | None, without: tuple[str, ...]) -> Case:
    method, params = CONTENDERS["ceiling" if name == "ceiling" else "lsp-512"]
    batches: dict[str, Any] = {"batch": BATCHES[0], "then_batch": BATCHES[1], "length": 1024, "max_s": 5.0}
    case = LSPCase("llama-1.3b", method, params=params, links_gbps=(link,), without=without, **batches)
    name = name if link is None else f"{name}-{link:g}gbps"
    return case.to_run(f"schedule/1.3b/4+1/{name}", _SPEED, timeout_s=90, planned_host_gb=12.0)


def host_cases() -> list[Case]:
    """LSP with Adam on either side beside torch's fused AdamW, also on two cores. The launches that LSP prepares for
    the addresses of gradients are complete after about ten steps."""
    names = ("ceiling", "adamw-torch", "lsp-512")
    chosen = {name: CONTENDERS[name] for name in names}
    cases = []
    for shape, kinds in (("1.3b", (False, True)), ("3b", (False,))):
        for compiled in kinds:
            suffix = "-compiled" if compiled else ""
            options: dict[str, Any] = {"prefix": "hosts/", "slow_host": True, "compiled": compiled, "warmup": 16}
            cases += _cases(shape, 4, {f"{name}{suffix}": chosen[name] for name in names}, **options)
            on_device = {f"lsp-512-device{suffix}": chosen["lsp-512"]}
            cases += _cases(shape, 4, on_device, adam_on_device=True, **options)
    return cases


FIGURE_5 = (
    # shape, batch, length, whom LSP is compared with: the LSP paper's four cases. LLaMA of the same size stands for
    # DeepSeek-Coder. ZeRO-Offload's float32 states of LLaMA-7B would take nearly all of the host's memory
    ("gpt2-774m", 4, 512, "zero2-offload"),
    ("llama-1.3b", 1, 384, "zero2-offload"),
    ("llama-3b", 16, 512, "zero2-offload"),
    ("llama-7b", 4, 1024, "zero2-offload-bf16"),
)
LINKS_GBPS = (None, 20.0, 10.0)


def figure_5_cases() -> list[Case]:
    """LSP beside ZeRO-Offload on the machine's link and on slower ones. Steps of the paper's laptop cases are taken
    apart too (Figure 6). For the larger models, whose steps by ZeRO-Offload take seconds, that would take longer than
    all else."""
    cases = []
    for shape, batch, length, other in FIGURE_5:
        for name in ("lsp-512", other):
            method, params = CONTENDERS.get(name, (name, {}))
            settings: dict[str, Any] = {"batch": batch, "length": length, "max_s": 4.0, "links_gbps": LINKS_GBPS}
            apart = shape in ("gpt2-774m", "llama-1.3b")
            case = LSPCase(shape, method, params=params, take_apart=apart, **settings)
            cases.append(case.to_run(f"figure5/{shape}/{name}", _SPEED, timeout_s=240))
    return cases


_ISSUE_S = {
    "1.3b": {
        "ceiling": 8,
        "adamw": 13,
        "lsp-512": 22,
        "zero2-offload": 60,
        "adamw-torch": 10,
        "lsp-1024": 17,
        "lsp-256": 15,
        "lsp-none": 38,
    },
    "3b": {"ceiling": 11, "adamw": 18, "lsp-512": 17, "zero2-offload": 62, "adamw-torch": 12, "lsp-1024": 16},
}
"""In the order of what is asked; seconds as run 20261115T150212Z of `results/h200_lsp.jsonl` lets expect them."""
_SLACK = 2.5
"""Of those seconds, before a case is given up."""
_LEAST_TIMEOUT_S = 60.0


def issue_cases() -> list[Case]:
    """Everything that is asked of LSP's speed and memory in one call of nine minutes on a cold H200, what matters most
    first. Each contender is set up once and measured with both batch sizes."""
    main = {shape: [_issue_case(shape, name, s) for name, s in of.items()] for shape, of in _ISSUE_S.items()}
    small, large, streamed = capped_cases()
    alone, sync, *ablation, fit = ablation_cases()
    cases = [*main["1.3b"], *main["3b"], small, large, _issue_case("1.3b", "zenflow", 60), fit, alone, sync, *ablation]
    return [*cases, streamed, _issue_case("3b", "zenflow", 120)]


def _issue_case(shape: str, name: str, seconds: float) -> Case:
    method, params = CONTENDERS[name]
    first, then = BATCHES
    case = LSPCase(
        f"llama-{shape}",
        method,
        params=params,
        length=1024,
        batch=first,
        then_batch=then,
        max_s=5.0,
        take_apart=shape == "1.3b" and name in ("lsp-512", "lsp-none", "zero2-offload"),
    )
    name = f"issue/{shape}/{first}+{then}/{name}"
    timeout_s = max(_LEAST_TIMEOUT_S, _SLACK * seconds)
    return case.to_run(name, _SPEED, timeout_s=timeout_s)


PRESETS: dict[str, Callable[[], list[Case]]] = {
    "issue": issue_cases,
    "speed": speed_cases,
    "breakdown": breakdown_cases,
    "ablation": ablation_cases,
    "capped": capped_cases,
    "schedule": schedule_cases,
    "hosts": host_cases,
    "figure5": figure_5_cases,
}


def cases_of(preset: str, *, device: str = "cuda", tiny: bool = False) -> list[Case]:
    """`tiny` keeps a preset's cases and shrinks their models: a rehearsal that needs no GPU."""
    cases = []
    for case in PRESETS[preset]():
        wanted = replace(LSPCase(**case.params), device=device)
        host_gb = case.planned_host_gb
        if tiny:
            wanted, host_gb = _tiny(wanted), None
        cases.append(wanted.to_run(case.name, case.target, timeout_s=case.timeout_s, planned_host_gb=host_gb))
    return cases


def _tiny(case: LSPCase) -> LSPCase:
    params = dict(case.params or {})
    params |= {"fit_steps": 1} if case.method == "lsp" else {}
    params |= {"subspace_dim": 8} if "subspace_dim" in params else {}
    sizes: dict[str, Any] = {"overrides": TINY, "batch": 2, "length": 16, "warmup": 1, "steps": 2, "cap_gb": None}
    sizes |= {"then_batch": None if case.then_batch is None else 1, "stream": None if case.stream is None else {}}
    return replace(case, params=params, **sizes)


def main(arguments: list[str] | None = None) -> None:
    cases: dict[str, Any] = {"presets": PRESETS, "cases_of": cases_of, "warm": _WARM}
    presets.main(arguments, description=__doc__, markdown=report, **cases)


if __name__ == "__main__":
    main()
