"""Secret blocks of a real Prefect server: where their values go, and what is said where there is
none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows.blocks import fill_secrets, read_secrets
from flows.cli import app
from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.rewards.pool import check_rewards
from tests.paths import PRESETS

VARIABLE = "RLPIPE_SECRET_GRADER"
pytestmark = pytest.mark.slow


def named(block: str) -> PipelineConfig:
    args = f'{{url = "http://127.0.0.1:9/", key_env = {{block = "{block}"}}}}'
    return read_config("tiny", ["rl.rewards={remote = 1.0}", f"rl.reward_args={{remote = {args}}}"], PRESETS)


@pytest.fixture
def server(prefect_api: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "of an earlier start")
    with temporary_settings({PREFECT_API_URL: prefect_api["PREFECT_API_URL"]}):
        yield


async def test_the_value_of_a_block_is_read_anew_and_is_not_in_the_config(server: None) -> None:
    config = named("grader")
    for value in ("sk-planted-1", "4711"):
        await Secret(value=value).asave("grader", overwrite=True)  # pyright: ignore[reportArgumentType]
        await fill_secrets(config)
        assert os.environ[VARIABLE] == value
        check_rewards(config.rl.rewards, config.reward_args("rl"), 1.0)
        assert value not in repr(config) and value not in config.model_dump_json()


async def test_a_block_that_is_not_there_or_holds_no_text_is_said_in_one_line(server: None) -> None:
    await Secret(value={"user": "x"}).asave("pair", overwrite=True)  # pyright: ignore[reportArgumentType]
    for block, said in (("gone", "has no Secret block 'gone'; create it"), ("pair", "'pair' holds no text")):
        with pytest.raises(UserError, match=said) as refused:
            await fill_secrets(named(block))
        assert "\n" not in str(refused.value)


def test_a_command_without_a_server_says_so_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with temporary_settings({PREFECT_API_URL: None}):
        with pytest.raises(UserError, match="'grader' is on a Prefect server: set PREFECT_API_URL, or name an env"):
            read_secrets(named("grader"))
        sets = ["rl.rewards={remote = 1.0}", 'rl.reward_args={remote = {url = {block = "grader"}}}']
        told = CliRunner().invoke(app, ["plan", "tiny", *[part for one in sets for part in ("--set", one)]])
    assert told.exit_code == 2 and "the Secret block 'grader' is on a Prefect server" in told.output, told.output
    read_secrets(read_config("tiny", [], PRESETS))  # names none: nothing is asked


def test_what_is_no_name_of_a_block_is_refused_by_its_field() -> None:
    config = read_config("tiny", ["rl.rewards={remote = 1.0}"], PRESETS)
    args = {"remote": {"url": "http://127.0.0.1:9/", "key_env": {"block": 5}}}
    with pytest.raises(UserError, match=r"rl\.reward_args\.remote\.key_env=\{'block': 5\}: Input should be a"):
        check_rewards(config.rl.rewards, args, 1.0)
