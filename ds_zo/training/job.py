"""One training job, from its options to its summary."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import set_log_level_from_string

from ds_zo.checkpoint import CheckpointError
from ds_zo.checkpoint.files import replace_text
from ds_zo.checkpoint.preemption import Preemption
from ds_zo.config import ConfigError
from ds_zo.records.rows import append_row
from ds_zo.records.run_summary import Summary
from ds_zo.tasks import TaskError
from ds_zo.training.engine import ensure_environment
from ds_zo.training.errors import UserError
from ds_zo.training.folders import own_folders
from ds_zo.training.json_config import read_config
from ds_zo.training.loop import TrainingLoop
from ds_zo.training.progress import find_checkpoints
from ds_zo.training.summary import summarise


def run_or_exit(args: argparse.Namespace) -> None:
    """Runs the job. A user's mistake, a closed pipe and Ctrl-C end the process with one line and a non-zero status."""
    try:
        run(args)
    except (UserError, TaskError, ConfigError, CheckpointError) as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        sys.exit("error: the reader of the output has closed it, as `| head` does: write the output to a file")
    except KeyboardInterrupt:
        print("error: stopped by Ctrl-C; --resume latest goes on from a checkpoint of --save-every", file=sys.stderr)
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(args: argparse.Namespace) -> Summary | None:
    """Trains and evaluates. Returns None if the run was stopped before its end."""
    if args.log_level:
        set_log_level_from_string(args.log_level)
    config = read_config(args)
    checkpoints = find_checkpoints(args)
    ensure_environment()
    with own_folders(args) if os.environ["RANK"] == "0" else nullcontext():
        return _run(args, config, checkpoints)


def _run(args: argparse.Namespace, config: dict[str, Any], checkpoints: Path | None) -> Summary | None:
    torch.manual_seed(args.seed)
    if args.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    loop = TrainingLoop(args, config)
    before = None if args.skip_zero_shot else loop.evaluate("test")
    if loop.rank == 0 and before is not None:
        print(f"before: test {before}", flush=True)
    if checkpoints is not None:  # after the zero-shot score, which is of the model before any training
        loop.resume(checkpoints)
    with Preemption() as preemption:
        finished = loop.train(preemption)
    if not finished:
        if loop.rank == 0:
            where = f"--output-dir {args.output_dir} --resume latest"
            print(f"stopped by SIGTERM after step {loop.progress.step}; go on with {where}", flush=True)
        return None
    after = None
    if loop.progress.best is None:
        after = loop.evaluate("test") if loop.progress.step else before
        if not args.no_save:
            loop.save_model()
    summary = summarise(loop, before, after)
    if loop.rank == 0:
        _report(summary, args)
    return summary


def _report(summary: Summary, args: argparse.Namespace) -> None:
    args.output_dir.mkdir(parents=True, exist_ok=True)
    replace_text(args.output_dir / "summary.json", json.dumps(asdict(summary), indent=2) + "\n")
    if args.results is not None:
        append_row(args.results, asdict(summary))
    print(f"\n{summary}", flush=True)
