"""On CUDA, uploads, computing and downloads run beside one another: whatever touches the same bytes has to be ordered
by an event. Checked with clocks instead of streams, where a missing wait can't be hidden by timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from ds_zo.backends.lsp import groups as lsp_groups
from ds_zo.backends.lsp.scheduler import ServiceOrder
from ds_zo.backends.lsp.transfers import Copy, CopyLane
from ds_zo.backends.zo import store as zo_store
from ds_zo.streaming import block_store
from ds_zo.streaming.claims import Claim, Claims
from ds_zo.streaming.streams import InlineStreams, made_by
from ds_zo.streaming.units import PARTLY_FOLDED, Unit
from tests.helpers.lomo_runs import start, streamed
from tests.helpers.lsp_runs import lsp_json
from tests.helpers.stream_clocks import (
    HOST,
    Buffer,
    Clock,
    ClockedAdam,
    ClockedStreams,
    OneRank,
    OneRankRuntime,
    Races,
    buffers_of,
    buffers_of_groups,
    clocked,
    in_thread,
)
from tests.helpers.weights import assert_equal, parameters_of
from tests.helpers.zo_runs import Toy, break_off, engine_for, one_step, toy_batches, zo_json

pytestmark = pytest.mark.usefixtures("single_process")

ZO: dict[str, dict[str, Any]] = {
    "a slot a block": {"interval": 1, "device_slots": 3},
    "a slot a block, folds in turn": {"interval": 3, "device_slots": 3},
    "one block streams": {"interval": 2, "resident_blocks": 2},
    "slots go round": {"interval": 2},
    "low planes": {"interval": 2, "bf16": {"enabled": True}},
    "low planes of blocks that stay": {"interval": 2, "resident_blocks": 2, "bf16": {"enabled": True}},
    "one low plane at a time": {"interval": 3, "resident_blocks": 1, "bf16": {"enabled": True}},
    "a low plane in every visit": {"interval": 1, "resident_blocks": 1, "bf16": {"enabled": True}},
    "low planes have slots to spare": {
        "interval": 1,
        "resident_blocks": 1,
        "device_slots": 4,
        "bf16": {"enabled": True},
    },
    "several directions": {"interval": 2, "params": {"num_directions": 2}},
}


@pytest.fixture(autouse=True)
def clocks() -> Iterator[None]:
    with clocked():
        yield


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come as they do where ranks keep them together."""
    monkeypatch.setattr(block_store, "LocalCopy", OneRank)
    monkeypatch.setattr(block_store, "Runtime", OneRankRuntime)
    buffers = zo_store.ZOBuffers
    monkeypatch.setattr(zo_store, "ZOBuffers", lambda **settings: buffers(**{**settings, "shared": True}))


def buffers_in(engine: Any) -> Callable[[], Iterator[Buffer]]:
    """Those of the engine's runtime, whichever backend it has."""
    store = engine.backend.store.blocks if hasattr(engine.backend, "store") else engine.backend.blocks.store
    return lambda: buffers_of(store.runtime)


class Wanders(Toy):
    """Blocks are left out, repeated and taken out of turn, differently in each step."""

    order: Iterable[int] = ()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return x


class Wide(nn.Module):
    """A block as large as it is told."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16 * width), nn.Linear(16 * width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def races_of_zo(case: str, orders: Sequence[Sequence[int]] = ((0, 1, 2),)) -> Races:
    model = Wanders().train()
    engine = engine_for(model, zo_json(**ZO[case]))
    with Races(buffers_in(engine)) as races:
        for step, batch in enumerate(toy_batches(5)):
            model.order = orders[step % len(orders)]
            one_step(engine, batch)
            if step % 2:
                with torch.no_grad():
                    model(**batch)
                model.state_dict()
    assert races.num_writes
    return races


@pytest.mark.parametrize("case", ZO)
def test_zo_orders_what_touches_the_same_bytes(case: str) -> None:
    assert not races_of_zo(case).found


@pytest.mark.parametrize(
    ("case", "stream", "other"),
    [
        ("slots go round", "compute", "upload"),
        ("slots go round", "upload", "compute"),
        ("slots go round", "upload", "download"),
        ("slots go round", "download", "compute"),
        ("a slot a block", "compute", "download"),
        ("low planes", "compute", "low_upload"),
        ("low planes", "low_upload", "compute"),
        ("low planes", "low_upload", "download"),
    ],
)
def test_a_missing_wait_is_found(case: str, stream: str, other: str) -> None:
    with clocked(deaf=[(stream, other)]):
        assert races_of_zo(case).found


WILD = ((2, 0), (0, 1, 2), (1,), (0, 0, 2), (2, 1))


@pytest.mark.parametrize(
    ("case", "orders"),
    [
        *((case, ((0, 1, 2),)) for case in ("slots go round", "low planes", "a slot a block", "several directions")),
        *((case, WILD) for case in ("slots go round", "low planes")),
    ],
    ids=str,
)
def test_zo_orders_what_ranks_gather(case: str, orders: Sequence[Sequence[int]], sharded: None) -> None:
    """Also what nobody waits for."""
    assert not races_of_zo(case, orders).found


@pytest.mark.parametrize("case", ["slots go round", *(case for case in ZO if "low plane" in case)])
def test_zo_orders_blocks_that_come_out_of_turn(case: str) -> None:
    assert not races_of_zo(case, WILD).found


@pytest.mark.parametrize("case", ["slots go round", *(case for case in ZO if "low plane" in case)])
def test_zo_orders_what_visits_that_break_off_leave_under_way(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(Toy().train(), zo_json(**ZO[case]))
    with Races(buffers_in(engine)) as races:
        for step, batch in enumerate(toy_batches(8)):
            one_step(engine, batch)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                break_off(patch, KeyboardInterrupt(), num_whole=1 + step % 3)  # the embedding's is the first
                if step % 4 in (1, 2):
                    engine(**batch)
                else:
                    engine.module.state_dict()
            for unit in engine.backend.store.blocks.placement.units:
                if unit.version == PARTLY_FOLDED:
                    unit.rewritten(engine.global_steps)  # as if a checkpoint had been loaded
            if step % 2:
                engine.module.state_dict()
    assert races.num_writes and not races.found


def races_of_reads(case: str) -> Races:
    """Somebody looks at a block's weights while a training forward is at the embedding."""
    model = Toy().train()
    engine = engine_for(model, zo_json(**ZO[case]))
    read = [model.blocks[i].linear.weight for i in (2, 0, 1)]

    def look(*hooked: Any) -> None:
        safe_get_full_fp32_param(read[engine.global_steps % 3])

    model.embed.register_forward_hook(look)
    with Races(buffers_in(engine)) as races:
        for batch in toy_batches(6):
            one_step(engine, batch)
    assert races.num_writes
    return races


