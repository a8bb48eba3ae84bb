"""What several commands do with their arguments and their output."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ds_zo.config.errors import suggestion
from ds_zo.config.json_text import parse_object

if TYPE_CHECKING:
    from ds_zo.planner import Rates

_T = TypeVar("_T")
DEFAULT_SEQ = 2048


def add_command(commands: Any, name: str, *, help: str, examples: tuple[str, ...], about: str = "") -> Any:
    """Adds the parser of a command. Its --help begins with `about`, or else with `help`, and ends with the examples."""
    return commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(about or f"{help[0].upper()}{help[1:]}.", 100),
        epilog="\n  ".join(("examples:", *examples)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe the machine of a plan."""
    for what, default in (("device", "of each GPU"), ("host", "of the machine")):
        text = f"memory {default} (default: unlimited)"
        parser.add_argument(f"--{what}-memory-gb", type=float, metavar="GB", help=text)
    parser.add_argument("--seq", type=int, default=DEFAULT_SEQ, help="tokens of a sequence (default: %(default)s)")
    text = "speeds of this machine, written by ds-zo report --json"
    speeds = parser.add_mutually_exclusive_group()
    speeds.add_argument("--rates", type=Path, metavar="FILE", help=text)
    text = "memory and speeds of a card, from its data sheet: RTX4090, A100, ... (default: speeds of an H200, measured)"
    speeds.add_argument("--gpu", metavar="CARD", help=text)


def machine_rates(args: argparse.Namespace, *, dtype: str) -> Rates | None:
    """The speeds to plan with; None: the default. A card's memory becomes `--device-memory-gb` if that is left out."""
    from ds_zo.planner import CARDS, card_rates, load_rates

    if args.gpu is None:
        return load_rates(args.rates) if args.rates else None
    name = args.gpu.upper().replace(" ", "").replace("-", "")
    if name not in CARDS:
        raise ValueError(f"no data sheet of the card {args.gpu!r} is known; {suggestion(name, CARDS)} (--gpu)")
    if dtype == "bf16" and not CARDS[name].has_bf16:
        raise ValueError(f"{name} has no bf16, got a plan in bf16: plan in fp16 (--dtype, or fp16 in the JSON)")
    if args.device_memory_gb is None:
        args.device_memory_gb = CARDS[name].memory_gb
    return card_rates(name)


def unprinted(work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Calls `work` with standard output redirected to standard error, because libraries print there.

    DeepSpeed, for one, prints how long an operator took to load.
    """
    with redirect_stdout(sys.stderr):
        return work(*args, **kwargs)


def json_object(text: str, option: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as error:
        raise ValueError(f"{option} must be a JSON object, got {text!r}: {error}; write {{...}} ({option})") from None
