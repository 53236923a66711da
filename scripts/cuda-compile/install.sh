#!/usr/bin/env bash
# install.sh FOLDER: Triton with its ptxas, as the CUDA build of torch 2.13.0 has it (200 MB fetched, 0.7 GB kept). Does nothing when it is there.
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
if [ -e "$folder/.installed" ]; then exit 0; fi
command -v g++ >/dev/null || { echo "scripts/cuda-compile needs g++: apt-get install g++"; exit 1; }
.venv/bin/python -m pip --disable-pip-version-check -q install --no-deps --upgrade --target "$folder" triton==3.7.1
touch "$folder/.installed"
