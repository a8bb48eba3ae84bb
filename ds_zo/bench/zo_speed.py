"""ZO beside in-memory MeZO: one case a process, one JSON row a case.

python -m ds_zo.bench.zo_speed case --shape opt-6.7b --method zo --stream '{"master": "wire"}'
python -m ds_zo.bench.zo_speed run cases.txt --out rows.jsonl
python -m ds_zo.bench.zo_speed link
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def link_gbps(device: torch.device, *, nbytes: int = 2**30) -> dict[str, float]:
    """Copy bandwidth between pinned host memory and the device: up, down, and both at once."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def timed(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for stream, (to, source) in zip(streams, copies, strict=False):
            with torch.cuda.stream(stream):
                for _ in range(4):
                    to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return 4 * nbytes * len(copies) / (time.perf_counter() - start) / 1e9

    up, down = (there[0], host[0]), (host[1], there[1])
    timed([up, down])
    return {"up": timed([up]), "down": timed([down]), "both": timed([up, down])}


def run_case(args: argparse.Namespace) -> Row:
    from ds_zo.bench.shapes import config_of, materialise, random_model

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if args.cap_gb:
        torch.cuda.set_per_process_memory_fraction(args.cap_gb * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    model = random_model(
        config_of(args.shape, num_layers=args.layers, max_length=args.length), dtype=dtype, device=device
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    ids = torch.randint(0, 50000, (args.batch, args.length), device=device)
    step: Callable[[], torch.Tensor]
    extra: Row = {}
    if args.method == "mezo":
        from ds_zo.bench.mezo import MeZO

        model = materialise(model).eval()
        trainer = MeZO(model, lr=args.lr, zo_eps=1e-3)

        def step() -> torch.Tensor:
            return trainer.step(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)

    else:
        import deepspeed

        import ds_zo  # noqa: F401

        stream = json.loads(args.stream)
        config = {
            "train_micro_batch_size_per_gpu": args.batch,
            "optimizer": {"type": "ZO", "params": {"lr": args.lr, "zo_eps": 1e-3, **json.loads(args.params)}},
            "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}},
            "ds_zo": {"stream": stream},
        }
        if args.dtype != "fp32":
            config[args.dtype] = {"enabled": True}
        if args.resident:
            config["zero_optimization"] = {"stage": 0}
        start = time.perf_counter()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        extra["load_s"] = time.perf_counter() - start
        engine.train()
        homes = engine.backend.homes
        extra |= {
            "host_gb": homes.store.nbytes / 1e9,
            "pinned_gb": homes.store.pinned_nbytes / 1e9,
            "interval": homes.interval,
            "master": stream.get("master", "split"),
        }

        def step() -> torch.Tensor:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return loss

    for _ in range(args.warmup):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    moved = _moved(engine) if args.method == "zo" else (0, 0)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
    wall = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - wall) / args.steps
    seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    if args.method == "zo":
        after = _moved(engine)
        extra["up_gb_a_step"], extra["down_gb_a_step"] = ((after[i] - moved[i]) / args.steps / 1e9 for i in (0, 1))
        extra["resident_blocks"] = sum(not u.streamed for u in engine.backend.homes.placement.blocks)
        extra["num_blocks"] = len(engine.backend.homes.placement.blocks)
    median = statistics.median(seconds)
    import resource

    return {
        "shape": args.shape,
        "method": args.method,
        "dtype": args.dtype,
        "batch": args.batch,
        "length": args.length,
        "parameters": num_parameters,
        "stream": json.loads(args.stream) if args.method == "zo" and not args.resident else None,
        "step_s": median,
        "step_s_min": min(seconds),
        "step_s_max": max(seconds),
        "wall_s": wall,
        "tokens_per_s": args.batch * args.length / median,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "host_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "loss": float(loss.detach()),
        **extra,
    }


def _moved(engine: Any) -> tuple[int, int]:
    runtime = engine.backend.homes.runtime
    return runtime.bytes_up, runtime.bytes_down


def environment() -> Row:
    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    case = commands.add_parser("case", help="one case in this process; prints its row")
    case.add_argument("--shape", required=True)
    case.add_argument("--method", choices=("zo", "mezo"), required=True)
    case.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16"))
    case.add_argument("--batch", type=int, default=1)
    case.add_argument("--length", type=int, default=2048)
    case.add_argument("--layers", type=int, help="cut the model's depth")
    case.add_argument("--stream", default="{}", help="the ds_zo.stream section, as JSON")
    case.add_argument("--params", default="{}", help="more optimizer.params, as JSON")
    case.add_argument("--resident", action="store_true", help="no offload_param: all blocks stay on the GPU")
    case.add_argument("--cap-gb", type=float, help="refuse device memory beyond this many GB")
    case.add_argument("--lr", type=float, default=1e-7)
    case.add_argument("--warmup", type=int, default=4)
    case.add_argument("--steps", type=int, default=12)
    commands.add_parser("link", help="measure the link")
    run = commands.add_parser("run", help="many cases, one subprocess each")
    run.add_argument("file", type=Path, help="a JSON list of a case's arguments a line")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--timeout-s", type=float, default=120)
    args = parser.parse_args()
    if args.command == "link":
        print(json.dumps({"link_gbps": link_gbps(torch.device("cuda", 0)), **environment()}))
    elif args.command == "case":
        for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, str(value))
        os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
        print("ROW " + json.dumps(run_case(args)), flush=True)
    else:
        run_all(args)


def run_all(args: argparse.Namespace) -> None:
    """Cheapest first as the file lists them; a case that fails or hangs is a row with its last words."""
    lines = [line for line in args.file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    with args.out.open("a") as out:
        for line in lines:
            start = time.perf_counter()
            arguments = json.loads(line)
            command = [sys.executable, "-m", "ds_zo.bench.zo_speed", "case", *arguments]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s)
                found = [text for text in done.stdout.splitlines() if text.startswith("ROW ")]
                row = json.loads(found[-1][4:]) if found else {"error": done.stderr[-1500:]}
            except subprocess.TimeoutExpired:
                row = {"error": f"no answer within {args.timeout_s} s"}
            row |= {"arguments": arguments, "process_s": round(time.perf_counter() - start, 1)}
            out.write(json.dumps(row) + "\n")
            out.flush()
            brief = {
                k: row.get(k)
                for k in ("shape", "method", "tokens_per_s", "step_s", "peak_gb", "loss", "error", "process_s")
            }
            print(json.dumps(brief | {"arguments": arguments}), flush=True)


if __name__ == "__main__":
    main()
