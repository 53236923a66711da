"""The process that scores, with functions or with one reward model:
`python -m rlpipe.rewards.worker`.

First line in: {"rewards": {name: weight}, "args": {name: arguments}}, or {"name", "weight",
"model": the arguments of RewardModel}, or {"name", "tried": a folder whose weights are looked at,
and nothing is scored}. Then {"items": [Item]}, out: {"scores": [the fields of a Score], "warning"}
or {"error": message}.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict, final

from rlpipe.base.errors import UserError
from rlpipe.processes.user_code import CodeRaised, Loaded, Record, cause_of, serve, user_code
from rlpipe.rewards.registry import RewardArgs, resolve, wants_rollout
from rlpipe.rewards.score import Item, Score, combined, scored

# a completion is cut to so many characters a token before it is tokenised: few tokens are longer
CHARS_PER_TOKEN = 16


def check_reward_model(folder: str) -> None:
    """UserError naming the weights that a folder lacks, or that are not numbers: transformers would
    warn, and use random ones.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from rlpipe.models.checkpoint import check_weights

    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None):
        return  # such weights have other names and shapes than the model
    with torch.device("meta"):
        lm: Any = AutoModelForSequenceClassification.from_config(config)
    lm._keys_to_ignore_on_load_unexpected = [r"^(?!.*\.\d+\.)"]  # outside of blocks: of other heads, which nothing asks
    check_weights(Path(folder), lm)


class RewardModel:
    """The model and its tokenizer."""

    def __init__(self, folder: str, tokens_max: int, output: int, device: str) -> None:
        """UserError when the folder's weights are not the model's."""
        import torch  # takes seconds, for which functions do not wait
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        check_reward_model(folder)

        self.tokens_max = tokens_max
        self.output = output
        self.without_gradients = torch.inference_mode
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto", use_safetensors=True)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = "right"
        self.model.config.pad_token_id = self.tokenizer.pad_token_id  # where a sequence ends
        self.model.to(device).eval()

    def rewards(self, items: list[Item]) -> tuple[list[float], int]:
        """One number an item, and the number of texts that were cut to `tokens_max` tokens."""
        texts = [self._text(item) for item in items]
        special = self.tokenizer.chat_template is None  # a chat template writes its own
        longest = self.tokenizer(texts, add_special_tokens=special, truncation=True, max_length=self.tokens_max + 1)
        num_cut = sum(len(tokens) > self.tokens_max for tokens in longest["input_ids"])
        kept = {"input_ids": [tokens[: self.tokens_max] for tokens in longest["input_ids"]]}
        batch = self.tokenizer.pad(kept, return_tensors="pt").to(self.model.device)
        with self.without_gradients():
            logits_BV = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits_BV[:, self.output].float().tolist(), num_cut

    def _text(self, item: Item) -> str:
        chars_max = self.tokens_max * CHARS_PER_TOKEN
        turns = [turn | {"content": str(turn["content"])[:chars_max]} for turn in item["rollout"]["turns"]]
        whole = [*item["prompt"]["messages"], *turns]
        if self.tokenizer.chat_template is None:
            return "\n".join(message["content"] for message in whole)
        return str(self.tokenizer.apply_chat_template(whole, tokenize=False))


class ScoringRequest(TypedDict):
    """The rollouts to score."""

    items: list[Item]


class RewardModelFields(TypedDict):
    """The arguments of `RewardModel`."""

    folder: str
    tokens_max: int
    output: int
    device: str


@final
class FolderHello(TypedDict):
    """A folder whose weights are checked; nothing is scored."""

    name: str
    tried: str


@final
class ModelHello(TypedDict):
    """One reward model."""

    name: str
    weight: float
    model: RewardModelFields


@final
class FunctionsHello(TypedDict):
    """Functions by their names, with weights and arguments."""

    rewards: dict[str, float]
    args: RewardArgs
    may_mount: bool  # as the sandbox does, which functions may call


def load(hello: FolderHello | ModelHello | FunctionsHello) -> Loaded:
    """The function that returns the scores of rollouts; UserError for a reward that cannot be
    loaded.
    """
    if "tried" in hello:
        with _naming(hello["name"]):
            check_reward_model(hello["tried"])
        return {}, lambda request: request
    if "model" in hello:
        return _loaded_model(hello["name"], hello["weight"], hello["model"])
    args = hello["args"]
    scorers = [_function_scorer(name, weight, args.get(name, {})) for name, weight in hello["rewards"].items()]
    return {}, lambda request: {
        "scores": [vars(combined([score(item) for score in scorers])) for item in request["items"]]
    }


def _function_scorer(name: str, weight: float, args: dict[str, Any]) -> Callable[[Item], Score]:
    reward = resolve(name, args)
    takes_facts = wants_rollout(reward)

    def score(item: Item) -> Score:
        facts = {"rollout": item["rollout"]} if takes_facts else {}
        return scored(name, weight, lambda: reward(item["prompt"], item["completion"], **facts))

    return score


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """UserError for any error of loading a folder, which may be broken in any way."""
    try:
        with user_code():
            yield
    except CodeRaised as error:
        raise UserError(f"{name}: {cause_of(error, 'it is no model that loads')}") from error


def _loaded_model(name: str, weight: float, model: RewardModelFields) -> Loaded:
    with _naming(name):
        loaded = RewardModel(**model)

    def answer(request: ScoringRequest) -> Record:
        items = request["items"]
        try:
            with user_code():  # a template or a model may raise anything
                rewards, num_cut = loaded.rewards(items)
        except CodeRaised as error:
            return {"error": str(error)}
        assert len(rewards) == len(items), "a reward was lost"
        warning = f"{num_cut} of {len(items)} rollouts were cut to tokens_max={loaded.tokens_max}" if num_cut else ""
        return {
            "scores": [vars(scored(name, weight, lambda reward=reward: reward)) for reward in rewards],
            "warning": warning,
        }

    return {}, answer


if __name__ == "__main__":
    serve(load)
