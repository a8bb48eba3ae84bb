#!/usr/bin/env bash
# Sets up .venv, then fine-tunes the embedded model on the embedded task, offline.
# Arguments are passed on to launch/train.py: bash launch/quickstart.sh --steps 50
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

use_environment ""
share_environment

export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"  # the embedded job needs no network; HF_HUB_OFFLINE=0 for --model NAME
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
launcher=(deepspeed --master_port "$port")
# One device is plenty for the embedded model. --num_gpus would make the launcher ignore a choice made by the user.
if [ -z "${CUDA_VISIBLE_DEVICES:-}" ]; then
    launcher+=(--num_gpus 1)
fi

cd "$repo"
say "${launcher[*]} launch/train.py --deepspeed ds_configs/zo.json $*"
"${launcher[@]}" launch/train.py --deepspeed ds_configs/zo.json "$@"

cat <<'NEXT'

Next: .venv/bin/ds-zo plan --model NAME --gpu RTX4090 --host-memory-gb 64    (the method for your model and card)
      .venv/bin/ds-zo train --method adapter --model NAME --task chat --data conversations.jsonl
      .venv/bin/ds-zo convert ds_config.json --to adalomo --out adalomo.json    (your own script, its JSON)
NEXT
