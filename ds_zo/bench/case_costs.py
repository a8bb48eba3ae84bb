"""Estimates the seconds of a contender's case, so that a call begins only cases that it can finish. The figures are of
an H200.

They are of runs 20261115T212128Z (LLaMA-7B) and 20261115T212919Z (OPT-6.7B and 13B), whose rows have `laps_s`,
`warmup_seconds`, `step_s`, `target_s` and `wall_s`. `tests/bench/test_contenders.py` compares these figures with the
rows. ZenFlow's figures are of 20261115T150212Z, SuperOffload's steps are a guess. One case was far off: ZeRO-Offload of
OPT-6.7B took 106 s to load, where LLaMA-7B took 57 s and ZeRO-3 of either model 53 s. Its steps were as fast as in
other runs; the cause is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_zo.bench.contenders import Contender

START_S, PEER_START_S = 4.0, 1.0
"""Seconds from the fork to a model on the device, and at the end, with DeepSpeed and without. 7B and 13B are alike."""
FAILS_S, FLATTENING_FAILS_S = 2.0, 9.0
"""Seconds until a model that is too large for the card runs out of memory. Stage 2 has flattened the weights on the
host by then."""
PINNED_S_PER_GB, REGISTERED_S_PER_GB = 0.5, 0.08
"""Seconds per GB to allocate, fill and free host memory: stock DeepSpeed, and ds_zo."""
_ZENFLOW_S_PER_GB = 0.25
"""Seconds per GB of ZenFlow's host memory, most of which is not pinned."""
PROFILE_S = 2.0
_FIRST_STEP_S = {"zo": 4.0, "lomo": 1.8, "adalomo": 1.8, "lsp": 25.0}
_OTHER_FIRST_STEP_S = 0.8
"""Seconds that the first step takes on the GPU beyond a later one, by backend: kernels are compiled or loaded, graphs
recorded, rates measured. LSP's figure holds the four steps in which it fits its projectors. On the host the first step
takes twice as long as a later one."""
_FLOP_PER_S = 4.5e14
_LEAST_STEP_S = 0.13
_FLOP_EACH, _ZO_FLOP_EACH = 8, 4
"""Floating-point operations per token and parameter: forward, recomputed forward and backward; or two forward
passes."""
_HOST_STEP_S = {
    "zero2-offload": 0.4,
    "zero3-offload": 0.93,
    "zero3-offload-param": 1.0,
    "zero2-offload-bf16": 0.3,
    "zero2-offload-bf16-act": 0.3,
    "zero3-offload-bf16": 0.55,
    "zero3-offload-param-bf16": 0.6,
    "zenflow": 0.25,
    "superoffload": 0.7,
}
"""Seconds per step and 10**9 parameters on the CPU and the link, for any batch."""
_ZENFLOW_PAUSE_S = 10.0
"""Seconds of ZenFlow's third step, before steps are timed: it selects the parameters that it updates on the GPU."""
_BESIDE_GB = 6.0
"""GB of device memory beside weights and states: activations, logits, buckets."""


def expected_s(contender: Contender, num_parameters: int, spec: Any, *, host_gb: float, card_gb: float | None) -> float:
    """Expected seconds of a case. `spec` is an `EntrantSpec`. `card_gb` None: no model is too large for the card."""
    billions = num_parameters / 1e9
    if card_gb is not None and contender.ds_zo is None and contender.device_bytes_each * billions > card_gb:
        return FLATTENING_FAILS_S if contender.zero_optimization["stage"] == 2 else FAILS_S
    flop = (_ZO_FLOP_EACH if contender.backend == "zo" else _FLOP_EACH) * num_parameters * spec.batch * spec.length
    on_gpu_s = max(_LEAST_STEP_S, flop / _FLOP_PER_S)
    on_host_s = _HOST_STEP_S.get(contender.name, 0.0) * billions
    step_s = on_gpu_s + on_host_s
    first_s = _FIRST_STEP_S.get(contender.backend or "", _OTHER_FIRST_STEP_S) + on_gpu_s + 2 * on_host_s
    pause_s = _ZENFLOW_PAUSE_S if contender.name == "zenflow" else 0.0
    steps_s = first_s + pause_s + _num_steps(contender, spec, step_s=step_s) * step_s
    start_s = PEER_START_S if contender.peer else START_S
    return start_s + _setting_up_s(contender, host_gb) + steps_s + (PROFILE_S if spec.profile else 0.0)


def likely_holds(contender: Contender, num_parameters: int, cap_gb: float) -> bool:
    """Whether a run on a larger card probably never holds more than `cap_gb`, so that its row counts for both cards."""
    return contender.device_bytes_each * num_parameters / 1e9 + _BESIDE_GB <= cap_gb


def _setting_up_s(contender: Contender, host_gb: float) -> float:
    if contender.name == "zenflow":
        return host_gb * _ZENFLOW_S_PER_GB
    return host_gb * (PINNED_S_PER_GB if contender.backend is None else REGISTERED_S_PER_GB)


def _num_steps(contender: Contender, spec: Any, *, step_s: float) -> int:
    """Number of steps after the first, as `measure.measure_steps` and `entrant.run_contender` make them."""
    from ds_zo.bench.entrant import EXTRA_STEPS

    timed = spec.steps if spec.max_s is None else min(spec.steps, max(2, int(spec.max_s / step_s)))
    warmup = spec.warmup if spec.max_s is None or step_s < spec.max_s / 2 else 2
    extra = next(number for longest_s, number in EXTRA_STEPS if step_s < longest_s)
    return max(0, warmup - 1) + max(contender.period, timed) + 2 * max(contender.period, extra)
