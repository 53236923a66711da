"""The process of a reward model: `python -m rlpipe.rewards.model_worker`.

First line in: {"name", "weight", "folder", "tokens_max", "output", "device"}. Then {"items": [{"prompt", "completion"}]}, out:
{"scores": [the fields of a Score], "warning"} or {"error": message}.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlpipe.child import Answer, describe, serve
from rlpipe.rewards.score import InvalidReward, Score, score_of
from rlpipe.types import JsonDict, UserError

CHARS_PER_TOKEN = 16  # a completion is cut to so many characters a token before it is tokenised: few tokens are longer


class RewardModel:
    """The model and its tokenizer."""

    def __init__(self, folder: str, tokens_max: int, output: int, device: str) -> None:
        """ValueError when the folder's weights lack some of the model's."""
        self.tokens_max = tokens_max
        self.output = output
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

    @torch.inference_mode()
    def rewards(self, items: list[JsonDict]) -> tuple[list[float], int]:
        """One number an item, and how many of their texts were cut to `tokens_max` tokens."""
        texts = [self._text(item) for item in items]
        special = self.tokenizer.chat_template is None  # a chat template writes its own
        longest = self.tokenizer(texts, add_special_tokens=special, truncation=True, max_length=self.tokens_max + 1)
        num_cut = sum(len(tokens) > self.tokens_max for tokens in longest["input_ids"])
        kept = {"input_ids": [tokens[: self.tokens_max] for tokens in longest["input_ids"]]}
        batch = self.tokenizer.pad(kept, return_tensors="pt").to(self.model.device)
        logits_BV = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits_BV[:, self.output].float().tolist(), num_cut

    def _text(self, item: JsonDict) -> str:
        messages, completion = item["prompt"]["messages"], item["completion"][: self.tokens_max * CHARS_PER_TOKEN]
        if self.tokenizer.chat_template is None:
            return "\n".join([*(message["content"] for message in messages), completion])
        whole = [*messages, {"role": "assistant", "content": completion}]
        return str(self.tokenizer.apply_chat_template(whole, tokenize=False))


def load(hello: JsonDict) -> tuple[JsonDict, Answer]:
    """What answers with the scores of rollouts; UserError for a model that cannot be loaded."""
    name, weight = hello.pop("name"), hello.pop("weight")
    try:
        model = RewardModel(**hello)
    except Exception as error:  # a folder may be broken in any way
        raise UserError(f"{name}: {describe(error)}") from error

    def score(reward: float) -> Score:
        try:
            return score_of(name, reward, weight)
        except InvalidReward as error:
            return Score(None, {}, "reward_invalid", str(error))

    def answer(request: JsonDict) -> JsonDict:
        items = request["items"]
        try:
            rewards, num_cut = model.rewards(items)
        except Exception as error:  # a template or a model may raise anything; the rollouts get a counted reason
            return {"error": describe(error)}
        warning = f"{num_cut} of {len(items)} rollouts were cut to tokens_max={model.tokens_max}" if num_cut else ""
        return {"scores": [asdict(score(reward)) for reward in rewards], "warning": warning}

    return {}, answer


if __name__ == "__main__":
    serve(load)
