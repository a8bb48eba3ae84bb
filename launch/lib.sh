# Sourced by the scripts of launch/ and tools/: one local environment, made once, renewed when its description changes.

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$repo/.venv"

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The first interpreter that really runs (a pyenv shim may not), is 3.10 to 3.13, and can make environments.
# 3.11 is asked first because that is where constraints.txt was tested.
find_python() {
    local candidate
    # PYTHON may be one path, with spaces in it, or several names.
    for candidate in ${PYTHON:+"$PYTHON"} ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3 python}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' \
            >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no usable Python: need 3.10 to 3.13 with the venv module, tried '${PYTHON:-python3.11 python3.12 python3.13 \
python3.10 python3 python}' (install one, or name it: PYTHON=/path/to/python bash launch/quickstart.sh)"
}

# A killed build leaves a `lock` file on which every later load waits for ever. They are stale only when nobody else
# works in this environment: whoever runs from it holds a shared lock, so an exclusive one proves that we are alone.
remove_stale_build_locks() {
    local lock
    find "$TORCH_EXTENSIONS_DIR" -name lock -type f | while read -r lock; do
        say "removing $lock, left by a build that was killed"
        rm -f "$lock"
    done
}

# What an installation depends on: where it is, which Python, what it was asked for.
describe_install() {
    printf '%s\n%s\n' "$repo" "$1"
    "$venv/bin/python" --version
    cat "$repo/pyproject.toml" "$repo/constraints.txt"
}

# install_package EXTRAS: the package, editable, with its extras ("" for none), at the tested versions.
install_package() {
    local extras="$1" stamp="$venv/.installed-${1:-base}" wanted
    wanted="$(describe_install "$extras" | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        say "environment is up to date: .venv"
        return
    fi
    say "installing torch (a CUDA build where pip finds one: gigabytes; minutes)"
    "$venv/bin/python" -m pip install --quiet --constraint "$repo/constraints.txt" torch
    say "installing ds-zo${extras:+[$extras]} and its dependencies"
    "$venv/bin/python" -m pip install --quiet --constraint "$repo/constraints.txt" --editable "$repo${extras:+[$extras]}"
    rm -f "$TORCH_EXTENSIONS_DIR"/.built-*  # another torch or DeepSpeed wants its extensions compiled again
    printf '%s\n' "$wanted" >"$stamp"
}

# Makes .venv unless a working one is there. Environments cannot be moved: one that was, is made anew.
make_environment() {
    local python
    if [ -e "$venv/.location" ] && ! [ "$(cat "$venv/.location")" -ef "$venv" ]; then
        say "emptying .venv: it was made at $(cat "$venv/.location")"
        find "$venv" -mindepth 1 ! -name .in-use -delete
    elif [ -e "$venv/bin/python" ] && ! "$venv/bin/python" -c '' >/dev/null 2>&1; then
        say "emptying .venv: its Python no longer runs"
        find "$venv" -mindepth 1 ! -name .in-use -delete
    fi
    if [ ! -e "$venv/bin/python" ]; then
        python="$(find_python)"
        say "making .venv with $python"
        "$python" -m venv "$venv"
        printf '%s\n' "$venv" >"$venv/.location"
    fi
    if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
        say "adding pip, which .venv lacks"
        "$venv/bin/python" -m ensurepip
    fi
}

# use_environment EXTRAS: an up-to-date .venv, first on PATH. Until share_environment, other runs wait for this one.
use_environment() {
    export TORCH_EXTENSIONS_DIR="$venv/torch_extensions"
    export PATH="$venv/bin:$PATH"  # ninja and the deepspeed launcher are looked up there
    export TOKENIZERS_PARALLELISM=false
    mkdir -p "$TORCH_EXTENSIONS_DIR"
    if ! command -v flock >/dev/null; then
        remove_stale_build_locks
    else
        exec 9>"$venv/.in-use"
        if flock --exclusive --nonblock 9; then
            remove_stale_build_locks
        else
            say "another run uses .venv: waiting for the end of its set-up"
            flock --shared 9
        fi
    fi
    make_environment
    install_package "$1"
}

# build_extensions BUILDER...: what DeepSpeed would otherwise compile in the middle of the first run, for minutes.
# Builders that this machine's accelerator does not have are passed over.
build_extensions() {
    local builder log="$venv/extensions.log"
    export MAX_JOBS="${MAX_JOBS:-2}"
    for builder in "$@"; do
        [ -e "$TORCH_EXTENSIONS_DIR/.built-$builder" ] && continue
        say "building DeepSpeed's $builder, once (needs a C++ compiler; one to three minutes on two cores)"
        if python - "$builder" >"$log" 2>&1 <<'PYTHON'; then
import sys

from deepspeed.accelerator import get_accelerator

builder = get_accelerator().create_op_builder(sys.argv[1])
if builder is not None:
    builder.load(verbose=False)
PYTHON
            touch "$TORCH_EXTENSIONS_DIR/.built-$builder"
        else
            tail -n 20 "$log"
            say "that failed (log: $log); going on, DeepSpeed will say so where it needs it"
        fi
    done
}

# Set-up is over: let other runs in, and keep telling them that this one is here.
share_environment() {
    if command -v flock >/dev/null; then
        flock --shared 9
    fi
}

# For scripts that run the CPU's tests in the .venv of launch/test.sh: its environment, in the repository's root.
enter_tests() {
    export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
    use_environment "test,peft"
    share_environment
    cd "$repo"
}
