#!/usr/bin/env bash
# Runs the smoke suite (tests/smoke.txt) with the versions of tools/corners.txt, each in an environment of its own.
#   bash tools/versions.sh                  every corner without a result of this commit; then writes docs/support.md
#   bash tools/versions.sh --only oldest    one corner, again
#   bash tools/versions.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"
exec "$(find_python)" "$repo/tools/versions.py" "$@"
