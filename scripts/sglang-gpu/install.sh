#!/usr/bin/env bash
# install.sh [VENV]: SGLang 0.5.23 for NVIDIA GPUs, in a virtual environment of its own: it pins another torch (2.14.1, CUDA 13) than rlpipe.
# Says first what this machine lacks, then installs, then compiles a kernel as SGLang does. Does nothing when it is there. Says what engines.python has to be.
set -euo pipefail
# shellcheck source=scripts/machine.sh
. "${0%/*}/../machine.sh"
venv=${1:-$HOME/.cache/rlpipe/sglang-gpu-0.5.23}
stamp=$venv/.sglang-gpu-0.5.23
python=${PYTHON:-python3}
cpu="; for a CPU: scripts/sglang-cpu/install.sh VENV"
command -v nvidia-smi >/dev/null || refuse "no NVIDIA driver here (nvidia-smi is missing)$cpu"
if [ ! -e "$stamp" ]; then
    tell_machine "$python"
    want_driver "$cpu"
    case ${version%.*} in
    3.11 | 3.12 | 3.13) ;;
    *) refuse "SGLang 0.5.23 has wheels for Python 3.11, 3.12 and 3.13 only, this is $version: PYTHON=python3.12 $0" ;;
    esac
    at_least 2.34 "$glibc" ||
        refuse "SGLang 0.5.23 has wheels for glibc 2.34 or newer (Ubuntu 22.04, Debian 12, RHEL 9), this is $glibc: run the engines in the image lmsysorg/sglang:v0.5.23, or take engines.kind = \"vllm\""
    want_compiler "$python"
    command -v "${CXX:-c++}" >/dev/null || refuse "no C++ compiler, with which SGLang builds kernels at its first request: apt-get install g++ (dnf install gcc-c++)"
    echo "installing SGLang 0.5.23 into $venv"
    mkdir -p "$(dirname "$venv")"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check -q install sglang==0.5.23
    "$venv/bin/python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: is the driver new enough?")'
    "$venv/bin/python" -c 'import sglang.launch_server'
    "${0%/*}/toolkit.sh" "$venv"
    touch "$stamp"
fi
echo "set engines.kind = \"sglang\" and engines.python = \"$venv/bin/python\""
