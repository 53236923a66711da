#!/usr/bin/env bash
# install.sh [EXTRAS]: .venv with everything pinned. Torch comes first: asked for by another package it would bring
# several GB of CUDA packages to a machine that has no GPU. Does nothing when nothing changed since the last time. TORCH=cuda on a machine
# without a GPU whose .venv others see that have one (the login node of a cluster), TORCH=cpu where the GPUs are not to be used.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/machine.sh
. scripts/machine.sh
extras=${1:-}
stamp=.venv/.installed${extras:+-$extras}
inputs=$({ pwd -P; cat constraints.txt pyproject.toml scripts/install.sh; } | cksum) # a folder that was moved is installed again
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ]; then exit 0; fi
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
tell_machine "$python"
at_least 3.11 "$version" || refuse "rlpipe needs Python 3.11 or newer, this is $version: PYTHON=python3.12 $0"
at_least 2.28 "$glibc" || refuse "torch 2.13.0 has wheels for glibc 2.28 or newer (Ubuntu 20.04, Debian 10, RHEL 8), this is $glibc: take a newer system, or a container of one"
torch=${TORCH:-$(command -v nvidia-smi >/dev/null && echo cuda || echo cpu)}
has_torch() { .venv/bin/python -c 'import torch; assert torch.__version__.split("+")[0] == "2.13.0"' 2>/dev/null; }
if ! has_torch; then
    if [ "$torch" = cuda ] && [ "$driver" != none ]; then
        want_driver "; without GPUs: TORCH=cpu $0"
        want_compiler "$python"
    fi
    [ -x .venv/bin/python ] || "$python" -m venv .venv
fi
pip=".venv/bin/python -m pip --disable-pip-version-check -q"
if ! has_torch; then
    echo "installing torch 2.13.0 ($torch)"
    if [ "$torch" = cuda ]; then
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
