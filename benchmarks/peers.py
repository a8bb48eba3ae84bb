"""The papers' own code beside ours, from a checkout that you name: rows and a table as `launch/compare.py` makes them.

python -m benchmarks.peers zo2 --checkout DIR --python FILE --model random:opt-6.7b --seq 2048 --dtype fp16 --out DIR
python -m benchmarks.peers lsp-offload --checkout DIR --python FILE --model random:llama-1.3b --seq 384 --out DIR

ZO2 is github.com/liangyuwang/zo2, LSP-Offload is github.com/gulang2019/LSP-Offload. ds_zo contains nothing of theirs.
`--python` is the interpreter of an environment that has the peer's requirements: ZO2 needs transformers 4.51.3, which
ds_zo does not support. LSP-Offload needs its kernel built for that interpreter, as its README says. Our method and the
peer run one after the other in one run, with the same shape, batch and dtype, each in a process of its own. The LOMO
authors' package is installed from PyPI: `launch/compare.py --contenders lomo,lomo-optim`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds_zo.bench.compare import add_arguments, last_run
from ds_zo.bench.entrant import EntrantSpec
from ds_zo.bench.report import write_report
from ds_zo.bench.runner import Case, prepare_to_fork, run_cases
from ds_zo.bench.shapes import config_of_model
from ds_zo.bench.table_cases import count_parameters, make_cases
from ds_zo.planner.shapes import RANDOM
from ds_zo.records.rows import Row

CHECKOUT, PYTHON = "DS_ZO_PEER_CHECKOUT", "DS_ZO_PEER_PYTHON"
"""Variables that carry the paths to a case's process. Rows have no paths of the machine in them."""
_SCRIPT = Path(__file__).with_name("peer_steps.py")
_COMMON_FIELDS = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_FIELDS = {
    "opt": (*_COMMON_FIELDS, "ffn_dim", "word_embed_proj_dim", "do_layer_norm_before", "dropout", "attention_dropout"),
    "llama": (*_COMMON_FIELDS, "intermediate_size", "num_key_value_heads"),
    "gpt2": ("vocab_size", "n_layer", "n_embd", "n_head", "n_positions", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
}
"""By model type: fields of the configuration that older versions of transformers know too."""
_ARCHITECTURES = {"opt": "OPTForCausalLM", "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    settings: str
    files: tuple[str, ...]
    """Files that a checkout has."""
    model_types: tuple[str, ...]
    """Model types that the peer trains, as transformers names them."""
    ours: str
    """Contenders of ours that run beside it."""
    needs: str
    """What its interpreter needs, for an error message."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings for the peer. `--option NAME=VALUE` changes one."""


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "zo2",
            "ZO2 (its authors' code)",
            "the authors' code: all blocks offloaded, overlap on, no AMP",
            ("zo2/__init__.py", "zo2/config/mezo_sgd.py", "zo2/model/huggingface/zo_init.py"),
            ("opt",),
            "zo-wire,zo-streamed",
            "transformers==4.51.3 and the other lines of its requirements.txt",
            {"lr": 1e-6, "weight_decay": 0.0, "eps": 1e-3},
        ),
        Peer(
            "lsp-offload",
            "LSP-Offload (its authors' code)",
            "the authors' code: linear layers only, random projectors, Adam on the CPU in float32",
            ("para_offload_modules.py", "gradient_compressor.py", "state.py", "kernels/setup.py"),
            ("llama", "gpt2"),
            "lsp",
            "transformers 4 and kernels/fused_adam built for it (DEVICE=cpu python setup.py build_ext --inplace)",
            {
                "lr": 1e-4,
                "dim": 512,
                "nonzeros": 4,
                "fcfs_point": 10,
                "fcfs_process_delay": 1,
                "fcfs_h2d_delay": 2,
                "fcfs_upd_delay": 2,
            },
        ),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peer", choices=tuple(PEERS))
    parser.add_argument("--checkout", type=Path, required=True, metavar="DIR", help="a clone of the peer's repository")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), metavar="FILE", help="interpreter with its requirements"
    )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="a setting of the peer")
    add_arguments(parser)
    if arguments is None:
        prepare_to_fork()
    try:
        run(parser.parse_args(arguments))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    peer = PEERS[args.peer]
    check_checkout(peer, args.checkout)
    if not args.python.is_file():
        raise ValueError(
            f"an interpreter must be a file, got {args.python}: name bin/python of its environment (--python)"
        )
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    (cap_gb,) = args.device_memory_gb if len(args.device_memory_gb) == 1 else (None,)
    args.contenders = args.contenders or peer.ours
    cases = [
        *make_cases(args, device=device, device_memory_gb=cap_gb),
        peer_case(peer, args, device=device, cap_gb=cap_gb),
    ]
    # Absolute without following links: the interpreter of an environment is a link.
    os.environ |= {CHECKOUT: str(args.checkout.absolute()), PYTHON: str(args.python.absolute())}
    out = args.out / "rows.jsonl"
    run_cases(
        cases,
        out=out,
        run_id=args.run_id,
        resume=args.resume or args.run_id is not None,
        min_free_host_gib=args.min_free_host_gib,
        device=device,
        spawn=args.spawn,
        total_s=args.total_s,
    )
    print(write_report(last_run(out, args.run_id), args.out))


