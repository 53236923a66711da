"""Every preset parses and plans, and those that need no network have data that fits: held-out
prompts, room, right answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlpipe.config.pipeline import PipelineConfig, identity
from rlpipe.config.source import read_config
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.data.sources import load_conversations, load_prompts
from rlpipe.engines.commands import EngineAddress, argv_of
from rlpipe.engines.weights import Probe, Weights
from rlpipe.extras.plan.work import plan_lines
from rlpipe.rewards.registry import resolve
from rlpipe.store.limits import gpus_held
from tests.paths import PRESETS, ROOT

NAMES = sorted(path.stem for path in PRESETS.glob("*.toml"))


def generated(name: str) -> bool:
    """Whether a preset makes its model and its data itself, and a completion is an answer."""
    config = read_config(name, [], PRESETS)
    return not (config.model.path or config.rl.environment) and all(
        data.source.startswith("reasoning_gym:") for data in config.data
    )


def small(name: str) -> PipelineConfig:
    """The preset with fewer items: enough of them to know what they look like."""
    names = {data.name for data in read_config(name, [], PRESETS).data}
    return read_config(name, [f"data.{data}.rows_max=3000" for data in names], PRESETS)


def text_of(messages: list[dict[str, str]]) -> str:
    return messages[0]["content"]


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_valid_and_can_be_planned(name: str) -> None:
    assert "rollouts" in "\n".join(plan_lines(read_config(name, [], PRESETS)))


def test_the_profiles_train_one_thing_in_three_places() -> None:
    tiny, dev, staging, prod = (
        read_config(source, [], PRESETS)
        for source in ("tiny", *(str(ROOT / f"examples/profiles/{name}.toml") for name in ("dev", "staging", "prod")))
    )
    assert identity(staging) == identity(prod) == identity(tiny) != identity(dev), "a dev run is shorter"
    assert len({config.store for config in (tiny, dev, staging, prod)}) == 4
    assert (prod.evaluation.gate_against, prod.evaluation.gate_at_most_below) == ("champion", {"words_greedy": 0.1})


def test_nodes_of_a_large_trainer_each_hold_a_whole_copy() -> None:
    """Split over all ranks, a layer would cross the network between nodes twice a microbatch."""
    trainer = read_config("multi-node", [], PRESETS).trainer
    assert (trainer.nodes, trainer.split_over) == (2, "node")


def test_the_page_states_the_gpus_that_each_preset_asks_for() -> None:
    page = (ROOT / "docs" / "presets.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9.-]+)` \|(.*)\|$", page, re.MULTILINE)
    assert sorted(name for name, _ in rows) == NAMES
    for name, cells in rows:
        config = read_config(name, [], PRESETS)
        num_gpus = gpus_held(config, "rl")
        stated = re.search(r"\| (\d+) \|", cells)
        assert num_gpus == (int(stated[1]) if stated else 0), name


@pytest.mark.parametrize("name", NAMES)
def test_presets_of_real_models_keep_few_policies_and_states(name: str) -> None:
    config = read_config(name, [], PRESETS)
    kept = config.checkpoint
    assert not config.model.path or (0 < kept.keep_policies_last <= 3 and 0 < kept.keep_states <= 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if generated(name)])
def test_generated_data_fits_the_preset(name: str, tmp_path: Path) -> None:
    config = small(name)
    seen = {text_of(talk.messages) for data in config.sets("sft") for talk in load_conversations(data, config.seed)}
    rl = [prompt for data in config.sets("rl") for prompt in load_prompts(data, config.seed)]
    heldout = [prompt for data in config.sets("evaluation") for prompt in load_prompts(data, config.seed)]
    asked = {text_of(prompt.messages) for prompt in heldout}
    assert len(asked) >= 200
    assert not asked & (seen | {text_of(prompt.messages) for prompt in rl})

    build_tokenizer([text_of(prompt.messages) for prompt in rl], tmp_path)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    rewards = {reward: resolve(reward) for reward in config.rl.rewards}
    for prompt in heldout:
        right = f"<answer>{prompt.answer}</answer>"
        conversation, mask = tokenizer.encode_conversation([*prompt.messages, {"role": "assistant", "content": right}])
        assert len(conversation) <= config.model.context_tokens_max
        assert sum(mask) <= config.rl.completion_tokens_max
        scores = {reward: function(prompt.as_json(), right) for reward, function in rewards.items()}
        assert set(scores.values()) == {1.0}, (prompt, scores)


@pytest.mark.parametrize("flags", [[], ["--enable-deterministic-inference"]])
def test_deterministic_inference_is_a_choice(flags: list[str], tmp_path: Path) -> None:
    """It takes a third of SGLang's throughput; a run that is killed loses nothing without it."""
    on_gpu = [
        "engines.kind=sglang",
        "engines.python=/venv/bin/python",
        "engines.count=1",
        "engines.gpu_ids=[0]",
        "model.dtype=bfloat16",
    ]
    config = read_config("tiny", ["run=a", *on_gpu, f"engines.flags={json.dumps(flags)}"], PRESETS)
    weights = Weights(tmp_path, 1, Probe([1, 2], [-1.0]))
    argv = argv_of(config, EngineAddress(0, "127.0.0.1", 8000, ("", "")), weights)
    assert argv.count("--enable-deterministic-inference") == len(flags), argv


