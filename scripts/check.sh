#!/usr/bin/env bash
# `make test`: lint and types, which fail fastest and end it, then the quick unit tests and one pipeline of each kind.
# `scripts/check.sh rest` is `make test-all`: all tests that `make test` leaves out; `spare` is `make spare`. Of the tests all parts always run.
# shellcheck disable=SC2329 # `part` calls the functions
set -euo pipefail
cd "$(dirname "$0")/.."
trap 'exit 130' INT
in_ci="not learning and not soak and not spare and not nightly"
whole="e2e or contract"
took=()
failed=()

minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

ended() {
    local said
    said=$(printf ', %s' "${took[@]}")
    echo "took $(minutes $SECONDS): ${said:2}"
    if [ ${#failed[@]} -gt 0 ]; then
        said=$(printf ', %s' "${failed[@]}")
        echo "failed: ${said:2}" >&2
        exit 1
    fi
    said=$(printf ', %s' "${took[@]% *}")
    echo "passed: ${said:2}"
    exit
}

# part NAME COMMAND...: runs the command, and notes how long it took and whether it failed
part() {
    local name=$1 began=$SECONDS
    shift
    "$@" || failed+=("$name")
    took+=("$name $(minutes $((SECONDS - began)))")
}

lint() { .venv/bin/ruff check . && .venv/bin/ruff format --check .; }

# the processes that tests start read it, also where PYTHONDONTWRITEBYTECODE keeps each from writing it
compile() { .venv/bin/python -m compileall -q rlpipe flows tasks tests; }

# the files with a test that has one of these marks: to import all others takes each process of pytest ten seconds
having() { grep -rlE "mark\.($1)\b" tests --include='test_*.py' | sort; }

# unit DISTRIBUTION MARKS [FILE...]: loadfile has fewer servers and trainers, worksteal parts files of a few minutes
unit() {
    local late_s
    # what hangs where no signal is heard, in C, is ended after pytest-timeout had its time; the other processes take over the rest
    late_s=$(.venv/bin/python -c "from tests.deadlines import DEADLINE_S; print(4 * DEADLINE_S)")
    .venv/bin/python -m pytest -q -n 4 --dist "$1" --durations 20 -o "faulthandler_timeout=$late_s" -o faulthandler_exit_on_timeout=true -m "${@:2}"
}

pipelines() { .venv/bin/python -m pytest -v -n 4 --dist loadfile --no-loadscope-reorder --durations 30 -m "$@"; }

if [ "${1:-}" = rest ]; then
    echo "the tests that make test leaves out: about 45 minutes on two quiet cores"
    compile
    mapfile -t slow < <(having slow)
    mapfile -t others < <(having "e2e|contract")
    part "slow unit tests" unit worksteal "slow and not ($whole) and $in_ci" "${slow[@]}"
    part "end-to-end tests" pipelines "($whole) and not first and $in_ci" "${others[@]}"
    ended
fi
if [ "${1:-}" = spare ]; then
    echo "whole pipelines that CI leaves to a slow machine's night: about 8 minutes on two quiet cores"
    mapfile -t spare < <(having spare)
    part "spare pipelines" pipelines "spare" "${spare[@]}"
    ended
fi
echo "lint, types, quick unit tests, a pipeline of each kind: about 15 minutes on two quiet cores"
part lint lint
[ ${#failed[@]} -eq 0 ] || ended
part types .venv/bin/pyright
[ ${#failed[@]} -eq 0 ] || ended
compile
mapfile -t first < <(having first)
part "unit tests" unit loadfile "not slow and not ($whole) and $in_ci"
part pipelines pipelines "first and $in_ci" "${first[@]}"
ended