def check_checkout(peer: Peer, checkout: Path) -> None:
    absent = [file for file in peer.files if not (checkout / file).is_file()]
    if absent:
        raise ValueError(
            f"a checkout of {peer.name} must have {', '.join(peer.files)}, got {checkout}, which lacks "
            f"{', '.join(absent)}: clone its repository and name the clone's folder (--checkout)"
        )


def peer_case(peer: Peer, args: argparse.Namespace, *, device: str, cap_gb: float | None) -> Case:
    if not args.model.startswith(RANDOM):
        raise ValueError(f"a peer trains random weights of a shape, got {args.model}: write {RANDOM}SHAPE (--model)")
    if args.accumulate:
        raise ValueError(f"{peer.name} has no micro-batches here, got {args.accumulate}: leave it out (--accumulate)")
    config = config_of_model(args.model, num_layers=args.layers, max_length=args.seq)
    if config.model_type not in peer.model_types:
        known = " or ".join(peer.model_types)
        raise ValueError(f"{peer.name} trains {known} models here, got {config.model_type}: choose a shape (--model)")
    spec = EntrantSpec(
        model=args.model,
        batch=args.batch,
        length=args.seq,
        steps=args.steps,
        warmup=args.warmup,
        dtype=args.dtype,
        device=device,
        layers=args.layers,
        device_memory_gb=cap_gb,
        checkpointing=not args.no_checkpointing,
        max_s=args.max_s,
    )
    host_gb = 2 * count_parameters(args.model, layers=args.layers, length=args.seq) / 1e9
    params = {"contender": peer.name, "spec": asdict(spec), "options": peer.options | read_options(peer, args.option)}
    return Case(
        peer.name,
        "benchmarks.peers:run_peer",
        params,
        timeout_s=args.timeout_s,
        planned_host_gb=host_gb if device == "cuda" else None,
    )


def read_options(peer: Peer, given: Sequence[str]) -> dict[str, Any]:
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(
                f"an option is NAME=VALUE with a JSON value, got {text!r}, say lr=1e-6 (--option)"
            ) from None
        if name not in peer.options:
            known = ", ".join(peer.options)
            raise ValueError(f"an option of {peer.name} is one of {known}, got {name!r}: choose one (--option)")
    return found


def run_peer(*, contender: str, spec: Row, options: Row) -> Row:
    """Measures a peer in its own interpreter, started from the case's process."""
    peer, wanted = PEERS[contender], EntrantSpec(**spec)
    config = config_of_model(wanted.model, num_layers=wanted.layers, max_length=wanted.length)
    job = {
        "peer": contender,
        "checkout": os.environ[CHECKOUT],
        "architecture": _ARCHITECTURES[config.model_type],
        "model": {name: getattr(config, name) for name in _FIELDS[config.model_type]},
        "batch": wanted.batch,
        "length": wanted.length,
        "steps": wanted.steps,
        "warmup": wanted.warmup,
        "dtype": wanted.dtype,
        "device": wanted.device,
        "max_s": wanted.max_s,
        "cap_gb": wanted.device_memory_gb,
        "checkpointing": wanted.checkpointing,
        "options": options,
    }
    # The peer imports its own packages: PYTHONPATH may have ours.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [os.environ[PYTHON], str(_SCRIPT)],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        check=False,
    )
    kind, _, found = (ran.stdout.strip().splitlines() or [""])[-1].partition(" ")
    if kind == "FAILED":
        raise RuntimeError(_explained(peer, json.loads(found)))
    if kind != "ROW":
        raise RuntimeError(f"{contender} ended with status {ran.returncode} and without a row: see the last words")
    measured: Row = json.loads(found)
    tokens = wanted.batch * wanted.length
    told = ", ".join(f"{name} {value}" for name, value in options.items())
    return {
        "contender": contender,
        "title": peer.title,
        "settings": f"{peer.settings}; {told}",
        "running": f"{contender} {_commit(Path(os.environ[CHECKOUT]))}",
        "tokens_per_s": tokens / measured["step_s"],
        "tokens_per_s_mean": tokens / measured["step_wall_s"],
        **measured,
    }


def _explained(peer: Peer, failure: Row) -> str:
    error = str(failure["error"])
    if failure["kind"] != "import":
        return error
    return f"{peer.name} does not import, got {error}: give it an interpreter that has {peer.needs} (--python)"


def _commit(checkout: Path) -> str:
    ran = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return ran.stdout.strip() or "(commit unknown)"


if __name__ == "__main__":
    sys.exit(main())
