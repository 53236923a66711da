#!/usr/bin/env bash
# install.sh [EXTRAS]: .venv with everything pinned. Torch comes first: asked for by another package it would bring
# several GB of CUDA packages to a machine that has no GPU. Does nothing when nothing changed since the last time.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}
stamp=.venv/.installed${extras:+-$extras}
inputs=$({ pwd -P; cat constraints.txt pyproject.toml scripts/install.sh; } | cksum) # a folder that was moved is installed again
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ]; then exit 0; fi
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
pip=".venv/bin/python -m pip --disable-pip-version-check -q"
.venv/bin/python -c 'import sys; sys.exit("rlpipe needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
if ! .venv/bin/python -c 'import torch; assert torch.__version__.split("+")[0] == "2.13.0"' 2>/dev/null; then
    echo "installing torch 2.13.0"
    if command -v nvidia-smi >/dev/null; then
        $pip install torch==2.13.0
    else
        $pip install torch==2.13.0+cpu 2>/dev/null ||
            $pip install torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
            $pip install torch==2.13.0
    fi
fi
echo "installing rlpipe and what it needs"
$pip install -c constraints.txt -e ".${extras:+[$extras]}"
echo "$inputs" >"$stamp"
[ -n "$extras" ] || echo "installed; more: scripts/install.sh agents (openai, for preset agent), gguf (a model of a GGUF file), environments, cluster"
