#!/usr/bin/env bash
# Sets up .venv, then runs every check: lint, types, import direction, tests (without a GPU's).
# Arguments are passed on to pytest: bash launch/test.sh tests/test_config.py -k slots
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

use_environment "test,peft"

# DeepSpeed compiles its CPU Adam at first use. Done here, no test has a compiler's minutes in its time limit.
export MAX_JOBS="${MAX_JOBS:-2}"
if ! compgen -G "$TORCH_EXTENSIONS_DIR/cpu_adam/*.so" >/dev/null; then
    say "building DeepSpeed's CPU Adam once (needs a C++ compiler; two to three minutes on two cores)"
    log="$venv/cpu_adam-build.log"
    if ! python -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)' \
        >"$log" 2>&1; then
        tail -n 20 "$log"
        remove_stale_build_locks
        say "that failed ($log): tests of stock ZeRO-Offload will fail or skip"
    fi
fi
share_environment

cd "$repo"
say "ruff check"
ruff check .
say "mypy"
mypy
say "lint-imports"
lint-imports

# More threads than cores, or one thread a core in several processes, makes tiny models slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
say "pytest"
exec python -m pytest -m "not gpu" "$@"
