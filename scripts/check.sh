#!/usr/bin/env bash
# Everything that must hold, in the order that fails fastest.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyright
.venv/bin/python -m pytest -q -n 4 -m "not e2e and not contract and not learning and not nightly"
.venv/bin/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder --durations 30 -m "(e2e or contract) and not learning and not soak and not nightly"
