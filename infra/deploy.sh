#!/usr/bin/env bash
# deploy.sh process|kubernetes: makes or updates the work pools and deployments on the server of PREFECT_API_URL.
set -euo pipefail
type=${1:?usage: deploy.sh process|kubernetes}
cd "$(dirname "$0")/.."
for pool in cpu train-gpu rollout-gpu; do
    template=()
    if [ "$type" = kubernetes ]; then template=(--base-job-template "infra/work-pools/$pool.json"); fi
    prefect --no-prompt work-pool create "$pool" --type "$type" --overwrite "${template[@]}"
done
prefect --no-prompt deploy --all
