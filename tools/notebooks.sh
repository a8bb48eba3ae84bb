#!/usr/bin/env bash
# Runs the notebooks on the CPU, as a reader would, and fails if one fails or takes too long. Writes nothing to them.
#   bash tools/notebooks.sh                                   all of notebooks/
#   bash tools/notebooks.sh notebooks/first_finetune.ipynb    this one
#   NOTEBOOK_SECONDS=300 bash tools/notebooks.sh              with another limit
# The limit is on the CPU seconds of a notebook's process, which a busy machine hardly lengthens.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"

export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # tiny models are slower with more
use_environment "notebooks"
build_extensions ShareMemCommBuilder
share_environment

cd "$repo"
[ $# -gt 0 ] || set -- notebooks/*.ipynb
for notebook in "$@"; do
    say "$notebook"
    python - "$notebook" "${NOTEBOOK_SECONDS:-60}" <<'PYTHON'
import resource
import sys

import nbformat
from nbclient import NotebookClient

path, limit_s = sys.argv[1], int(sys.argv[2])
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, timeout=10 * limit_s, kernel_name="python3").execute()
used = resource.getrusage(resource.RUSAGE_CHILDREN)  # the kernel has ended
seconds = used.ru_utime + used.ru_stime
outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
print("".join(output["text"] for output in outputs if output.get("name") == "stdout").rstrip())
num_plots = sum("image/png" in output.get("data", {}) for output in outputs)
print(f"{num_plots} plot, {seconds:.0f} CPU seconds")
if num_plots != 1:
    sys.exit(f"error: a notebook shows one plot, got {num_plots}: end one cell with plt.show() ({path})")
if seconds > limit_s:
    sys.exit(f"error: a notebook takes at most {limit_s} CPU seconds, got {seconds:.0f}: shorten it ({path})")
PYTHON
done
