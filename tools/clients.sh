#!/usr/bin/env bash
# Trains, resumes and exports with unmodified programs of other projects and the JSONs of ds_zo, on the CPU.
#   bash tools/clients.sh                     all clients, each in an environment of its own below runs/clients
#   bash tools/clients.sh trl llamafactory    these
#   bash tools/clients.sh --ci                the fastest, in the environment of launch/test.sh
#   bash tools/clients.sh --record            all, and docs/integrations.md is written anew
# Needs the .venv of launch/test.sh, and the network for the first run of a client.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"

enter_tests
PYTHONPATH="$repo/tools:$repo" exec python -m clients "$@"
