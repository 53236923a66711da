#!/usr/bin/env bash
# on_node.sh COMMAND ...: a command whose scratch is a disk of this node. When it has ended, its logs are in .rlpipe/NODE of the checkout: a node
# that was given back is not to be looked at any more.
set -uo pipefail
scratch=${RLPIPE_SCRATCH:?flow.sbatch sets it}
here=$PWD/.rlpipe/$SLURMD_NODENAME
mkdir -p "$scratch" "$here"
began=$(mktemp)
bring() {
    (cd "$scratch" && find . -name '*.log' -newer "$began" -exec cp --parents -t "$here" {} +)
    rm -f "$began"
}
trap bring EXIT
trap : TERM INT # the command has them too, and ends first
"$@"
