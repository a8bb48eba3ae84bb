#!/usr/bin/env bash
# Sets up .venv with the extra `docs`, then builds the site of mkdocs.yml into runs/site. A warning is an error. Where
# there is a Chromium, it opens every page at the width of a phone and of a desktop.
# Arguments are passed on to `mkdocs build`: bash tools/docs.sh --site-dir DIR
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"

use_environment docs
share_environment

cd "$repo"
say "mkdocs build --strict $*"
NO_MKDOCS_2_WARNING=1 mkdocs build --strict "$@"  # --quiet would hide warnings from --strict
if [ $# = 0 ]; then
    python tools/look_at_pages.py runs/site
    say "the site is in runs/site: open runs/site/index.html"
fi
