"""Sets of tables that one command makes, in as many calls as it needs: `ds-zo bench --preset results --resume`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

SMALLER_CARD_GB = 24.0


@dataclass(frozen=True)
class Table:
    """One model and batch, on the whole card and on a smaller one."""

    model: str
    batch: int
    seq: int

    @property
    def folder(self) -> str:
        return self.model.partition(":")[2]


PRESETS: dict[str, tuple[Table, ...]] = {
    "results": (
        Table("random:llama-7b", 4, 1024),
        Table("random:opt-6.7b", 1, 2048),
        Table("random:llama-1.3b", 4, 1024),
        Table("random:opt-13b", 1, 2048),
    ),
    "tiny": (Table("random:llama-tiny", 2, 16), Table("random:opt-tiny", 1, 32)),
}
"""`results` is the committed set, the most important table first. `tiny` runs in the same way in a minute on a CPU."""


def tables_of(preset: str, only: str | None) -> tuple[Table, ...]:
    tables = PRESETS[preset]
    names = only.split(",") if only else [table.folder for table in tables]
    unknown = set(names) - {table.folder for table in tables}
    if unknown:
        known = ", ".join(table.folder for table in tables)
        raise ValueError(f"preset {preset} has {known}, got {', '.join(sorted(unknown))} (--only)")
    return tuple(table for table in tables if table.folder in names)


def arguments_of(args: argparse.Namespace, table: Table, *, device: str) -> argparse.Namespace:
    """Returns the arguments of one table, as if the command line had given them. A CPU has no memory to cap."""
    own = {"model": table.model, "batch": table.batch, "seq": table.seq, "out": Path(args.out) / table.folder}
    caps = [None, SMALLER_CARD_GB] if args.device_memory_gb == [None] and device != "cpu" else args.device_memory_gb
    return argparse.Namespace(**{**vars(args), **own, "device_memory_gb": caps})