ON_GPU, ON_CPU = ["model.dtype=bfloat16", "engines.gpu_ids=[1]"], ["engines.gpu_ids=[]"]


@pytest.mark.parametrize(
    ("sets", "flags", "last"),  # the last one counts of a flag that is there twice: here each value that counts
    [
        (["engines.kind=sglang", *ON_GPU], [], {"--max-running-requests": "256", "--cuda-graph-max-bs-decode": "256"}),
        (["engines.kind=sglang", *ON_GPU, "engines.in_flight_max=512"], [],
         {"--max-running-requests": "512", "--cuda-graph-max-bs-decode": "512"}),
        (["engines.kind=sglang", *ON_GPU, "engines.in_flight_max=9000"], [],
         {"--max-running-requests": "9000", "--cuda-graph-max-bs-decode": "1024"}),
        (["engines.kind=sglang", *ON_GPU], ["--cuda-graph-max-bs-decode", "64", "--max-running-requests", "64"],
         {"--max-running-requests": "64", "--cuda-graph-max-bs-decode": "64"}),
        (["engines.kind=sglang", *ON_CPU, "engines.in_flight_max=32"], [],
         {"--max-running-requests": "32", "--cuda-graph-max-bs-decode": ""}),
        (["engines.kind=vllm", *ON_GPU, "engines.in_flight_max=512"], [], {"--max-num-seqs": "512"}),
        (["engines.kind=vllm", *ON_GPU, "engines.in_flight_max=9000"], [], {"--max-num-seqs": "2048"}),
        (["engines.kind=vllm", *ON_GPU], ["--max-num-seqs", "1024"], {"--max-num-seqs": "1024"}),
        (["engines.kind=vllm", *ON_CPU], [], {"--max-num-seqs": ""}),
    ],
)  # fmt: skip
def test_an_engine_computes_at_once_what_is_in_flight(
    sets: list[str], flags: list[str], last: dict[str, str], tmp_path: Path
) -> None:
    config = read_config("tiny", ["run=a", "engines.count=1", *sets, f"engines.flags={json.dumps(flags)}"], PRESETS)
    argv = argv_of(config, EngineAddress(0, "127.0.0.1", 8000, ("", "")), Weights(tmp_path, 1, Probe([1, 2], [-1.0])))
    values = dict(zip(argv, [*argv[1:], ""], strict=True))
    assert {name: values.get(name, "") for name in last} == last
