"""The adapters in examples/, with the packages that they adapt, in the
processes that a run plays them in."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from rlpipe.extras.environments.pool import EnvironmentFault, EnvironmentPool
from rlpipe.extras.environments.protocol import Step
from rlpipe.records.prompt import Prompt
from tests.paths import ROOT


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is no dependency: pip install 'rlpipe[environments]'"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def way(lake: list[str]) -> list[str]:
    """The shortest way from P to G that meets no O."""
    places = {(row, column): letter for row, line in enumerate(lake) for column, letter in enumerate(line)}
    start = next(place for place, letter in places.items() if letter == "P")
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    ways, queue = {start: list[str]()}, deque([start])
    while places[here := queue.popleft()] != "G":
        for word, (down, right) in moves.items():
            there = here[0] + down, here[1] + right
            if places.get(there, "O") != "O" and there not in ways:
                ways[there] = [*ways[here], word]
                queue.append(there)
    return ways[here]


@needs("gymnasium")
async def test_a_frozen_lake_is_walked_by_words() -> None:
    from examples.gymnasium_words import lakes

    pool = EnvironmentPool("examples.gymnasium_words:FrozenLake", {"size": 5}, 1, 30.0)
    rows = lakes(seed=3, rows_max=3)
    prompts = [
        Prompt(f"lakes/{index}", "lakes", [{"role": "user", "content": row["prompt"]}], row["answer"])
        for index, row in enumerate(rows)
    ]
    seen = set()
    for prompt in prompts:
        walked, drowned = pool.open(prompt.for_reward()), pool.open(prompt.for_reward())
        (message,) = await walked.start()
        assert await drowned.start() == [message], "the same lake for all rollouts of a prompt"
        asked, *lake = message["content"].split("\n")
        assert asked == rows[0]["prompt"] and len(lake) == 5
        seen.add(message["content"])
        *words, last = way(lake)
        steps = [await walked.step(f"I think: {word}.") for word in words]
        assert not any(step.done or step.reward for step in steps)

        done = await pool.open(prompt.for_reward()).step("left")
        assert not done.done and done.messages[0]["content"].split("\n") == lake, "a wall"
        silent = await drowned.step("no idea")
        assert silent.messages[0]["content"].startswith("Say one of left, down") and silent.metrics == {"no_word": 1.0}
        again = pool.open(prompt.for_reward())
        end = [await again.step(word) for word in [*words, last]][-1]
        assert end.done and end.reward == 1.0 and end.metrics == {"moves": 1.0}
    assert len(seen) == 3
    await pool.close()


@needs("gymnasium")
async def test_a_slippery_lake_slips_alike_when_it_is_made_again() -> None:
    prompt = Prompt("lakes/0", "lakes", [{"role": "user", "content": "Walk."}], "7").for_reward()
    answers = []
    for _ in range(2):
        pool = EnvironmentPool("examples.gymnasium_words:FrozenLake", {"is_slippery": True}, 1, 30.0)
        environment = pool.open(prompt)
        answers.append([await environment.step(word) for word in ("right", "left", "right", "up")])
        await pool.close()
    assert answers[0] == answers[1]


VERIFIERS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    number: int

class GuessTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.number))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

class Tasks(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in (3, 7):
            yield GuessTask(Data(prompt=f"Guess! ({number})", system_prompt="Numbers only.", number=number), self.config.task)
"""  # noqa: E501
SEVERAL_TURNS = """
__all__ = ["Tasks", "GuessEnv"]

class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while segment.last_reply != str(task.data.number):
                if segment.last_reply == "judge": await agents.judge.run(task)
                if segment.last_reply == "give up": break
                segment = await interaction.turn("more" if int(segment.last_reply) < task.data.number else "less")
        interaction.trace.record_reward("played", 1.0, 0.5)
"""


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "guess_once.py").write_text(VERIFIERS + '__all__ = ["Tasks"]\n')
    (tmp_path / "guess_often.py").write_text(VERIFIERS + SEVERAL_TURNS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}")


async def stepped(pool: EnvironmentPool, number: int, *completions: str) -> list[Any]:
    """What a rollout is asked, and what its completions are answered with."""
    prompt = Prompt(f"tasks/{number}", "tasks", [{"role": "user", "content": "not shown"}], str(number))
    environment = pool.open(prompt.for_reward())
    told: list[Any] = [await environment.start()]
    for completion in completions:
        try:
            told.append(await environment.step(completion))
        except EnvironmentFault as fault:
            told.append(fault.reason)
    environment.drop()
    return told


@needs("verifiers")
@pytest.mark.usefixtures("tasksets")
async def test_an_environment_of_verifiers_is_played_turn_by_turn() -> None:
    path, args = "examples.verifiers_seat:Seat", {"taskset": "guess-often", "seat": "player"}
    pool = EnvironmentPool(path, args, 1, 60.0)
    asked = [{"role": "system", "content": "Numbers only."}, {"role": "user", "content": "Guess! (7)"}]
    more, less = (Step([{"role": "user", "content": content}]) for content in ("more", "less"))
    both = await asyncio.gather(stepped(pool, 1, "5", "9", "7"), stepped(pool, 1, "8", "give up"))
    assert both[0] == [asked, more, less, Step(done=True, reward=2.5, metrics={"turns": 3.0})]
    assert both[1] == [asked, less, Step(done=True, reward=0.5, metrics={"turns": 2.0})]
    assert (await stepped(pool, 0, "3"))[1] == Step(done=True, reward=2.5, metrics={"turns": 1.0})
    assert await stepped(pool, 1, "judge") == [asked, "environment_error"]
    assert await stepped(pool, 1, "8") == [asked, less], "over before the environment is"
    await pool.close()


@needs("verifiers")
@pytest.mark.usefixtures("tasksets")
async def test_a_plain_taskset_of_verifiers_is_one_turn() -> None:
    pool = EnvironmentPool("examples.verifiers_seat:Seat", {"taskset": "guess-once"}, 1, 60.0)
    assert (await stepped(pool, 0, "3"))[1] == Step(done=True, reward=2.0, metrics={"turns": 1.0})
    assert (await stepped(pool, 0, "4"))[1] == Step(done=True, reward=0.0, metrics={"turns": 1.0})
    await pool.close()
