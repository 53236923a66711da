#!/usr/bin/env bash
# Everything that must hold, in the order that fails fastest.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyright
.venv/bin/python -m pytest -q -m "not e2e and not contract"
.venv/bin/python -m pytest -q -m "e2e or contract"
