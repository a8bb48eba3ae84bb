#!/usr/bin/env python
"""A grid of training runs as rows of a JSONL file: `benchmarks.sweep` describes it, and `--help` too.

python launch/sweep.py --grid smoke --results runs/smoke.jsonl --jobs 2
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed
# Set before torch is imported: a forked case needs CUDA uninitialised.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from benchmarks.sweep import main

if __name__ == "__main__":
    main()
