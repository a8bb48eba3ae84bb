#!/usr/bin/env bash
# Builds the sdist, and the wheel from the sdist, then tries the wheel in a new environment: `ds-zo train` does the
# embedded job, two ranks train, a user's file passes `mypy --strict`, and `pip uninstall` leaves no file behind.
# The two files are then in dist/. The environments are made in a temporary folder, and removed.
#   bash tools/wheel.sh              all of that
#   bash tools/wheel.sh --versions   only: the version, CITATION.cff, and a tag of this commit agree
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"
cd "$repo"

version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' ds_zo/__init__.py)"
cited="$(sed -n 's/^version: //p' CITATION.cff)"
[ "$cited" = "$version" ] ||
    fail "one version number: ds_zo.__version__ is $version, but CITATION.cff has $cited; write $version there"
tags="$(git tag --points-at HEAD 'v*')"
for tag in $tags; do
    [ "$tag" = "v$version" ] ||
        fail "a tag names ds_zo.__version__, $version, but this commit has $tag; move the tag or set __version__"
    grep -q "^## \[$version\]" CHANGELOG.md ||
        fail "a tagged commit has its section in CHANGELOG.md, but '## [$version]' is not there; rename [Unreleased]"
done
say "version $version, as in CITATION.cff and in the tags of this commit (${tags:-none})"
[ "${1:-}" != --versions ] || exit 0

mkdir -p "$repo/runs"
work="$(mktemp -d -p "$repo/runs")"  # not in /tmp, which may be memory
trap 'rm -rf "$work"' EXIT
python="$(find_python)"
export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Two environments that share extensions compile them again and again: the paths of their headers differ.
export TORCH_EXTENSIONS_DIR="$work/torch_extensions"
unset PYTHONPATH

say "building the sdist, and the wheel from it"
mkdir "$work/source" "$work/empty"
git ls-files --cached --others --exclude-standard -z | tar --create --file - --null --files-from - | tar --extract --file - -C "$work/source"
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --no-compile --constraint constraints.txt build mypy pydantic
"$work/tools/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 ||
    { tail -n 20 "$work/build.log"; fail "the build failed: see the lines above"; }
[ "$(cd "$work/dist" && echo *)" = "ds_zo-$version-py3-none-any.whl ds_zo-$version.tar.gz" ] ||
    fail "a build makes a wheel and an sdist of $version, got: $(ls "$work/dist")"

say "installing the wheel in a new environment"
# Without --no-compile pip compiles all modules of torch; Python compiles the few that are imported.
"$python" -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile --constraint constraints.txt torch
before="$(cd "$work/env" && find . -path '*ds_zo*' | sort)"
"$work/env/bin/pip" install --quiet --no-compile --constraint constraints.txt "$work/dist/ds_zo-$version-py3-none-any.whl"

say "ds-zo train: the embedded job"
cd "$work/empty"
timeout 900 "$work/env/bin/ds-zo" train >"$work/train.log" 2>&1 || { tail -n 20 "$work/train.log"; fail "ds-zo train failed"; }
grep '^test ' "$work/train.log"
[ ! -e "$TORCH_EXTENSIONS_DIR" ] || fail "ds-zo train on one process must compile nothing, got: $(ls "$TORCH_EXTENSIONS_DIR")"
"$work/env/bin/python" - <<'PYTHON' || fail "ds-zo train must raise the accuracy by a tenth, and save the model"
import json
from pathlib import Path

row = json.loads(Path("runs/zo-code_or_text/summary.json").read_text())
assert row["steps"] == 200 and row["after"] > row["before"] + 0.1, row
assert Path(row["model_folder"], "model.safetensors").is_file(), row
PYTHON

say "deepspeed --module ds_zo.training: two ranks"
port="$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
PATH="$work/env/bin:$PATH" timeout 900 deepspeed --num_accelerators 2 --master_port "$port" --module ds_zo.training --method lomo \
    --steps 2 --num-eval 8 >"$work/ranks.log" 2>&1 || { tail -n 20 "$work/ranks.log"; fail "two ranks failed"; }
grep -q '"batch_size": 32' runs/lomo-code_or_text/summary.json || fail "two ranks make batches of 2 x 16 sequences"

say "mypy --strict on a user's file"
cp "$repo/tests/typed_user.py" "$work/empty/"  # beside tests/__init__.py mypy would read the repository's ds_zo
"$work/tools/bin/mypy" --strict --python-executable "$work/env/bin/python" --cache-dir "$work/mypy" \
    "$work/empty/typed_user.py"

say "pip uninstall leaves no file behind"
"$work/env/bin/pip" uninstall --quiet --yes ds-zo
after="$(cd "$work/env" && find . -path '*ds_zo*' | sort)"
[ "$before" = "$after" ] || fail "pip uninstall must remove every file of ds_zo, left: $after"

mkdir -p "$repo/dist"
cp "$work/dist/"* "$repo/dist/"
say "the wheel is right: dist/ds_zo-$version-py3-none-any.whl and dist/ds_zo-$version.tar.gz"
