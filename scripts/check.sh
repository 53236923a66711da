#!/usr/bin/env bash
# Everything that must hold, in the order that fails fastest. Lint and types are quick, and end it; of the tests both parts always run.
set -euo pipefail
cd "$(dirname "$0")/.."
trap 'exit 130' INT
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyright
# the processes that tests start read it, also where PYTHONDONTWRITEBYTECODE keeps each from writing it
.venv/bin/python -m compileall -q rlpipe flows tasks tests
failed=()
# what hangs where no signal is heard, in C, is ended after pytest-timeout had its time; the other processes take over the rest
late_s=$(.venv/bin/python -c "from tests.deadlines import DEADLINE_S; print(4 * DEADLINE_S)")
hangs="-o faulthandler_timeout=$late_s -o faulthandler_exit_on_timeout=true"
# shellcheck disable=SC2086 # two words an option
.venv/bin/python -m pytest -q -n 4 --dist worksteal $hangs -m "not e2e and not contract and not learning and not nightly" ||
    failed+=("unit tests")
.venv/bin/python -m pytest -v -n 4 --dist loadfile --no-loadscope-reorder --durations 30 -m "(e2e or contract) and not learning and not soak and not nightly" ||
    failed+=("end-to-end tests")
if [ ${#failed[@]} -gt 0 ]; then
    said=$(printf ', %s' "${failed[@]}")
    echo "failed: ${said:2}" >&2
    exit 1
fi
echo "passed: lint, types, unit tests, end-to-end tests"
