#!/usr/bin/env bash
# install.sh [EXTRAS]: .venv with everything pinned. Torch comes first: asked for by another package it would bring
# several GB of CUDA packages to a machine that has no GPU. Does nothing when nothing changed since the last time. TORCH=cuda on a machine
# without a GPU whose .venv others see that have one (the login node of a cluster), TORCH=cpu where the GPUs are not to be used.
# install.sh --oldest|--newest: .venv-oldest, .venv-newest with what the tests need, and the first, the last torch and transformers that rlpipe
# runs with; all else as pinned. The newest are asked for at every call.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/machine.sh
. scripts/machine.sh
venv=.venv torch="==2.13.0" transformers="" extras=${1:-}
case $extras in
--oldest) venv=.venv-oldest torch="==2.11.0" transformers="==5.17.0" extras=test ;;
--newest) venv=.venv-newest torch="<2.16" transformers="<6" extras=test ;;
esac
stamp=$venv/.installed${extras:+-$extras}
inputs=$({ pwd -P; cat constraints.txt pyproject.toml scripts/install.sh; } | cksum) # a folder that was moved is installed again
if [ "$venv" != .venv-newest ] && [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ]; then exit 0; fi
python=$venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
tell_machine "$python"
at_least 3.11 "$version" || refuse "rlpipe needs Python 3.11 or newer, this is $version: PYTHON=python3.12 $0"
at_least 2.28 "$glibc" || refuse "torch has wheels for glibc 2.28 or newer (Ubuntu 20.04, Debian 10, RHEL 8), this is $glibc: take a newer system, or a container of one"
kind=${TORCH:-$(command -v nvidia-smi >/dev/null && echo cuda || echo cpu)}
has_torch() { $venv/bin/python -c 'import sys, torch; assert "==" + torch.__version__.split("+")[0] == sys.argv[1]' "$torch" 2>/dev/null; }
if ! has_torch; then
    if [ "$kind" = cuda ] && [ "$driver" != none ]; then
        want_driver "; without GPUs: TORCH=cpu $0"
        want_compiler "$python"
    fi
    [ -x $venv/bin/python ] || "$python" -m venv $venv
fi
pins=constraints.txt
if [ $venv != .venv ]; then # what transformers bounds goes with it
    pins=$venv/constraints.txt
    sed -E '/^(torch|transformers|huggingface_hub|tokenizers|safetensors)==/d' constraints.txt >"$pins"
    printf 'torch%s\ntransformers%s\n' "$torch" "$transformers" >>"$pins"
fi
pip="$venv/bin/python -m pip --disable-pip-version-check -q"
if ! has_torch; then
    echo "installing torch$torch ($kind)"
    if [ "$kind" = cuda ]; then
        $pip install -U "torch$torch"
    else
        index=https://download.pytorch.org/whl/cpu
        case $torch in
        ==*) $pip install "torch$torch+cpu" 2>/dev/null || $pip install "torch$torch+cpu" --extra-index-url $index 2>/dev/null ;;
        *) $pip install -U "torch$torch" --index-url $index 2>/dev/null ;; # beside another index, the newest would be one with CUDA
        esac || $pip install -U "torch$torch"
    fi
fi
echo "installing rlpipe and what it needs"
$pip install -c "$pins" ${transformers:+-U "transformers$transformers"} -e ".[all${extras:+,$extras}]"
echo "$inputs" >"$stamp"
[ -n "$extras" ] || echo "installed; more: scripts/install.sh agents (openai, for preset agent), gguf (a model of a GGUF file), environments, cluster"
