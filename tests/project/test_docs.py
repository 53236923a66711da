"""README and docs, read: every block has a language, runs in e2e/test_docs.py or is listed with why
not, and every link leads somewhere."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from rlpipe.config.pipeline import PipelineConfig
from tests.docs_blocks import LONG, NOT_HERE, PAGES, ROOT, blocks

WIDTH = 100  # of prose; ruff has the same for comments and docstrings (max-doc-length)
OTHER_PAGES = ["CONTRIBUTING.md", "infra/README.md", "tests/schemas/README.md"]
LANGUAGES = {"bash", "python", "toml", "json", "text", "mermaid"}
# a list, a table of words, a map, a reference made of the code: nobody reads them from the top
LOOKED_UP = ("README.md", "docs/index.md", "docs/glossary.md", "docs/architecture.md", "docs/config.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language(page: str) -> None:
    fences = re.findall(r"^```(.*)$", (ROOT / page).read_text(), re.M)
    assert len(fences) % 2 == 0 and set(fences[::2]) <= LANGUAGES and set(fences[1::2]) <= {""}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LOOKED_UP])
def test_a_page_opens_with_what_it_is_for_and_a_block_that_runs(page: str) -> None:
    """A bash or python block runs in e2e/test_docs.py or is listed with why not; a toml block is
    tried below."""
    title, _, opening = re.split(r"^## ", (ROOT / page).read_text(), maxsplit=1, flags=re.M)[0].partition("\n\n")
    assert title.startswith("# ") and opening.startswith("This page is for "), page
    assert re.search(r"^```(bash|python|toml)$", opening, re.M), f"{page}: no such block above its first heading"


@pytest.mark.parametrize("page", PAGES)
def test_a_config_of_a_page_is_taken(page: str) -> None:
    """Each toml block, put over the preset tiny, makes a valid config."""
    for block in re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M):
        tree = tomllib.loads((ROOT / "flows" / "presets" / "tiny.toml").read_text())
        tree["model"]["context_tokens_max"] = 2048  # room for the completions of the pages
        for name, value in tomllib.loads(block).items():
            if name == "extends":
                assert value == "tiny", f"{page}: a block that extends something else is not valid over tiny"
            elif isinstance(value, dict):
                tree[name] = {**tree.get(name, {}), **value}
            else:
                tree[name] = [*tree["data"], *value] if name == "data" else value
        PipelineConfig.model_validate(tree)


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_called_alike(page: str) -> None:
    for block in blocks(page):
        if block.language == "bash":
            bare = re.findall(r"^(?:rlpipe|prefect|mlflow|python3?)\s.*", block.text, re.M)
            assert not bare, f"{page}:{block.line}: as everywhere, .venv/bin/{bare[0]}"


@pytest.mark.parametrize("page", PAGES)
def test_a_file_of_a_page_is_used_by_a_command(page: str) -> None:
    shell = "".join(block.text for block in blocks(page) if block.language == "bash")
    for block in blocks(page):
        assert not block.file_name or block.file_name.removesuffix(".py") in shell, f"{page}:{block.line}"


def test_what_cannot_run_is_there() -> None:
    for page, starts in NOT_HERE.items():
        for start in starts:
            assert any(block.text.startswith(start) for block in blocks(page)), (
                f"{page}: no block begins with {start!r}"
            )


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LONG])
def test_no_page_runs_a_benchmark_for_an_hour(page: str) -> None:
    running = [block for block in blocks(page) if "benchmarks/" in block.text and not block.why_not]
    assert not running, f"{page}:{running[0].line}: list it in NOT_HERE, or the page in LONG"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                f"{page}: {target}"
            )


def test_the_ways_of_the_architecture_lead_through_the_code() -> None:
    """Each way has at most 12 stops, none twice, and what a stop names is defined in its file."""
    ways = (ROOT / "docs" / "architecture.md").read_text().split("## The way of a ")[1:]
    assert len(ways) == 2
    for way in ways:
        stops = re.findall(r"^\d+\. `([\w/.]+)`: `(\w+)`", way, re.M)
        assert 0 < len(stops) <= 12 and len(set(stops)) == len(stops)
        for file, name in stops:
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            defined = {
                node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            }
            assert name in defined, f"docs/architecture.md: {file} has no {name}"


def test_every_file_of_the_repository_that_a_page_names_is_there() -> None:
    for page in (*PAGES, "CONTRIBUTING.md"):
        for path in re.findall(
            r"`((?:rlpipe|flows|tasks|tests|scripts|benchmarks|docs|infra)/[\w/.-]*\.\w+)`", (ROOT / page).read_text()
        ):
            assert (ROOT / path).exists(), f"{page}: there is no {path}"


def too_long(markdown: str) -> list[int]:
    """The numbers of the lines of prose that end beyond WIDTH and could be cut at a blank.

    Code, in fences or indented behind an empty line, and tables are no prose.
    """
    numbers, in_fence, in_code, before = [], False, False, ""
    for number, line in enumerate(markdown.splitlines(), 1):
        is_fence = re.match(r" *(```|~~~)", line) is not None
        in_fence ^= is_fence
        in_code = line.startswith("    ") and (in_code or not before.strip())
        words = re.sub(r"^\s*([-*+>]|\d+[.)])?\s+", "", line)
        if not (is_fence or in_fence or in_code or line.lstrip().startswith("|")) and " " in words:
            numbers += [number] if len(line) > WIDTH else []
        before = line
    return numbers


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES])
def test_prose_is_narrow_enough_to_read_side_by_side(page: str) -> None:
    assert too_long((ROOT / page).read_text()) == [], page


def test_the_width_of_prose_is_seen_and_not_that_of_code() -> None:
    prose, word = "a word " * 15, "x" * WIDTH
    assert too_long(f"{prose}\n\n- {prose}\n  {prose}\n") == [1, 3, 4]
    assert too_long(f"```text\n{prose}\n```\n\n    {prose}\n\n| {prose} |\n\n- {word}\n") == []
