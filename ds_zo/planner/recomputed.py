"""Placement and step time of streamed blocks that are recomputed: those of LOMO, LSP and Adapter.

A block is uploaded twice a step, in order for the forward pass and in reverse order for the backward pass. A block that
is trained is downloaded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_zo.config.section import StreamConfig
from ds_zo.planner import pricing
from ds_zo.planner.estimate import Estimate, Limits, streaming_where_needed
from ds_zo.planner.models import Model
from ds_zo.planner.timeline import Cost, OrderDiffersError, Trace, add_up, in_tiles
from ds_zo.planner.units import num_resident, units_of
from ds_zo.streaming.budget import DeviceBytes, device_bytes
from ds_zo.streaming.placement import Placement, evenly_spaced
from ds_zo.streaming.schedule import Kind


@dataclass(frozen=True)
class Placed:
    """Which blocks stream, the memory that they and the others take, and the bytes that cross the link."""

    setting: str
    weights_nbytes: int
    """Bytes of weights that stay on the device."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the other parts of device memory, slots and scratch aside."""
    placement: Placement | None = None
    """None: the whole model stays on the device."""
    blocks: Sequence[int] = ()
    """Indices of the blocks that stream."""
    num_slots: int = 0
    slots_nbytes: int = 0
    store_nbytes: int = 0
    """Bytes of streamed blocks in host memory. As many are downloaded in a step."""
    filling_nbytes: int = 0
    """See `Estimate`."""
    up_nbytes: int = 0
    """Bytes that are uploaded in a step, inputs of blocks included."""
    inputs_nbytes: int = 0
    """Bytes of all blocks' inputs in host memory. As many are copied there in a step, and back."""


_INPUTS_ON_DEVICE = 2
"""Inputs of blocks on the device if the host has those of all blocks: one is used while another is copied."""
_EQUAL_SHARE = 0.01
"""Steps count as equally long if they differ by at most this share."""
Traced = Callable[[Model], Trace]
"""Traces a pass that recomputes its blocks, with the batch of a model."""


def streaming(
    estimate: Callable[[StreamConfig, bool], Estimate],
    model: Model,
    limits: Limits,
    stream: StreamConfig,
    offload: bool | None,
) -> Estimate:
    """The estimate whose blocks stream, or not; see `streaming_where_needed`. Where `stream.tiles` is null and memory
    is limited, it takes the fewest tiles whose step is at most 1% longer than the shortest step that fits."""

    def with_best_tiles() -> Estimate:
        found: list[Estimate] = []
        for num_tiles in _tile_numbers(model.batch):
            tiles = {"tiles": num_tiles} if num_tiles > 1 else {}
            try:
                last = estimate(StreamConfig(**stream.model_dump(exclude_unset=True) | tiles), True)
            except OrderDiffersError:
                continue
            found.append(last)
            if last.fits_device and last.step_s <= (1 + _EQUAL_SHARE) * (last.compute_s or 0.0):
                break  # it waits for no copies, and more tiles launch more kernels
        fitting = [e for e in found if e.fits_device] or found[-1:]
        shortest = min(e.step_s for e in fitting)
        return next(e for e in fitting if e.step_s <= (1 + _EQUAL_SHARE) * shortest)

    def chosen(offload: bool) -> Estimate:
        if not offload or stream.tiles is not None or limits.device_nbytes is None:
            return estimate(stream, offload)
        return with_best_tiles()

    return streaming_where_needed(chosen, offload)


def _tile_numbers(batch: int) -> list[int]:
    """Powers of two below the batch, and the batch."""
    return [*(2**i for i in range((batch - 1).bit_length())), batch]


