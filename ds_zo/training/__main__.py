"""`python -m ds_zo.training`, for launchers: `deepspeed --module ds_zo.training` with the options of `ds-zo train`."""

from __future__ import annotations

from ds_zo.training.arguments import parse_args
from ds_zo.training.job import run_or_exit

if __name__ == "__main__":
    run_or_exit(parse_args())
