"""Promotions and rollbacks on a real MLflow and a real store: what moves an alias, and what does
not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlpipe.base.errors import UserError
from rlpipe.extras.gate.promotion import AliasMove, promote, roll_back
from rlpipe.store.run import Run
from tests.gate_world import Passes, commit_evaluation, run_of

RULES = ["evaluation.gate_against=champion", "evaluation.gate_at_most_below={words_greedy = 0.25}"]
GOOD: Passes = [[1, 1, 1]] * 15 + [[0, 1, 0]] * 5
WORSE: Passes = [[0, 0, 0]] * 10 + [[1, 1, 1]] * 5 + [[0, 1, 0]] * 5
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


class World:
    """A store and a registered model, whose versions are the policies of runs, in order."""

    def __init__(self, path: Path) -> None:
        self.path, self.client, self.runs = path, MlflowClient(f"sqlite:///{path}/mlflow.db"), dict[str, Run]()
        self.client.create_registered_model("rlpipe")

    def add(self, name: str, after: Passes, verdict: str) -> None:
        """A run whose last policy is registered, with the verdict of its gate."""
        run = run_of(self.path, name, *RULES)
        commit_evaluation(run, 0, GOOD)
        commit_evaluation(run, 1, after)
        self.runs[name] = run
        tags = {"rlpipe.run": name, "rlpipe.version": "1", "rlpipe.policy_sha256": run.policy(1)[0].sha256}
        version = self.client.create_model_version("rlpipe", f"/{name}", tags=tags)
        if verdict:
            self.judge(str(version.version), verdict)

    def judge(self, number: str, verdict: str) -> None:
        self.client.set_model_version_tag("rlpipe", number, "rlpipe.gate", verdict)

    def promote(self, name: str) -> AliasMove:
        return promote(self.runs[name].store, name, 1, "production")

    def roll_back(self, name: str, because: str = "") -> AliasMove:
        return roll_back(self.runs[name].store, name, 1, "production", because)

    def aliases(self) -> dict[str, str]:
        """The number of the version that each alias names."""
        return {name: str(number) for name, number in self.client.get_registered_model("rlpipe").aliases.items()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def test_a_policy_that_passed_is_promoted_once_and_the_one_before_is_kept(world: World) -> None:
    world.add("a", GOOD, "passed")
    assert world.promote("a") == AliasMove(True, "a@1 is production")
    assert world.promote("a") == AliasMove(False, "a@1 is production already")
    assert world.aliases() == {"production": "1"}
    world.add("b", GOOD, "passed")
    assert world.promote("b") == AliasMove(True, "b@1 is production, and a@1 is previous")
    world.promote("b")
    assert world.aliases() == {"production": "2", "previous": "1"}


@pytest.mark.parametrize(
    ("verdict", "said"),
    [("failed", "its gate says 'failed'"), ("revoked", "its gate says 'revoked'"), ("", "no gate has judged it")],
)
def test_what_an_event_says_is_not_believed(world: World, verdict: str, said: str) -> None:
    world.add("a", GOOD, verdict)
    move = world.promote("a")
    assert move.gate_failed and not move.moved and said in move.said
    assert world.aliases() == {}


def test_a_policy_that_is_worse_than_what_is_in_production_is_not_promoted(world: World) -> None:
    """Its own gate compared it with another one."""
    world.add("a", GOOD, "passed")
    world.add("b", WORSE, "passed")
    world.promote("a")
    move = world.promote("b")
    assert move.gate_failed and "fails its gate against a@1, which is production" in move.said
    assert move.report[0].startswith("gate of b@1 against a@1: FAILED")
    assert world.aliases() == {"production": "1"}


def test_a_revoked_policy_is_rolled_back_once_and_never_promoted_again(world: World) -> None:
    for name in ("a", "b"):
        world.add(name, GOOD, "passed")
        world.promote(name)
    world.client.set_registered_model_alias("rlpipe", "champion", "2")
    with pytest.raises(UserError, match="the gate of b@1 says 'passed', not 'revoked'; say why"):
        world.roll_back("b")
    assert world.aliases()["production"] == "2"
    world.judge("2", "revoked")
    assert world.roll_back("b") == AliasMove(True, "a@1 is production again, in place of b@1")
    assert world.roll_back("b") == AliasMove(False, "b@1 is not production, a@1 is")
    assert world.aliases() == {"production": "1", "previous": "1", "champion": "1"}
    assert world.promote("b").gate_failed
    with pytest.raises(UserError, match="previous is no other version; give the alias production to a good version"):
        world.roll_back("a", "of no use")


def test_an_alias_that_mlflow_would_refuse_moves_nothing(world: World) -> None:
    """`latest` and `v1` name versions that nobody promoted: one would have become `previous`."""
    for name in ("a", "b"):
        world.add(name, GOOD, "passed")
    store = world.runs["a"].store
    for alias in ("latest", "v1", "V2", "", "in production", "ö", "a" * 256):
        with pytest.raises(UserError, match="use letters, digits, _ and -"):
            promote(store, "a", 1, alias)
        with pytest.raises(UserError, match="use letters, digits, _ and -"):
            roll_back(store, "b", 1, alias, "of no use")
    assert world.aliases() == {}


class Died(Exception):
    """What a process is, after the write at which it was killed."""


def killed_at(world: World, monkeypatch: pytest.MonkeyPatch, write: int, move: Callable[[], AliasMove]) -> bool:
    """Whether `move` came to its end before its write of this number, counted over all that write
    to MLflow; if not it is started again, until no more is said to have moved.
    """
    count = 0

    def dying(name: str) -> Callable[..., None]:
        whole = getattr(MlflowClient, name)

        def call(*arguments: str) -> None:
            nonlocal count
            count += 1
            if count == write:
                raise Died
            whole(*arguments)

        return call

    with monkeypatch.context() as patched:
        for name in ("set_registered_model_alias", "set_model_version_tag"):
            patched.setattr(MlflowClient, name, dying(name))
        try:
            move()
            return True
        except Died:
            pass
    move()
    assert not move().moved
    return False


def test_a_promotion_and_a_rollback_that_are_killed_anywhere_end_as_if_they_were_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        world.add(name, GOOD, "passed")
    world.promote("a")
    before = world.aliases()

    def again(aliases: dict[str, str]) -> None:
        for name in ("previous", "champion"):
            world.client.delete_registered_model_alias("rlpipe", name)
        for name, number in aliases.items():
            world.client.set_registered_model_alias("rlpipe", name, number)

    killed = 0
    while not killed_at(world, monkeypatch, killed + 1, lambda: world.promote("b")):
        assert world.aliases() == {"production": "2", "previous": "1"}
        again(before)
        killed += 1
    assert killed == 2  # between `previous` and `production`, and before both
    revoked = {"production": "2", "previous": "1", "champion": "2"}
    while True:
        again(revoked)
        world.judge("2", "revoked")
        killed += 1
        if killed_at(world, monkeypatch, killed - 2, lambda: world.roll_back("b")):
            break
        assert world.aliases() == {"production": "1", "previous": "1", "champion": "1"}
    assert killed == 2 + 5  # two tags, two aliases, and once to the end


def test_somebody_may_say_why_a_policy_is_rolled_back(world: World) -> None:
    for name in ("a", "b"):
        world.add(name, GOOD, "passed")
        world.promote(name)
    assert world.roll_back("b", "users complain").moved
    tags = world.client.get_model_version("rlpipe", "2").tags
    assert (tags["rlpipe.gate"], tags["rlpipe.rolled_back"]) == ("revoked", "users complain")
    world.judge("1", "revoked")
    world.add("c", GOOD, "passed")
    world.promote("c")
    with pytest.raises(UserError, match="previous is revoked, too"):
        world.roll_back("c", "worse still")
    assert world.aliases()["production"] == "3"


def test_what_cannot_be_promoted_is_said_in_one_line(world: World) -> None:
    world.add("a", GOOD, "passed")
    store = world.runs["a"].store
    wrong = [
        (("gone", 1, "production"), "no run 'gone'"),
        (("a", 7, "production"), "version 7 of run a is not committed"),
        (("a", 0, "production"), "version 0 of run a is no version of rlpipe in MLflow"),
        (("a", 1, "previous"), "alias='previous': rlpipe moves that one itself"),
    ]
    for arguments, said in wrong:
        with pytest.raises(UserError, match=said) as refused:
            promote(store, *arguments)
        assert "\n" not in str(refused.value)
    world.client.create_model_version(
        "rlpipe", "/x", tags={"rlpipe.run": "x", "rlpipe.version": "1", "rlpipe.policy_sha256": "0" * 64}
    )
    world.client.set_registered_model_alias("rlpipe", "production", "2")
    with pytest.raises(UserError, match="the production of rlpipe, version 1 of run x, is no policy of file://"):
        world.promote("a")
    assert world.aliases() == {"production": "2"}
