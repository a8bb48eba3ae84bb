#!/usr/bin/env bash
# Runs the smoke suite (tests/smoke.txt) with the versions of launch/corners.txt, each in an environment of its own.
#   bash launch/versions.sh                  every corner without a result of this commit; then writes docs/support.md
#   bash launch/versions.sh --only oldest    one corner, again
#   bash launch/versions.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
exec "$(find_python)" "$repo/launch/versions.py" "$@"
