#!/usr/bin/env python
"""Stock ZeRO-Offload, ZeRO-3, ZenFlow, SuperOffload, AdamW, SGD, ZO, LOMO, AdaLOMO and LSP on the same model and data.

    python launch/compare.py --model random:llama-1.3b --batch 4 --seq 1024 --out runs/llama-1.3b
    python launch/compare.py --model random:opt-13b --device-memory-gb none,24 --resume --total-s 540 --out runs/opt-13b

The same command as `ds-zo bench`, for a clone that is not installed. `--help` describes it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed
# Set before torch is imported: a forked case needs CUDA uninitialised.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from ds_zo.bench.compare import main

if __name__ == "__main__":
    sys.exit(main())
