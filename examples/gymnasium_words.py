"""Gymnasium environments played in words: an adapter for those with
discrete actions, and a frozen lake.

    pip install gymnasium
    rlpipe run PRESET --set rl.environment=examples.gymnasium_words:FrozenLake \
        --set 'rl.rewards={environment = 1.0}' ...

user       You stand at P. Walk to the gift G, and into no hole O. Say one word: left, down, right
           or up.
           P..O / ...G / ....
assistant  right
user       .P.O / ...G / ....
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from rlpipe.extras.environments.protocol import Step
from rlpipe.records.prompt import Messages, RewardPrompt


class GymnasiumWords:
    """An environment of Gymnasium by its id: `words` are its actions, in order, and
    what it shows is told as text.

    Its random numbers come from the prompt's id, so that it answers the same when it is
    made again. A completion without one of the words changes nothing, and is told so;
    of several the last one counts.
    """

    words: tuple[str, ...] = ()

    def __init__(self, id: str, **settings: Any) -> None:
        self.id = id
        self.settings = settings

    def start(self, prompt: RewardPrompt) -> Messages:
        """The prompt's own messages, with what there is to see at the end of the last one."""
        self.world = gymnasium.make(self.id, **self.settings | self.settings_of(prompt))
        observation, _ = self.world.reset(seed=zlib.crc32(prompt["prompt_id"].encode()))
        *before, last = prompt["messages"]
        return [*before, {**last, "content": f"{last['content']}\n{self.text(observation)}"}]

    def step(self, completion: str) -> Step:
        said = re.findall(rf"\b({'|'.join(self.words)})\b", completion.lower())
        if not said:
            return Step([{"role": "user", "content": f"Say one of {', '.join(self.words)}."}], metrics={"no_word": 1.0})
        observation, reward, terminated, truncated, _ = self.world.step(self.words.index(said[-1]))
        shown = [{"role": "user", "content": self.text(observation)}]
        return Step(shown, bool(terminated or truncated), float(reward), {"moves": 1.0})

    def settings_of(self, prompt: RewardPrompt) -> dict[str, Any]:
        """What `gymnasium.make` gets of a prompt, beside `settings`."""
        return {}

    def text(self, observation: Any) -> str:
        """What the policy is shown."""
        return str(observation)


class FrozenLake(GymnasiumWords):
    """A lake of its own for every prompt, drawn with P, G, O for holes and . for ice.

    Reward 1 for the gift; a hole ends it.
    """

    words = ("left", "down", "right", "up")

    def __init__(self, size: int = 4, is_slippery: bool = False) -> None:
        super().__init__("FrozenLake-v1", is_slippery=is_slippery)
        self.size = size

    def settings_of(self, prompt: RewardPrompt) -> dict[str, Any]:
        self.lake = generate_random_map(self.size, seed=int(prompt["answer"] or 0))
        return {"desc": self.lake}

    def text(self, observation: Any) -> str:
        letters = "".join(self.lake).translate(str.maketrans("SFH", "..O"))
        letters = letters[:observation] + "P" + letters[observation + 1 :]
        return "\n".join(letters[start : start + self.size] for start in range(0, len(letters), self.size))


def lakes(seed: int, rows_max: int) -> list[dict[str, str]]:
    """Prompts, each with the number of its lake as answer: a data set,
    `source = "examples.gymnasium_words:lakes"`."""
    text = "You stand at P. Walk to the gift G, and into no hole O. Say one word: left, down, right or up."
    return [{"prompt": text, "answer": str(seed * rows_max + index)} for index in range(rows_max)]