def trace_of(
    model: Model,
    stream: StreamConfig,
    traced: Traced,
    *,
    trained: Sequence[Sequence[int]],
    trains_before_blocks: bool = True,
) -> Trace:
    """The trace of a pass with recomputed blocks. `trained`: elements of each trained parameter of each block.
    `trains_before_blocks`: otherwise the first block's input needs no gradient, and such inputs stay on the device."""
    whole = traced(model)
    sections, num_tiles = whole.sections, min(stream.tiles or 1, model.batch)
    if num_tiles > 1:
        tile = model.with_batch(-(-model.batch // num_tiles))
        # Gradients are summed in float32. A tile's gradient is converted before it is added.
        sums = [4 * (sum(numels) + max(numels, default=0)) for numels in trained]
        share = model.batch / tile.batch
        sections = in_tiles(whole, traced(tile), num_tiles=num_tiles, share=share, sums_nbytes=sums)
    return add_up(
        sections,
        num_blocks=len(model.blocks),
        block_input_nbytes=whole.block_input_nbytes,
        inputs_on_device=_INPUTS_ON_DEVICE + (not trains_before_blocks) if stream.offload_activations else None,
    )


def trace_of_all_weights(model: Model, stream: StreamConfig, *, offload: bool, checkpointing: bool) -> Trace:
    """The trace of a pass that trains all weights. `checkpointing`: of a run whose blocks do not stream."""
    if not offload:
        return model.backward_trace(checkpointing=checkpointing, loss_in_chunks=True)
    numels = [[p.numel() for p in block.parameters()] for block in model.blocks]
    return trace_of(
        model, stream, lambda part: part.backward_trace(checkpointing=True, loss_in_chunks=True), trained=numels
    )


def place(
    model: Model,
    limits: Limits,
    stream: StreamConfig,
    trace: Trace,
    *,
    beside: Mapping[str, int],
    placement: Placement | None = None,
) -> Placed:
    """Keeps as many blocks on the device as fit. `beside`: the parts of device memory that are neither weights, slots
    nor scratch. `trace`: that of `trace_of`. `placement`: None: all parameters are trained, and there is no scratch."""
    if placement is None:
        placement = units_of(model, stream, trains_base=True)
        placement.scratch_nbytes = 0
    num_blocks = len(placement.blocks)
    num_slots = stream.device_slots
    on_host = num_blocks * trace.block_input_nbytes if stream.offload_activations else 0

    def needed(num_resident: int) -> DeviceBytes:
        sizes = device_bytes(placement, num_resident=num_resident, num_slots=num_slots)
        return replace(sizes, scratch=placement.scratch_nbytes)

    stay = num_resident(placement, limits, stream, needed, other_nbytes=sum(beside.values()))
    there = needed(stay)
    stays = evenly_spaced(num_blocks, stay)
    blocks = [i for i in range(num_blocks) if i not in stays]
    store = sum(placement.blocks[i].nbytes for i in blocks)
    # The backward pass finds the last blocks of the forward pass in slots, and the next step finds the first blocks.
    ends = [*blocks[-num_slots:], *blocks[:num_slots]]
    still_there = min(2 * store, sum(placement.blocks[i].nbytes for i in ends))
    stay_later = stream.resident_blocks is None
    tiles = f" in {stream.tiles} tiles" if (stream.tiles or 1) > 1 else ""
    return Placed(
        setting=f"{len(blocks)} of {num_blocks} blocks streamed, recomputed from their inputs{tiles}",
        weights_nbytes=there.non_blocks + there.blocks,
        beside=beside,
        placement=placement,
        blocks=blocks,
        num_slots=num_slots,
        slots_nbytes=there.slots,
        store_nbytes=store,
        filling_nbytes=sum(u.nbytes for u in placement.blocks) - store if stay_later else 0,
        up_nbytes=2 * store - still_there + on_host,
        inputs_nbytes=on_host,
    )


def seconds(
    model: Model,
    trace: Trace,
    placed: Placed,
    *,
    update: Callable[[int, int], Cost] = lambda numel, num_parameters: Cost(),
    sent_back: Literal["forward", "backward"] | None = None,
    update_at_end_s: float = 0.0,
    decodings: int = 0,
) -> tuple[float, float]:
    """Seconds of a step, from the schedule of its two passes where blocks stream, and seconds of its computation alone.

    `update` returns the cost of updating so many elements in so many parameters. `sent_back`: the pass in which blocks
    are updated and downloaded. `update_at_end_s`: an update after both passes. `decodings`: how often the backward pass
    decodes a block; the forward pass does once, if this is not 0."""
    num_all = sum(1 for _ in model.module.parameters())
    if placed.placement is None:
        alone_s = trace.forward.seconds + (trace.backward + update(model.numel, num_all)).seconds + update_at_end_s
        return alone_s, alone_s
    rates, units = model.rates, placed.placement.blocks
    num_blocks = len(units)
    input_nbytes = placed.inputs_nbytes // max(1, num_blocks)
    input_down_s = input_nbytes / (rates.link_down_gbps * 1e9)
    share = (trace.backward - trace.non_blocks * 2.0) * (1.0 / max(1, num_blocks))
    alone_s, together_s = (1 / (gbps * 1e9) for gbps in (rates.link_up_gbps, rates.link_duplex_gbps))
    up_s = together_s if sent_back == "forward" else alone_s
    up_again_s = together_s if sent_back == "backward" else alone_s
    seconds_of: dict[tuple[int, Kind], float] = {}
    in_blocks = num_inside = 0
    waiting_s = 0.0
    for i, unit in enumerate(units):
        numel, num_parameters = unit.numel, len(list(unit.placed))
        in_blocks, num_inside = in_blocks + numel, num_inside + num_parameters
        decode_s = pricing.decode_s(unit, rates) if decodings else 0.0
        forward_s = trace.block[min(i, len(trace.block) - 1)].seconds + decode_s
        seconds_of[i, Kind.COMPUTE] = max(forward_s, input_down_s)  # the next input's copy waits for this one's
        waiting_s += max(0.0, input_down_s - forward_s)
        later = num_blocks + i
        backward_s = (share + update(numel, num_parameters)).seconds + decodings * decode_s
        if i not in placed.blocks:  # such a block's input is uploaded without the block
            waiting_s += max(0.0, input_nbytes * alone_s - backward_s)
            backward_s = max(backward_s, input_nbytes * alone_s)
        seconds_of[later, Kind.COMPUTE] = backward_s
        both_s = (unit.nbytes + input_nbytes) / (rates.link_both_gbps * 1e9)
        seconds_of[i, Kind.UPLOAD] = max(unit.nbytes * up_s, both_s)
        seconds_of[i, Kind.DOWNLOAD] = unit.nbytes * up_s
        seconds_of[later, Kind.UPLOAD] = (unit.nbytes + input_nbytes) * up_again_s
        seconds_of[later, Kind.DOWNLOAD] = unit.nbytes * up_again_s
    outside = update(model.numel - in_blocks, num_all - num_inside)
    seconds_of[pricing.NON_BLOCKS, Kind.COMPUTE] = (trace.non_blocks * 3.0 + outside).seconds + update_at_end_s
    moving = set(placed.blocks)
    actions = pricing.forward_and_backward(
        num_blocks,
        streamed=moving,
        num_slots=placed.num_slots,
        forward_downloads=moving if sent_back == "forward" else (),
        backward_downloads=moving if sent_back == "backward" else (),
    )
    computing = (s for (_, kind), s in seconds_of.items() if kind is Kind.COMPUTE)
    return pricing.seconds(actions, seconds_of), sum(computing) - waiting_s
