"""The small files beside the weights of a policy: configs and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rlpipe.base.references import ArtifactRef
from rlpipe.data.tokenizer_files import TOKENIZER_FILES
from rlpipe.store.artifacts import read_cached, read_manifest
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.step import Resident


def json_bytes(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, indent=2, sort_keys=True).encode()


def config_files(ranks: Ranks, resident: Resident, stop_token_ids: list[int]) -> dict[str, bytes]:
    """The JSON files beside the weights, by their names.

    The tokens that end a turn also end a generation: the generation config lists all of them.
    """
    generation_config = resident.generation_config
    known = generation_config.get("eos_token_id")
    ends = set(known if isinstance(known, list) else [known] if known is not None else [])
    if not ends.issuperset(stop_token_ids):
        generation_config = generation_config | {"eos_token_id": sorted(ends.union(stop_token_ids))}
    config = json.loads(resident.config.to_json_string())
    config |= {"architectures": [type(resident.policy.lm).__name__], "dtype": ranks.options.dtype}
    return {"config.json": json_bytes(config), "generation_config.json": json_bytes(generation_config)}


def tokenizer_files(ranks: Ranks, tokenizer: ArtifactRef | None) -> dict[str, bytes]:
    """The tokenizer's files of an artifact, by their names."""
    if tokenizer is None:
        return {}
    records = read_manifest(ranks.store, tokenizer.folder, tokenizer.sha256).files
    own = [record for record in records if record.plain_name in TOKENIZER_FILES]
    return {record.plain_name: read_cached(ranks.store, tokenizer.folder, record) for record in own}
