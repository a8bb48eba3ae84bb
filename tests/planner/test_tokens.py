"""The fewest tokens a step at which copies between host and device do not bound the speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_zo.cli import main
from ds_zo.planner import SLACK, Plan, Rates, plan, smallest_unbound, with_link
from tests.planner.planned_models import planned

COMPUTING = replace(Rates(), matmul_tflops=1e-4, launch_us=1e-6, backward_launch_us=1e-6, kernel_us=1e-6)
"""Products take nearly all the time of a toy model's computation."""
DEEP = {"num_hidden_layers": 16}
GBPS = 3e-3


def unbound(backend: str, gbps: float, **options: Any) -> tuple[Plan, Callable[[int], Plan]]:
    """The plan of the smallest batch, and the function that plans any batch."""
    model = planned("llama", **DEEP)
    model.rates = with_link(COMPUTING, gbps)

    def at(batch: int) -> Plan:
        return plan(model.with_batch(batch), backends=[backend], offload=True, **options)

    return smallest_unbound(at), at


@pytest.mark.parametrize(("backend", "gbps"), [("zo", GBPS), ("lomo", GBPS), ("lsp", GBPS), ("adapter-nf4", GBPS / 10)])
def test_a_smaller_batch_waits_for_copies(backend: str, gbps: float) -> None:
    params = {"params": {"subspace_dim": 4, "nonzeros_per_row": 2}} if backend == "lsp" else {}
    found, at = unbound(backend, gbps, **params)
    assert found.batch > 2
    ratios = []
    for e in (found.estimates[0], at(found.batch - 1).estimates[0]):
        assert e.compute_s is not None
        ratios.append(e.step_s / e.compute_s)
    assert 1 <= ratios[0] <= 1 + SLACK < ratios[1]


def test_a_blocks_forward_takes_as_long_as_its_upload() -> None:
    """A forward pass, with two FLOPs a weight and token, computes for the shortest time beside each upload."""
    flops = 2 * sum(rows * columns for rows, columns in planned("llama", **DEEP).matrices)
    for gbps in (GBPS, GBPS / 2):
        found, _ = unbound("lomo", gbps)
        upload_s = found.estimates[0].host["weights"] / (gbps * 1e9)
        tokens = upload_s * COMPUTING.matmul_tflops * 1e12 / flops
        assert found.batch * found.seq == pytest.approx(tokens, rel=0.1)


def test_one_sequence_is_enough_where_nothing_streams() -> None:
    model = planned("llama")
    model.rates = with_link(COMPUTING, 1e-9)
    assert smallest_unbound(lambda batch: plan(model.with_batch(batch), backends=["lomo"])).batch == 1


def test_copies_that_grow_with_the_tokens_are_told() -> None:
    stream = {"offload_activations": True}
    with pytest.raises(ValueError, match=r"copies bound the step of adapter at any number.*offload_activations"):
        unbound("adapter", 1e-6, stream=stream)


def test_inputs_of_resident_blocks_cross_the_link() -> None:
    model = planned("llama", **DEEP)
    model.rates = with_link(COMPUTING, 1e-6)
    (found,) = plan(
        model, backends=["adapter"], offload=True, stream={"resident_blocks": 16, "offload_activations": True}
    ).estimates
    assert found.step_s >= (found.up_nbytes + found.down_nbytes) / 1e3 > 0


def test_tokens_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text('{"matmul_tflops": 1e-3}')
    command = ["plan", "--model", "random:opt-tiny", "--seq", "16"]
    streamed = [*command, "--backend", "lomo", "--offload", "--rates", str(rates), "--link-gb-s", "0.02"]
    assert main([*streamed, "--gpus", "2", "--tokens-per-step", "auto"]) == 0
    said, _, rest = capsys.readouterr().out.partition("\n")
    tokens, batch = (int(word.replace(",", "")) for word in (said.split()[0], said.split(" a step, ")[1].split()[0]))
    assert tokens == 2 * 16 * batch > 32 and f"{batch} x 16 tokens" in rest and "link of 0.02 GB/s" in rest
    assert "the fewest at which copies lengthen a step of lomo by at most 2%" in said
    assert "do not fit" not in said
    for option in ("--device-memory-gb", "--host-memory-gb"):
        assert main([*streamed, option, "0.3", "--tokens-per-step", "auto"]) == 0
        said = capsys.readouterr().out.partition("\n")[0]
        assert f"do not fit the {'GPU' if 'device' in option else 'host'}, and copies" in said and option in said
    assert main([*command, "--backend", "lomo", "--gpus", "2", "--tokens-per-step", "96"]) == 0
    assert "96 tokens a step, 3 x 16 on each GPU\n" in capsys.readouterr().out
    for options, error in (
        (["--tokens-per-step", "auto"], "auto goes with one --backend, got all"),
        (["--tokens-per-step", "auto", "--backend", "adamw"], "chosen for backends of ds_zo, got adamw"),
        (["--tokens-per-step", "24"], "must be auto or a multiple of 16 (GPUs x --seq), got 24"),
        (["--tokens-per-step", "some"], "got some (--tokens-per-step)"),
        (["--tokens-per-step", "16", "--gpus", "0"], "gpus, nodes and seq must be >= 1, got 0, 1 and 16"),
        (["--link-gb-s", "0"], "must be > 0 GB/s, got 0 (--link-gb-s)"),
    ):
        assert main([*command, *options]) == 1
        assert error in capsys.readouterr().err


def test_devices_without_a_link_of_their_own_have_that_to_the_host() -> None:
    shared = replace(Rates(), interconnect_gbps=Rates().link_up_gbps)
    assert with_link(shared, 3.0).interconnect_gbps == 3.0
    assert with_link(Rates(), 3.0).interconnect_gbps == Rates().interconnect_gbps != Rates().link_up_gbps
