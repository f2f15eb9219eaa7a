#!/usr/bin/env bash
# Makes a virtual environment with strop and the given extras: tools/setup.sh .venv dev,quickstart
#
# PYTHON chooses the interpreter (3.11 or later; the first found is used otherwise). Where there is no NVIDIA GPU, torch is
# the CPU build, a tenth of the download, if there is one: among the wheels that pip is configured to look at, or at the index
# that TORCH_INDEX names. uv does the installing if it is on the PATH, else pip does.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?"usage: tools/setup.sh VENV [EXTRAS]"}
extras=${2:-dev,quickstart}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 python}; do
        if is_recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "strop needs Python 3.11 or later and none was found; install one, or name it: make PYTHON=/path/to/python3.11" >&2
    return 1
}

pip_install() {
    if command -v uv >/dev/null; then
        UV_FIND_LINKS=${UV_FIND_LINKS:-$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)} \
            uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

install_cpu_torch() {
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    if [ -n "${TORCH_INDEX:-}" ]; then
        "${pip[@]}" --no-deps --index-url "$TORCH_INDEX" "torch>=2.11"
    elif ! "${pip[@]}" --no-index --no-deps "torch>=2.11" 2>/dev/null; then
        echo "no CPU build of torch is at hand, so the default build is installed, which may hold gigabytes of GPU libraries;" >&2
        echo "make TORCH_INDEX=URL names the index of PyTorch's CPU builds instead (see pytorch's own installation page)" >&2
    fi
}

if [ ! -x "$venv/bin/python" ]; then
    "$(find_python)" -m venv "$venv"
fi
if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
    echo "installing torch (CPU build) into $venv"
    install_cpu_torch
fi
echo "installing strop[$extras] into $venv"
pip_install --editable ".[$extras]"
