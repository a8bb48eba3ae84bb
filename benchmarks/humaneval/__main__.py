"""Writes the data of the task humaneval, so that several runs and several machines train on the same functions.

    python -m benchmarks.humaneval DIR

DIR/humaneval then holds train.jsonl, dev.jsonl, test.jsonl (functions of installed packages) and HumanEval.jsonl.gz.
DIR/humaneval-chat holds the same. Pass DIR to launch/sweep.py as --data-root.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

from benchmarks.humaneval.task import FILE, HumanEval, HumanEvalChat
from ds_zo.tasks.data import SPLITS
from ds_zo.tasks.errors import TaskError


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    root = parser.parse_args(arguments).folder
    task = HumanEval()
    try:
        task.check()
    except TaskError as error:
        sys.exit(f"error: {error}")
    for folder in (root / HumanEval.name, root / HumanEvalChat.name):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(task.file(), folder / FILE)
        for split in SPLITS:
            lines = "".join(json.dumps(row) + "\n" for row in task.rows(split))
            (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    packages = Counter(row["package"] for row in task.rows("train"))
    most = ", ".join(f"{name} {count}" for name, count in packages.most_common(5))
    print(f"{root}: digest {task.digest()}, {len(task.rows('train'))} training functions of {len(packages)} packages")
    print(f"most of them: {most}")


if __name__ == "__main__":
    main()
