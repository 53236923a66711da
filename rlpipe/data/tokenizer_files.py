"""Reads the tokenizer of a model's folder: tokenizer.json, and the tokens that other files add,
with the ids that transformers gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import sha256_of
from rlpipe.base.values import JsonDict
from rlpipe.data.template_text import one_of_several

# the tokenizer's files in a model's folder; all others (.env, pickles, code) are not its own
TOKENIZER_FILES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
}  # fmt: skip
CONFIG, NAMED, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
BESIDE = (CONFIG, NAMED, ADDED)  # files that may add tokens to tokenizer.json
LISTS = ("extra_special_tokens", "additional_special_tokens")
# must exist as tokens: a misspelt one would be a new token that no model knows
ENDS = ("eos_token", "pad_token")


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """The digest of which token has which number."""
    return sha256_of(sorted(tokenizer.get_vocab(with_added_tokens=True).items()))


def read_tokenizer(folder: Path) -> tuple[Tokenizer, JsonDict]:
    """Returns the tokenizer of a folder with all its tokens, and its settings.

    UserError naming what is missing or does not fit.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"model.path={folder}: no tokenizer.json in it; it must be a folder in HF format with a fast tokenizer"
        )
    if "model" not in read_json(path):
        raise UserError(f"{path}: not a tokenizer of the tokenizers library (it has no 'model')")
    tokenizer = Tokenizer.from_file(str(path))
    files = {name: read_json(folder / name) for name in BESIDE}
    num_known = tokenizer.get_vocab_size(with_added_tokens=True)
    add_tokens(tokenizer, files)
    config = read_json(folder / "config.json")
    num_rows = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    if isinstance(num_rows, int) and vocabulary > max(num_known, num_rows):
        raise UserError(
            f"model.path={folder}: the files beside tokenizer.json add {tokenizer.id_to_token(vocabulary - 1)!r} as"
            f" token {vocabulary - 1}, and the model has embeddings of {num_rows} tokens (vocab_size of config.json);"
            f" take it out of {', '.join(BESIDE)}"
        )
    return tokenizer, files[NAMED] | files[CONFIG]


def add_tokens(tokenizer: Tokenizer, files: Mapping[str, JsonDict]) -> None:
    """Adds the tokens of `files` (JSON by the names in BESIDE), as transformers does.

    UserError when a token gets another id than in its file.

    `added_tokens_decoder` in tokenizer_config.json has all of them; without it, added_tokens.json
    and special_tokens_map.json count.
    """
    config, named, added = (files.get(name, {}) for name in BESIDE)
    settings = config if "added_tokens_decoder" in config else named | config
    try:
        numbered, where = _decoded(config["added_tokens_decoder"]), f"{CONFIG}: added_tokens_decoder"
    except KeyError:
        specials = {*_contents(special_tokens(settings).values()), *_contents(_listed(settings))}
        numbered, where = _encoded(added, specials, tokenizer), ADDED
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{CONFIG}: added_tokens_decoder is not understood ({error!r:.200})") from error
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, token in sorted(numbered.items()):
        if repr(token) not in known:
            tokenizer.add_tokens([token])
        if (given := tokenizer.token_to_id(token.content)) != token_id:
            raise UserError(
                f"{where} says that {token.content!r} is token {token_id}, but after tokenizer.json it is {given}: the"
                " two files are of different tokenizers; take both from one folder"
            )
    others = [entry for name, entry in special_tokens(settings).items() if name not in ENDS] + _listed(settings)
    have = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for entry in others:
        (content,) = _contents([entry])
        if content not in have:
            flags = (
                {name: entry[name] for name in ("lstrip", "rstrip", "single_word") if name in entry}
                if isinstance(entry, dict)
                else {}
            )
            tokenizer.add_tokens([AddedToken(content, special=True, **flags)])
            have.add(content)


def special_tokens(settings: JsonDict) -> dict[str, Any]:
    """The special tokens by name, as text or as a record with `content`."""
    named = {name: value for name, value in settings.items() if name.endswith("_token") and value}
    more = settings.get(LISTS[0])
    named |= more if isinstance(more, dict) else {}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value["content"] if _is_record(value) else value, str)
    }


def special_texts(settings: JsonDict) -> dict[str, str]:
    """The special tokens by name, as text."""
    named = special_tokens(settings)
    return dict(zip(named, _contents(named.values()), strict=True))


def _listed(settings: JsonDict) -> list[Any]:
    """The special tokens without a name, from the first list that is not empty."""
    lists = (settings.get(name) for name in LISTS)
    entries = next((entry for entry in lists if isinstance(entry, list) and entry), [])
    return [entry for entry in entries if isinstance(entry, str) or _is_record(entry)]


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def _contents(entries: Any) -> list[str]:
    return [entry["content"] if isinstance(entry, dict) else entry for entry in entries]


def _decoded(entries: JsonDict) -> dict[int, AddedToken]:
    return {
        int(token_id): AddedToken(**{name: value for name, value in entry.items() if name != "__type"})
        for token_id, entry in entries.items()
    }


def _encoded(entries: JsonDict, specials: set[str], tokenizer: Tokenizer) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json by id; an entry in tokenizer.json has precedence."""
    tokens: dict[int, AddedToken] = {}
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for content, token_id in entries.items():
        if type(token_id) is not int:
            raise UserError(f"{ADDED}: {content!r:.80} has the id {token_id!r:.80}, which is no whole number")
        is_special = content in specials
        tokens[token_id] = known.get(content) or AddedToken(content, normalized=not is_special, special=is_special)
    return tokens


def read_json(path: Path) -> JsonDict:
    """The object in a JSON file; empty without a file. UserError when it is not an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {str(value)[:40]!r}, not an object")
    return value


def folder_template(folder: Path, settings: JsonDict) -> str:
    """The chat template in a tokenizer's folder; empty for none."""
    path = folder / "chat_template.jinja"
    try:
        template = path.read_text() if path.is_file() else settings.get("chat_template") or ""
        if isinstance(template, list):  # several named templates
            template = one_of_several({entry["name"]: entry["template"] for entry in template})
        if not isinstance(template, str):
            raise TypeError(f"{template!r:.40} is no text")
    except (ValueError, LookupError, TypeError) as error:
        where = path if path.is_file() else folder / CONFIG
        raise UserError(f"{where}: its chat_template cannot be read ({error!r})") from error
    return template
