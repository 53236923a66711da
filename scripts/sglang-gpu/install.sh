#!/usr/bin/env bash
# install.sh [VENV]: SGLang 0.5.23 for NVIDIA GPUs, in a virtual environment of its own: it pins another torch (2.14.1, CUDA 13) than rlpipe.
# Does nothing when it is there. Says what engines.python has to be.
set -euo pipefail
venv=${1:-$HOME/.cache/rlpipe/sglang-gpu-0.5.23}
stamp=$venv/.sglang-gpu-0.5.23
if ! command -v nvidia-smi >/dev/null; then
    echo "no NVIDIA driver here (nvidia-smi is missing); for a CPU: scripts/sglang-cpu/install.sh VENV" >&2
    exit 2
fi
if [ ! -e "$stamp" ]; then
    echo "installing SGLang 0.5.23 into $venv"
    mkdir -p "$(dirname "$venv")"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check -q install sglang==0.5.23
    "$venv/bin/python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: is the driver new enough?")'
    "$venv/bin/python" -c 'import sglang.launch_server'
    touch "$stamp"
fi
echo "set engines.kind = \"sglang\" and engines.python = \"$venv/bin/python\""
