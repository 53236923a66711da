"""The shell and Python blocks of README and docs: where they are, and
which of them cannot run here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.paths import ROOT

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
# page -> how a block begins -> why e2e/test_docs.py does not run it
NOT_HERE: dict[str, dict[str, str]] = {
    "README.md": {
        "make demo": (
            "minutes of training: report/test_learning.py trains the same preset to its end; "
            "`make test` is a quarter of an hour of tests"
        ),
    },
    "docs/cluster.md": dict.fromkeys(
        ("install -m 600", "for kind in", "docker", "scripts/install.sh", "(scrontab", "PATH=", "RLPIPE_ADDRESS="),
        "project/test_docs_cluster.py holds each command of the page to a test, or to why it cannot run here",
    ),
    "docs/engines.md": {
        ".venv/bin/rlpipe run tiny --run on-sglang": (
            "SGLang is installed by `make test-sglang`, whose suites run against it"
        )
    },
    "docs/gate.md": {
        ".venv/bin/prefect deployment run promote": (
            "a policy of the user's own: e2e/test_gate.py promotes one and rolls it back"
        )
    },
    "docs/gpu.md": {
        ".venv/bin/python scripts/gpu_smoke.py": "ten minutes on a GPU: project/test_gpu_first.py runs parts of it"
    },
    "docs/models.md": {
        "make smollm2": "minutes with a real model: e2e/test_smollm2.py runs the same preset, shortened",
        ".venv/bin/python speak.py": "asks what the block above trained: e2e/test_smollm2.py does it with its own run",
        ".venv/bin/python -m pip": "the user's own GGUF file: data/test_gguf.py, e2e/test_smollm2.py import real ones",
    },
    "docs/presets.md": {
        ".venv/bin/rlpipe run examples/profiles": (
            "minutes of training: README runs the same preset, and config/test_presets.py reads the profiles"
        )
    },
    "docs/nights.md": {
        ".venv/bin/rlpipe automations": (
            "a notification block of the user's own: e2e/test_nights.py applies them with one"
        )
    },
    "docs/lora.md": {
        ".venv/bin/python benchmarks/lora.py": (
            "an hour of training: e2e/test_lora.py trains and kills both kinds, shortened"
        )
    },
    "docs/overlap.md": {
        ".venv/bin/rlpipe run tiny": "minutes of training: e2e/test_overlap.py runs the same, shortened, and kills it"
    },
    "docs/distillation.md": {".venv/bin/rlpipe run tiny --run expert": "two runs: e2e/test_distillation.py, shortened"},
    "docs/search.md": {".venv/bin/rlpipe run tiny --run a": "four runs: e2e/test_search.py searches, shortened"},
    "docs/runs.md": {
        "export AWS_ACCESS_KEY_ID": (
            "a bucket of the user's own: e2e/test_learning.py trains the same preset, half as long, on a store on S3"
        ),
    },
    "docs/store.md": {
        ".venv/bin/python benchmarks/deltas.py": (
            "minutes of training a real model: store/test_deltas_trainer.py trains fifty steps of a small one"
        )
    },
    "docs/tracking.md": {
        ".venv/bin/mlflow ui": "a server that stays up: e2e/test_mlflow.py starts one and looks at its pages"
    },
    "docs/view.md": {
        ".venv/bin/rlpipe view": "a server that stays up: e2e/test_view.py starts one and looks at its pages"
    },
    "docs/why.md": {
        f".venv/bin/python benchmarks/{name}.py": (
            "many minutes of training: extras/why/test_why.py plants the same in runs that are simulated"
        )
        for name in ("why", "why_causes")
    },
    "docs/services.md": {
        "export RLPIPE_SERVICE_KEY": (
            "the address of another machine: e2e/test_services.py and e2e/test_topology.py start hosts"
        )
    },
}


LONG = (
    "docs/agents.md", "docs/benchmarks.md", "docs/environments.md", "docs/evaluation.md", "docs/filters.md",
    "docs/library.md", "docs/queries.md", "docs/store.md", "docs/what-if.md",
)  # one to five minutes each: for make nightly  # fmt: skip
# its run is for make nightly as well; make test-all plans it, and runs the like of README
PLANNED = ("docs/data.md",)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    A Python block that begins with a comment `# name.py` is the file of that
    name, which a shell block uses.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def why_not(self) -> str:
        """Why it cannot run here; empty: it can."""
        reasons = [reason for start, reason in NOT_HERE.get(self.page, {}).items() if self.text.startswith(start)]
        return reasons[0] if reasons else ""

    @property
    def file_name(self) -> str:
        """Of a Python block; empty: it has no name, and runs where it stands."""
        match = re.match(r"# (\w+\.py)\b", self.text)
        return match[1] if match else ""


def blocks(page: str) -> list[Block]:
    """The shell and Python blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text[: match.start()].count("\n") + 1, match[1], match[2])
        for match in re.finditer(r"^```(bash|sh|shell|console|python|py)\n(.*?)^```", text, re.S | re.M)
    ]
