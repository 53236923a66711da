#!/usr/bin/env bash
# install.sh VENV: an unmodified SGLang 0.5.23 that runs on a CPU, in a virtual environment of its own (3 min, 2.4 GiB).
# Does nothing when it is there. SGLang pins a newer torch; this combination was seen working with torch 2.13.0 (CPU).
set -euo pipefail
venv=${1:?usage: install.sh VENV}
if [ -e "$venv/.sglang-0.5.23" ]; then exit 0; fi
echo "installing SGLang 0.5.23 into $venv"
"${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check -q"
# torch first, and the CPU build where it can be had: see scripts/install.sh
$pip install torch==2.13.0+cpu 2>/dev/null ||
    $pip install torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    $pip install torch==2.13.0
$pip install torch==2.13.0 transformers==5.19.0 numpy 'uvicorn>=0.51' fastapi uvloop aiohttp pyzmq orjson psutil requests tqdm \
    packaging pydantic python-multipart setproctitle msgspec pillow prometheus-client pybase64 regex sentencepiece tiktoken \
    xxhash zstandard einops interegular partial_json_parser IPython openai==2.8.0 openai-harmony==0.0.4 anthropic gguf \
    compressed-tensors==0.18.0 scipy jsonschema soundfile dill xgrammar==0.2.7
$pip install --no-deps triton==3.6.0 torchvision==0.28.0 apache-tvm-ffi==0.1.11 sglang==0.5.23
touch "$venv/.sglang-0.5.23"
