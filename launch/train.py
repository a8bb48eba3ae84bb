#!/usr/bin/env python
"""Fine-tune a language model, or one with a classification head, through DeepSpeed, by the optimizer in its JSON.

With nothing but a JSON, the embedded model learns the embedded task, offline, on CPU or GPU:

    deepspeed launch/train.py --deepspeed ds_configs/zo.json

A real job names its model and data:

    deepspeed launch/train.py --deepspeed ds_configs/zo.json --steps 5000 \\
        --model facebook/opt-1.3b --task sst2 --data-dir DIR
    deepspeed launch/train.py --deepspeed ds_configs/lomo.json --model ./folder --task text --data notes.txt

With `--eval-every`, the state that is best on dev is tested and saved. `--max-seconds` ends training after that many
seconds, without evaluation and saving. `--results FILE` adds the run's row to a JSONL file.

The learning rates in ds_configs suit models of billions of parameters, in bf16 on a GPU. For the embedded model, which
has a million, the script replaces them by the rates of `EMBEDDED_PARAMS` and trains in float32. It prints one line
about that. It keeps a rate given by --lr, a dtype given by --dtype, and an optimizer section that is not a shipped one.

The script is `ds-zo train` for a clone of the repository, which need not be installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from ds_zo.training.arguments import parse_args
from ds_zo.training.job import run_or_exit


def main() -> None:
    run_or_exit(parse_args(description=__doc__))


if __name__ == "__main__":
    main()
