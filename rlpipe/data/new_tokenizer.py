"""Builds the tokenizer of a new small model from the prompts that it will see."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, PAD = "<|end|>", "<|pad|>"
SPECIAL_TOKENS = [END, PAD, "<|user|>", "<|assistant|>", "<|system|>"]
ANSWER_TOKENS = ["<answer>", "</answer>"]  # not special tokens, so decode keeps them for the reward
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(texts: list[str], folder: Path) -> None:
    """Builds a tokenizer of about 300 tokens for a new small model: the words of the instruction
    are tokens, those of the data are spelled.

    Writes `tokenizer.json` and `tokenizer_config.json`: 256 bytes, the words that at least half of
    `texts` share, specials.

    The same texts give the same files; `transformers.AutoTokenizer` can load them.
    """
    assert texts, "the words of the instruction come from the texts"
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + _common_words(texts)
    # with ignore_merges a word is one token or, if it is not in the vocabulary, its bytes
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = _byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in ANSWER_TOKENS])
    assert tokenizer.get_vocab_size() == len(tokens) + len(SPECIAL_TOKENS) + len(ANSWER_TOKENS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _common_words(texts: list[str]) -> list[str]:
    splitter = _byte_level()
    counts = Counter(word for text in texts for word in {word for word, _ in splitter.pre_tokenize_str(text)})
    return sorted(word for word, count in counts.items() if 2 * count >= len(texts) and len(word) > 1)
