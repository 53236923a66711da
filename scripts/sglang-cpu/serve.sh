#!/usr/bin/env bash
# serve.sh VENV MODEL_DIR PORT [more SGLang flags]: a real SGLang on this CPU (20-60 s to /health, about 1.9 GiB).
set -euo pipefail
venv=${1:?VENV} model=${2:?MODEL_DIR} port=${3:?PORT}
shift 3
if [ ! -e "$venv/.sglang-0.5.23" ]; then
    echo "no SGLang in $venv: scripts/sglang-cpu/install.sh $venv" >&2
    exit 2
fi
# shims: stand-ins for two packages that exist only as CUDA builds; no file of SGLang is touched
PYTHONPATH=$(cd "$(dirname "$0")" && pwd)/shims
export PYTHONPATH SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
exec "$venv/bin/python" -m sglang.launch_server --model-path "$model" --device cpu --dtype float32 \
    --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --disable-cuda-graph \
    --disable-overlap-schedule --mem-fraction-static 0.05 --max-total-tokens 8192 --context-length 512 \
    --host 127.0.0.1 --port "$port" --skip-server-warmup --sleep-on-idle "$@"
