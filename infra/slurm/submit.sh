#!/usr/bin/env bash
# submit.sh CONFIG RUN STORE: queues a run's flow, trainer gang and engine hosts, from a checkout that all nodes see.
# The same names again: goes on where it was, after what of it still runs has ended (singleton).
set -euo pipefail
config=${1:?usage: submit.sh CONFIG RUN STORE}
run=${2:?usage: submit.sh CONFIG RUN STORE}
store=${3:?usage: submit.sh CONFIG RUN STORE}
cd "$(dirname "$0")/../.."
flow=$(sbatch --parsable --job-name="rlpipe-$run" --dependency=singleton infra/slurm/flow.sbatch "$config" "$run" "$store")
trainer=$(sbatch --parsable --job-name="rlpipe-$run-trainer" --dependency="after:$flow,singleton" infra/slurm/trainer.sbatch "$run" "$store")
engines=$(sbatch --parsable --job-name="rlpipe-$run-engines" --dependency="after:$flow,singleton" infra/slurm/engines.sbatch "$run" "$store")
echo "run $run: jobs $flow (flow), $trainer (trainer), $engines (engines); scancel $flow stops it"
