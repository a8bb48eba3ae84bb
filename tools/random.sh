#!/usr/bin/env bash
# Tests on generated models, scripts and files (tests/random): engines beside plain loops, checkpoints under attack;
# also every cell of the support matrix (docs/support.md), and plans of all mixtures of experts and all documented
# commands for several GPUs.
#   bash tools/random.sh              more cases than launch/test.sh tries, from the same seeds on
#   bash tools/random.sh 50 7000      fifty times as many, from seed 7000 on
# A failure prints the seed of its case. Needs the .venv of launch/test.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"

enter_tests
export DS_ZO_RANDOM_TIMES="${1:-1}" DS_ZO_NUM_KILLS="${DS_ZO_NUM_KILLS:-32}"
[ $# -lt 2 ] || export DS_ZO_RANDOM_SEED="$2"
say "random cases"
exec python -m pytest -m "not gpu" -q -n "${TEST_PROCESSES:-2}" tests/random tests/pages/test_support.py \
    tests/planner/test_plan_fits.py tests/planner/test_experts.py \
    tests/planner/test_plan.py::test_several_gpus_are_planned_as_documented \
    tests/checkpoint/test_kill.py::test_kill_at_random_moments
