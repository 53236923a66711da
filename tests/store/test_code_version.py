"""The version of the code that records name: a commit, and a hash of what was edited since."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from rlpipe.store.code_version import FILE_BYTES_MAX, FILES_MAX, PACKAGES, code_version, version_of


def git(root: Path, *command: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    return subprocess.run(
        ["git", *identity, *command], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def packages(root: Path) -> Path:
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("a = 1\n")
    return root


def checkout(root: Path) -> str:
    """Makes a checkout of the three packages; its commit."""
    (packages(root) / ".gitignore").write_text("__pycache__/\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return git(root, "rev-parse", "--short=12", "HEAD")


def test_of_a_clean_checkout_it_is_the_commit_wherever_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, other = checkout(tmp_path / "a"), checkout(tmp_path / "b" / "c")
    git(tmp_path / "a", "worktree", "add", "-q", str(tmp_path / "w"))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for name in ("README.md", "my_rewards.py"):  # beside the code: a user works here
        (tmp_path / "a" / name).write_text("x")
    (tmp_path / "a" / "rlpipe" / "__pycache__").mkdir()
    (tmp_path / "a" / "rlpipe" / "__pycache__" / "a.pyc").write_bytes(b"x")
    monkeypatch.chdir(tmp_path / "b" / "c")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "b" / "c" / ".git"))  # as in a hook of another checkout
    assert [version_of(tmp_path / name) for name in ("a", "w", "link", "b/c")] == [commit, commit, commit, other]


def test_edited_code_has_a_hash_which_is_that_of_the_edit(tmp_path: Path) -> None:
    versions = []
    for index, edited in enumerate(["rlpipe/__init__.py", "flows/__init__.py", "rlpipe/new.py", "tasks/a\n\udcff.py"]):
        root = tmp_path / str(index)
        commit = checkout(root)
        (root / edited).write_text("a = 2\n")
        versions.append(version_of(root))
        assert versions[-1].startswith(f"{commit}-dirty-") and version_of(root) == versions[-1]
        git(root, "add", "-A")
        assert version_of(root) == versions[-1], "staged it is the same edit"
        git(root, "commit", "-q", "-m", "second")
        assert version_of(root) == git(root, "rev-parse", "--short=12", "HEAD")
    checkout(tmp_path / "gone")
    (tmp_path / "gone" / "rlpipe" / "__init__.py").unlink()
    checkout(tmp_path / "again")
    (tmp_path / "again" / "rlpipe" / "__init__.py").write_text("a = 2\n")
    git(tmp_path / "again", "config", "diff.noprefix", "true")
    versions.append(version_of(tmp_path / "gone"))
    ends = [name.rsplit("-", 1)[1] for name in versions]
    assert len(set(ends)) == len(ends)
    assert version_of(tmp_path / "again").rsplit("-", 1)[1] == ends[0], (
        "the same edit, of a checkout with other settings"
    )


def test_what_is_large_is_not_read(tmp_path: Path) -> None:
    checkout(tmp_path)
    with (tmp_path / "rlpipe" / "core").open("wb") as file:
        file.truncate(1 << 40)
    before = version_of(tmp_path)
    assert "-dirty-" in before
    with (tmp_path / "rlpipe" / "core").open("r+b") as file:
        file.seek(FILE_BYTES_MAX)
        file.write(b"x")
    assert version_of(tmp_path) == before
    for index in range(FILES_MAX + 1):
        (tmp_path / "rlpipe" / f"f{index:05d}").write_bytes(b"")
    before = version_of(tmp_path)
    (tmp_path / "rlpipe" / f"f{FILES_MAX:05d}").write_bytes(b"x")
    assert version_of(tmp_path) == before, "its content is read"


@pytest.mark.skipif(os.getuid() != 0, reason="another user's checkout can be made by root only")
def test_a_checkout_of_another_user_has_its_commit(tmp_path: Path) -> None:
    commit = checkout(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")]:
        os.chown(path, 12_345, 12_345)
    assert version_of(tmp_path / "a") == version_of(tmp_path / "link") == commit


def test_without_a_checkout_it_is_the_version_and_a_hash_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout(tmp_path / "mine")
    installed = [packages(tmp_path / name) for name in ("site-packages", "mine/.venv/site-packages")]
    unborn = packages(tmp_path / "unborn")
    git(unborn, "init", "-q")
    (installed[0] / "rlpipe" / "__pycache__").mkdir()
    (installed[0] / "rlpipe" / "__pycache__" / "a.pyc").write_bytes(b"x")
    versions = {version_of(root) for root in [*installed, unborn]}
    assert len(versions) == 1 and versions.pop().startswith(f"{version('rlpipe')}-files-")
    before = version_of(installed[0])
    (installed[0] / "tasks" / "__init__.py").write_text("a = 2\n")
    assert version_of(installed[0]) not in (before, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version_of(tmp_path / "mine") == before, "no git here"


def test_this_code_has_one() -> None:
    assert code_version() == code_version() != ""