@pytest.mark.parametrize("case", ZO)
def test_zo_orders_reads_inside_a_forward(case: str) -> None:
    assert not races_of_reads(case).found


@pytest.mark.parametrize("case", ["slots go round", "a slot a block"])
def test_zo_orders_reads_of_what_ranks_gather(case: str, sharded: None) -> None:
    assert not races_of_reads(case).found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zo_orders_blocks_of_different_sizes(dtype: torch.dtype) -> None:
    """A small one in a slot leaves the rest of a large one's download under way."""

    class Uneven(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Wide(width) for width in (64, 1, 2, 1, 64, 1, 48))

    engine = engine_for(Uneven().train(), zo_json(interval=3, bf16={"enabled": dtype is torch.bfloat16}))
    with Races(buffers_in(engine)) as races:
        for batch in toy_batches(6):
            one_step(engine, batch)
    assert races.num_writes and not races.found


@pytest.mark.parametrize("interval", [1, 2])
def test_gathers_find_slots_after_an_evaluation_that_breaks_off(interval: int, sharded: None) -> None:
    """It has brought other blocks, and their low planes, where the next pass was to find its first ones."""

    def some(number: int) -> Iterator[int]:
        yield from range(number)
        raise KeyError("the user's own")

    model = Wanders().train()
    engine = engine_for(model, zo_json(interval=interval, bf16={"enabled": True}))
    with Races(buffers_in(engine)) as races:
        for step, batch in enumerate(toy_batches(6)):
            model.order = range(3)
            one_step(engine, batch)
            model.order = some(step % 3)
            with torch.no_grad(), pytest.raises(KeyError):
                model(**batch)
    assert races.num_writes and not races.found


