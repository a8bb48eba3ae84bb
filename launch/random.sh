#!/usr/bin/env bash
# Tests on generated models, scripts and files (tests/random): engines beside plain loops, checkpoints under attack.
#   bash launch/random.sh              as many cases as launch/test.sh tries, with the same seeds
#   bash launch/random.sh 50 7000      fifty times as many, from seed 7000 on
# A failure prints the seed of its case. Needs the .venv of launch/test.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
use_environment "test,peft"
share_environment
cd "$repo"
[ $# -eq 0 ] || export DS_ZO_RANDOM_TIMES="$1"
[ $# -lt 2 ] || export DS_ZO_RANDOM_SEED="$2"
say "random cases"
exec python -m pytest -m "not gpu" -q -n "${TEST_PROCESSES:-2}" tests/random
