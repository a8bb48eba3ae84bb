"""Groups of cases that one call finishes once it has begun them: a model's contenders of one tier, under all its caps.

Rows of several calls make one table only if they are of one machine. A call of a result set therefore skips a group
that it has no time for, and the next call begins with that group. A group that fits no call is begun in a call that has
begun no other, and is cut off. A tier waits until the tier before it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_zo.bench.runner import NOT_RUN, Case, read_rows
from ds_zo.bench.table_cases import MACHINE, likely_carried_over
from ds_zo.records.rows import Row

ELSEWHERE = "of another machine, left as it is"


@dataclass(frozen=True)
class CapPart:
    """The cases of one model under one cap on device memory, and the folder of their rows."""

    folder: Path
    cases: list[Case]

    @property
    def out(self) -> Path:
        return self.folder / "rows.jsonl"

    def of_tier(self, tier: str | None) -> list[Case]:
        from ds_zo.bench.contenders import TIERS

        return [case for case in self.cases if tier is None or case.name in {MACHINE, *TIERS[tier]}]

    def rows_of(self, run_id: str) -> dict[tuple[str, str], Row]:
        """Returns the rows of cases that need not run again, by case and configuration hash."""
        rows = read_rows(self.out) if self.out.exists() else []
        return {
            (row["case"], row["config_hash"]): row
            for row in rows
            if row["run_id"] == run_id and row["status"] != NOT_RUN
        }


@dataclass(frozen=True)
class Group:
    parts: Sequence[CapPart]
    """One part per cap, the largest card first."""
    tier: str | None
    """A name of `contenders.TIERS`; None: all tiers."""
    run_id: str
    min_free_host_gib: float

    @property
    def name(self) -> str:
        first, *others = self.parts
        model = first.folder.parent if others else first.folder
        return f"{model.name}, {self.tier}" if self.tier is not None else model.name

    def left(self) -> list[tuple[CapPart, Case]]:
        """Returns the cases that have no row."""
        known = [part.rows_of(self.run_id) for part in self.parts]
        return [
            (part, case)
            for part, rows in zip(self.parts, known, strict=True)
            for case in part.of_tier(self.tier)
            if (case.name, case.config_hash) not in rows
        ]

    def left_s(self) -> float:
        """Seconds that the remaining cases are expected to take."""
        return sum(self.takes_s(part, case) for part, case in self.left())

    def takes_s(self, part: CapPart, case: Case) -> float:
        """Expected seconds of one case. It is 0 in three cases: the host has too little memory for it, the row of a
        larger card will probably hold, or it is the machine's case, which runs once for all groups."""
        carried = case.name == MACHINE or (part is not self.parts[0] and likely_carried_over(case))
        return 0.0 if carried or self.lacks(case) is not None else case.expected_s

    def lacks(self, case: Case) -> str | None:
        """Says in the words of a row that the whole machine has too little host memory for a case; None: it has
        enough."""
        from ds_zo.records.environment import host_total_bytes

        room_gb = (host_total_bytes() - self.min_free_host_gib * 2**30) / 1e9
        planned_gb = case.planned_host_gb or 0.0
        return f"not run: planned {planned_gb:.1f} of {room_gb:.1f} GB of host memory" if planned_gb > room_gb else None

    def is_stuck(self) -> bool:
        """Whether the group has cases left of a run that another machine began, and that only that machine can
        continue."""
        from ds_zo.records.environment import machine_id

        return bool(self.left()) and any(row.get("machine") != machine_id() for row in self.rows())

    def rows(self) -> list[Row]:
        """Returns the rows that the group's run has, of all tiers."""
        return [row for part in self.parts for row in part.rows_of(self.run_id).values()]


class Turn:
    """Decides which groups a call begins. The call asks for them in their order."""

    def __init__(self) -> None:
        self._began = False
        self._waiting: set[str | None] = set()

    def takes(self, group: Group, *, left_s: float, room_s: float) -> bool:
        waits = bool(self._waiting - {group.tier}) or (self._began and left_s > room_s)
        if waits:
            self._waiting.add(group.tier)
        else:
            self._began = True
        return not waits


def listed(groups: Sequence[Group], *, total_s: float | None) -> Iterator[str]:
    """Lists every case with its planned memory and time, and the groups that a call of `total_s` seconds finishes."""
    for group in groups:
        if group.is_stuck():
            yield f"{group.name}: {ELSEWHERE}"
            continue
        yield f"{group.name}: {group.left_s():.0f} s left"
        left = {id(case) for _, case in group.left()}
        for part in group.parts:
            yield f"  {part.folder.name}"
            for case in part.of_tier(group.tier):
                if case.name != MACHINE:
                    yield f"    {case.name:<20} {_words(group, part, case) if id(case) in left else 'done'}"
    once_s = next(case.expected_s for case in groups[0].parts[0].cases if case.name == MACHINE)
    total = sum(group.left_s() for group in groups if not group.is_stuck())
    yield f"about {total:.0f} s in all, and {once_s:.0f} s once for the machine"
    if total_s is not None:
        for number, names in enumerate(_calls(groups, total_s, once_s=once_s), 1):
            yield f"call {number}: {'; '.join(names)}"


def _words(group: Group, part: CapPart, case: Case) -> str:
    lacking = group.lacks(case)
    if lacking is not None:
        return lacking
    if group.takes_s(part, case) == 0.0 and case.expected_s:
        return "as with more memory, unless that held more"
    told = " ".join(f"{name}={value}" for name, value in case.env.items())
    return f"{case.expected_s:4.0f} s, {case.planned_host_gb or 0.0:.1f} GB of host memory {told}".rstrip()


def _calls(groups: Sequence[Group], total_s: float, *, once_s: float) -> Iterator[list[str]]:
    waiting = {group.name: (group, group.left_s()) for group in groups if group.left() and not group.is_stuck()}
    room_s = total_s - once_s
    while waiting:
        turn, begun = Turn(), list[str]()
        for name, (group, left_s) in list(waiting.items()):
            if turn.takes(group, left_s=left_s, room_s=room_s):
                begun.append(f"{name} ({left_s:.0f} s)")
                room_s -= left_s
                del waiting[name]
        yield begun
        room_s = total_s
