"""Every field of the config with every odd value: refused by one line that names the field, or a
config that the store can keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import canonical_json
from rlpipe.config.fields import config_fields
from rlpipe.config.pipeline import stored_tree
from rlpipe.config.source import check, read_config
from rlpipe.store.backend import open_store
from tests.paths import PRESETS

ODD = [
    "nan", "inf", "-inf", "-1", "0", "1e300", "1e-300", str(10**21), "''", "'text'", "true",
    "[]", "[[]]", "{}", "[nan]", "{a = nan}",
    "{a = {b = inf}}", "none", "'\\u0000'", "'" + "x" * 100_000 + "'", "2024-01-01", f"[{10**30}]", "'../..'",
    "'$(id)'", "9007199254740993",
]  # fmt: skip


def told(*sets: str) -> str:
    """What the config is refused with; empty when it is taken, which the store can then keep."""
    try:
        config = read_config("tiny", list(sets), PRESETS)
    except UserError as error:
        return str(error)
    assert b"NaN" not in canonical_json(stored_tree(config))
    assert all(abs(number) <= (2**53 if isinstance(number, int) else 1e30) for number in numbers(config.model_dump()))
    return ""


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from numbers(entry)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize("section", sorted({field.name.split(".")[0] for field in config_fields()}))
def test_every_field_takes_or_refuses_every_odd_value_by_name(section: str) -> None:
    names = [field.name.replace("NAME", "words") for field in config_fields() if field.name.split(".")[0] == section]
    num_refused = 0
    for name in names:
        for value in ODD:
            refused = told(f"{name}={value}")
            num_refused += bool(refused)
            lines = refused.splitlines()
            assert all(len(line) < 1200 and ("=" in line or ":" in line) for line in lines), (
                name,
                value[:40],
                refused[:300],
            )
            last = name.rsplit(".", 1)[-1]
            assert not refused or section in refused or last in refused or "data set" in refused, (
                name,
                value[:40],
                refused[:300],
            )
    assert num_refused > len(names)


CASES = {
    "rl.clip_high=inf": "rl.clip_high", "evaluation.pass_threshold=nan": "evaluation.pass_threshold",
    "data.words.weight=inf": "data.words.weight",
    "rl.num_iterations=1000000000000000000000": "rl.num_iterations", "model.num_heads=3": "model.hidden_size",
    "model.hidden_size=12": "model.hidden_size",
    "model.num_kv_heads=3": "model.num_heads", "rl.filters={nonzero_std = nan}": "rl.filters.nonzero_std",
    "rl.rewards={exact = inf}": "rl.rewards.exact",
    "rl.reward_args={exact = {a = nan}}": "rl.reward_args.exact.a",
    "data.words.args={seed = 99999999999999999999}": "args.seed",
    "rl.reward_timeout_s=1e9": "rl.reward_timeout_s", "rl.temperature=1e-9": "rl.temperature",
    "stop.kl_max=inf": "stop.kl_max",
    "engines.progress_timeout_s=nan": "engines.progress_timeout_s", "rl.kl_coef=inf": "rl.kl_coef", "run=../x": "run",
    "run=.": "run", "run=-x": "run",
}  # fmt: skip


@pytest.mark.parametrize("override", CASES)
def test_what_was_once_taken_and_cost_hours_is_refused_by_its_field(override: str) -> None:
    assert CASES[override] in told(override).split("=")[0] + told(override).split(":")[0]


STORES = [
    "file://host/path",
    "file://./x",
    "file://",
    "s3://",
    "s3://b/x?y",
    "s3://b/x#y",
    "http://x/y",
    "gs://b",
    "memory://",
    "a\0b",
    "file:///a\0",
]


@pytest.mark.parametrize("url", STORES)
def test_a_store_url_is_refused_rather_than_read_as_another(url: str) -> None:
    with pytest.raises(UserError, match="store="):
        open_store(url)


@pytest.mark.parametrize("name", ["a?b", "a#b", "a b", "a%20b", "é"])
def test_a_path_is_kept_as_it_is(name: str, tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/{name}", f"{tmp_path}/{name}"):
        store = open_store(url)
        assert store.create(f"runs/{'x' if url[0] == '/' else 'y'}", b"1") and (tmp_path / name).is_dir()


def test_with_a_model_of_ones_own_the_context_has_to_be_given(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    rows = '[[data]]\nname = "w"\nuse = "rl"\nsource = "w.jsonl"\n'
    config.write_text(rows + '[model]\npath = "m"\n')
    with pytest.raises(UserError, match=r"model\.context_tokens_max is not given: with model\.path='m'"):
        read_config(str(config), [], PRESETS)
    given = read_config(str(config), ["model.context_tokens_max=600"], PRESETS)
    assert check(stored_tree(given)) == given  # as a run that is continued reads it
