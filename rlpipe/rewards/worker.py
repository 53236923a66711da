"""The process that scores, with functions or with one reward model: `python -m rlpipe.rewards.worker`.

First line in: {"rewards": {name: weight}, "args": {name: arguments}}, or {"name", "weight", "model": the arguments of RewardModel}.
Then {"items": [Item]}, out: {"scores": [the fields of a Score], "warning"} or {"error": message}.
"""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.processes.user_code import CodeRaised, Loaded, Record, serve, user_code
from rlpipe.rewards.registry import resolve, wants_rollout
from rlpipe.rewards.score import Item, Score, combined, scored
from rlpipe.types import JsonDict, UserError

CHARS_PER_TOKEN = 16  # a completion is cut to so many characters a token before it is tokenised: few tokens are longer


class RewardModel:
    """The model and its tokenizer."""

    def __init__(self, folder: str, tokens_max: int, output: int, device: str) -> None:
        """ValueError when the folder's weights lack some of the model's."""
        import torch  # takes seconds, for which functions do not wait
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.tokens_max = tokens_max
        self.output = output
        self.without_gradients = torch.inference_mode
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True
        )
        if loading["missing_keys"]:  # transformers would only warn, and use random numbers
            raise ValueError(f"the weights in {folder} lack {sorted(loading['missing_keys'])[:3]}")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = "right"
        self.model.config.pad_token_id = self.tokenizer.pad_token_id  # where a sequence ends
        self.model.to(device).eval()

    def rewards(self, items: list[Item]) -> tuple[list[float], int]:
        """One number an item, and how many of their texts were cut to `tokens_max` tokens."""
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


def load(hello: JsonDict) -> Loaded:
    """What answers with the scores of rollouts; UserError for a reward that cannot be loaded."""
    if "model" in hello:
        return _loaded_model(**hello)
    args = hello["args"]
    scorers = [_function_scorer(name, weight, args.get(name, {})) for name, weight in hello["rewards"].items()]
    return {}, lambda request: {"scores": [vars(combined([score(item) for score in scorers])) for item in request["items"]]}


def _function_scorer(name: str, weight: float, args: JsonDict) -> Callable[[Item], Score]:
    reward = resolve(name, args)
    takes_facts = wants_rollout(reward)

    def score(item: Item) -> Score:
        facts = {"rollout": item["rollout"]} if takes_facts else {}
        return scored(name, weight, lambda: reward(item["prompt"], item["completion"], **facts))

    return score


def _loaded_model(name: str, weight: float, model: JsonDict) -> Loaded:
    try:
        with user_code():  # a folder may be broken in any way
            loaded = RewardModel(**model)
    except CodeRaised as error:
        raise UserError(f"{name}: {error}") from error

    def answer(request: JsonDict) -> Record:
        items: list[Item] = request["items"]
        try:
            with user_code():  # a template or a model may raise anything
                rewards, num_cut = loaded.rewards(items)
        except CodeRaised as error:
            return {"error": str(error)}
        assert len(rewards) == len(items), "a reward was lost"
        warning = f"{num_cut} of {len(items)} rollouts were cut to tokens_max={loaded.tokens_max}" if num_cut else ""
        return {"scores": [vars(scored(name, weight, lambda reward=reward: reward)) for reward in rewards], "warning": warning}

    return {}, answer


if __name__ == "__main__":
    serve(load)
