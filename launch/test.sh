#!/usr/bin/env bash
# Sets up .venv, then runs every check: lint, types, import direction, tests (without a GPU's).
#   bash launch/test.sh                                everything
#   bash launch/test.sh --fast                         one proof of every capability (tests/fast.txt), under three minutes
#   bash launch/test.sh --package                      all tests but those of pages, benchmarks, launch and tools
#   bash launch/test.sh --pages                        those tests
#   bash launch/test.sh tests/test_config.py -k slots  arguments of pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

arguments=("$@")
pages=(tests/pages tests/benchmarks tests/launch tests/tools)
case "${1:-}" in
--fast)
    mapfile -t chosen < <(sed 's/ *#.*//; /^$/d' "$repo/tests/fast.txt")
    arguments=("${chosen[@]}" --dist load "${@:2}")
    ;;
--package) arguments=("${pages[@]/#/--ignore=}" "${@:2}") ;;
--pages) arguments=("${pages[@]}" "${@:2}") ;;
esac

# These tests are the CPU's also where there is a GPU, and so are the extensions that they load.
export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu
use_environment "test,peft"
build_extensions ShareMemCommBuilder CPUAdamBuilder FusedAdamBuilder
share_environment

cd "$repo"
say "ruff check"
ruff check .
say "mypy"
mypy
mypy --config-file tests/mypy.ini
say "lint-imports"
lint-imports

# More threads than cores, or one thread a core in several processes, makes tiny models slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
unset PYTHONDONTWRITEBYTECODE  # or each of the tests' processes compiles the package again
say "pytest"
# A test file is one process's: they share the cores without sharing ports or process groups. Many wait for processes of
# their own, so that three keep two cores busy. A process that crashes ends the run: xdist would replace it, and wait for
# ever for the rest of its file.
# They are forks of a process that has imported anyio, which has a plugin for pytest that no test needs.
exec python -m pytest -W "ignore:Module already imported:pytest.PytestAssertRewriteWarning" -m "not gpu" \
    -n "${TEST_PROCESSES:-3}" --dist loadfile --max-worker-restart 0 "${arguments[@]}"
