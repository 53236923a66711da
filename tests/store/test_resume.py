"""`rlpipe resume`: the settings of the last start, what may change given anew,
and what a refused start says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rlpipe.base.errors import StoreError, UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config, read_config
from rlpipe.store import audit, lease
from rlpipe.store.backend import Store, open_store
from rlpipe.store.opening import create_or_continue, fork, open_existing
from rlpipe.store.run_record import ConfigRefused, last_started, record_start, start_key
from tests.config.test_stored import stored_run
from tests.paths import PRESETS
from tests.store.test_run import commit_iterations, commit_sft

SMALL = ["data.words.rows_max=40", "data.short_words.rows_max=40", "data.all_words.rows_max=40"]


def tiny(store: Store, *sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", f"store={store.url}", *SMALL, *sets], PRESETS)


def resume(store: Store, *arguments: str) -> str:
    """What a refused `rlpipe resume` says."""
    ended = CliRunner().invoke(app, ["resume", *arguments, "--store", store.url])
    lease.withdraw(store, "runs/a")  # as the end of the command's process does
    assert ended.exit_code == 2, ended.output
    return ended.output


def test_what_may_change_is_that_of_the_last_start(store: Store) -> None:
    created = tiny(store, "rl.num_iterations=3")
    run = create_or_continue(created)
    assert last_started(store, "a") == created, "one that no start was kept of"
    longer = create_or_continue(tiny(store, "rl.num_iterations=9", "engines.count=3", "scratch=/tmp/elsewhere"))
    record_start(store, longer.config)
    record_start(store, longer.config)
    assert last_started(store, "a") == longer.config and open_existing(store, "a").config == created
    assert audit.verify(run) == (0, []) and audit.unreferenced(run) == []
    commit_sft(run)
    commit_iterations(run, 2)
    child = fork(run, 0, override_config(created, ["run=c", "rl.clip_high=0.4"]))
    assert last_started(store, "c") == child.config
    record_start(store, override_config(child.config, ["engines.count=5"]))
    assert last_started(store, "c").engines.count == 5 and last_started(store, "c").rl.clip_high == 0.4


def test_a_start_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    run = create_or_continue(tiny(store))
    record_start(store, run.config)
    path = tmp_path / start_key("a")
    whole = path.read_bytes()
    for damaged in (b"", b"{}", whole.replace(b"warn", b"fail", 1)):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=f"{path} is damaged"):
            last_started(store, "a")
        assert any(str(path) in fault for fault in audit.verify(run)[1])
    other = json.loads(whole)
    del other["seal"]
    path.write_text(json.dumps({**other, "config": {**other["config"], "run": "b"}}))
    with pytest.raises(StoreError, match="is the record of run 'b'"):
        last_started(store, "a")
    path.write_text(json.dumps({**other, "config": {**other["config"], "of_another_version": 1}}))
    with pytest.raises(
        ConfigRefused, match=r"start\.json was written by rlpipe .*this version refuses of_another_version"
    ):
        last_started(store, "a")
    record_start(store, run.config)
    assert audit.verify(run) == (0, []), "the next start mends it"


def test_a_run_of_older_code_resumes_with_what_it_was_begun_with(tmp_path: Path) -> None:
    store = stored_run(tmp_path, trainer={"port": 4040, "job_timeout_s": 60.0})
    config = override_config(last_started(store, "old"), [f'store="{store.url}"', "rl.num_iterations=99"])
    assert config.rl.faults == {"policy": 0.0, "outside": 0.0}
    assert create_or_continue(config).config == config


def test_a_refused_start_names_both_values_and_the_command_that_goes_on(store: Store) -> None:
    create_or_continue(tiny(store))
    with pytest.raises(UserError) as refused:
        create_or_continue(tiny(store, "rl.clip_high=0.4", "data.words.rows_max=41"))
    said = str(refused.value)
    assert "(stored -> given: data.words (rl).rows_max: 40 -> 41; " in said and "; rl.clip_high: 0.28 -> 0.4)" in said
    assert f"go on with the stored ones, rlpipe resume a --store {store.url}; or " in said
    assert "rl.clip_high: 0.28 -> 0.4" in resume(store, "a", "--set", "rl.clip_high=0.4")


def test_the_store_is_named_where_it_is_not_the_default_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    create_or_continue(read_config("tiny", ["run=a"], PRESETS))
    with pytest.raises(UserError, match=r"rlpipe resume a; or "):
        create_or_continue(read_config("tiny", ["run=a", "seed=1"], PRESETS))
    create_or_continue(read_config("tiny", ["run=a", "store=my store"], PRESETS))
    with pytest.raises(UserError, match=r"rlpipe resume a --store 'my store'; or "):
        create_or_continue(read_config("tiny", ["run=a", "store=my store", "seed=1"], PRESETS))


@pytest.mark.slow
def test_what_cannot_be_resumed_is_refused_with_the_reason(store: Store) -> None:
    assert "no run 'a' in" in resume(store, "a")
    run = create_or_continue(tiny(store))
    assert "a run goes on under its own name" in resume(store, "a", "--set", "run=b")
    assert "a run goes on under its own name" in resume(store, "a", "--set", "store = elsewhere")
    assert "rl.num_iteration=3: no such field" in resume(store, "a", "--set", "rl.num_iteration=3")
    held = lease.acquire(store, run.root)
    try:
        assert "run a is held by pid" in resume(store, "a")
    finally:
        held.release()