def test_a_save_and_training_leave_each_others_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks fold while they wait to be written, twice; what the first save gives back is used again."""
    writer, claim, overwrite = Clock("writer"), Claims.claim, Claims.before_overwrite
    claims: list[Claim] = []

    def noted(self: Claims, unit: Unit) -> Claim:
        claims.append(claim(self, unit))
        return claims[-1]

    def hand_over(self: Claims, unit: Unit, **what: bool) -> None:
        HOST.join(writer.seen)  # by the lock
        overwrite(self, unit, **what)

    def buffers() -> Iterator[Buffer]:
        yield from buffers_of(engine.backend.store.blocks.runtime)
        for buffer in kept:
            yield "a block that was swapped out", buffer, False

    monkeypatch.setattr(Claims, "claim", noted)
    monkeypatch.setattr(Claims, "before_overwrite", hand_over)
    engine = engine_for(Toy().train(), zo_json(interval=2, bf16={"enabled": True}))
    kept: list[torch.Tensor] = []
    with Races(buffers) as races:
        for step, batch in enumerate(toy_batches(9)):
            one_step(engine, batch)
            if step in (1, 5):
                saved = engine.backend.snapshot(hold=True)
                writer.join(HOST.seen)
            if step in (3, 7):
                kept += [buffer for claim in claims if not claim.done for buffer in claim.released]
                with in_thread(writer):
                    for file in saved.weights_files:
                        for tensor in file.tensors().values():
                            tensor.clone()
                        file.written()
    assert len(kept) > 6 and not races.found


@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["one pass", "two passes"])
@pytest.mark.parametrize("device_slots", [2, 3])
def test_lomo_orders_what_touches_the_same_bytes(device_slots: int, clipping: float) -> None:
    model = Toy().train()
    engine = start(streamed(stream={"device_slots": device_slots}, clipping=clipping), model)
    with Races(buffers_in(engine)) as races:
        for batch in toy_batches(3):
            one_step(engine, batch)
            with torch.no_grad():
                model(**batch)
            model.state_dict()
    assert races.num_writes and not races.found


@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["one pass", "two passes"])
def test_lomo_orders_what_ranks_gather(clipping: float, sharded: None) -> None:
    test_lomo_orders_what_touches_the_same_bytes(2, clipping)


OFFLOADED = {"stage": 0, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
LSP: dict[str, dict[str, Any]] = {
    "projected": {"clipping": 1.0},
    "whole": {"params": {"projector": "none"}},
    "at once": {"params": {"schedule": "sync"}},
    "streamed": {"zero_optimization": OFFLOADED, "params": {"projector": "none"}},
    "a slot a block": {"zero_optimization": OFFLOADED, "ds_zo": {"stream": {"device_slots": 3}}},
}
AHEAD, LATE = False, True


@pytest.mark.parametrize(
    ("case", "is_slow"),
    [("projected", AHEAD), *((case, LATE) for case in LSP)],
    ids=lambda value: value if isinstance(value, str) else "Adam is late" if value else "Adam is ahead",
)
def test_lsp_orders_what_touches_the_same_bytes(case: str, is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the weights are those of copies that are made at once."""
    with made_by(InlineStreams):
        plain: Any = start(lsp_json(**LSP[case]), Toy().train())
    train_lsp(plain)
    expected = parameters_of(plain)
    plain.destroy()
    engine: Any = start_with(ClockedAdam(monkeypatch, is_slow=is_slow), Toy().train(), monkeypatch, **LSP[case])
    backend = engine.backend
    sources = [partial(buffers_of_groups, backend.groups)]
    if backend.blocks.is_streamed:
        sources.append(buffers_in(engine))
    with Races(*sources) as races:
        train_lsp(engine)
        backend.apply_pending_updates()  # Adam's clock stops with the test, and the collector would wait for it
    assert races.num_writes and not races.found
    assert_equal(parameters_of(engine), expected)


def start_with(adam: ClockedAdam, model: nn.Module, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """An engine of LSP whose updates run on `adam`."""
    with monkeypatch.context() as patch:
        patch.setattr(lsp_groups, "UpdateQueue", lambda **options: adam)
        return start(lsp_json(**settings), model)


def train_lsp(engine: Any) -> None:
    for step, batch in enumerate(toy_batches(4)):
        if step == 2:  # a backward that no step follows
            engine.backward(engine(**batch))
            engine.zero_grad()
        if step == 3:  # a checkpoint between backward and step
            engine.backward(engine(**batch))
            engine.backend.rank_state()
            engine.step()
        else:
            one_step(engine, batch)
        if step == 1:
            with torch.no_grad():
                engine.module(**batch)
            engine.module.state_dict()


def test_directions_of_lsp_are_uploaded_while_the_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the embedding's gradient comes, directions of the blocks behind it are on their way to the device."""
    model = Toy().train()
    engine: Any = start_with(ClockedAdam(monkeypatch, is_slow=False), model, monkeypatch)
    memories = {group.device_memory.untyped_storage().data_ptr(): group.name for group in engine.backend.groups.on_host}
    issue, uploaded = Copy.issue, []
    issued: list[list[str]] = []

    def noted(copy: Copy, stream: Any) -> None:
        uploaded.extend(memories.get(target.untyped_storage().data_ptr()) for target, _ in copy.pairs)
        issue(copy, stream)

    def note(grad: torch.Tensor) -> None:
        issued.append([name for name in uploaded if name is not None])

    monkeypatch.setattr(Copy, "issue", noted)

    model.embed.weight.register_hook(note)
    engine.backward(engine(**toy_batches(1)[0]))
    [found] = issued
    assert found and all("blocks" in name or "head" in name for name in found)
    engine.step()
    engine.backend.apply_pending_updates()


@pytest.mark.parametrize(("last_first", "order"), [(False, "abdce"), (True, "abdfe")])
def test_copies_of_lsp_wait_their_turn(last_first: bool, order: str) -> None:
    """Two are under way at a time. Who is next is decided when one of them ends; one that is needed comes first."""
    service, issued = ServiceOrder(), []
    streams = ClockedStreams(torch.device("cpu"))
    lane = CopyLane(streams.download, service)
    copies = {name: Copy([], streams=streams, on_issue=lambda name=name: issued.append(name)) for name in "abcdef"}
    for copy in copies.values():
        lane.put(copy)
    assert issued == ["a", "b"]
    lane.issue_now(copies["d"])
    lane.issue_now(copies["a"])
    service.last_first = last_first
    for name, num_issued in (("a", 3), ("b", 4), ("d", 5)):  # three were under way
        copies[name].end.synchronize()
        lane.advance()
        assert "".join(issued) == order[:num_issued]
