"""The model card: errors of metrics, and the licence of a base."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.extras.serve.card import base_licence


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags: [x]\n---\n# It\nlicense: no\n", "apache-2.0"),
        ("---\nlicense: 'mit'\n---\n", "mit"),
        ("---\ntags: [x]\n---\nlicense: mit\n", ""),
        ("# It\nlicense: mit\n", ""),
        (None, ""),
    ],
)
def test_the_licence_is_that_of_the_front_matter(tmp_path: Path, text: str | None, licence: str) -> None:
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert base_licence(str(tmp_path)) == licence and base_licence("") == ""
