"""The chat template that trained is in every policy's folder:
transformers writes with it what we wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlpipe.config.pipeline import ModelConfig
from rlpipe.config.source import override_config
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.template_text import one_of_several
from rlpipe.stages import base
from rlpipe.stages.base import base_policy, base_probe, base_tokenizer
from rlpipe.stages.iteration import commit_iteration
from rlpipe.stages.model_source import source_of, write_trained_template
from rlpipe.stages.policy import checkpoint, train
from rlpipe.store import audit
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import create_or_continue
from rlpipe.stored.remaking import export_policy
from tests.data.test_chat import CHATML
from tests.data.test_chat_templates import make_with
from tests.fuzz.models import change, make_folder
from tests.stored.test_remaking import commit_batch, config, session_of
from tests.tool_templates import KINDS, QWEN3, TOOL_LIST, Kind

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "Why?"}]
ARGUMENTS = {"enable_thinking": False, "style": 'a "b" %}'}
TEMPLATE = "{{ style }}" + QWEN3  # an argument that is text, and one that changes the prompt


def said(folder: Path, talk: list[dict[str, Any]] = TALK, **keywords: Any) -> str:
    """What transformers asks a policy with."""
    return str(
        AutoTokenizer.from_pretrained(folder).apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True, **keywords
        )
    )


@pytest.mark.parametrize("name", KINDS)
def test_the_template_of_the_config_takes_the_place_of_any_other(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    template = (
        kind.template
        if isinstance(kind.template, str)
        else one_of_several({each["name"]: each["template"] for each in kind.template})
    )
    folder = Kind("stale {{ messages[0].content }}", [], eos=kind.eos).save(tmp_path / "model")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "stale"}))
    write_trained_template(ModelConfig(chat_template=template, chat_template_args=kind.variables), folder)
    assert not (folder / "chat_template.json").exists() and "chat_template" not in json.loads(
        (folder / "tokenizer_config.json").read_text()
    )
    talk = [{name: value for name, value in message.items() if value is not None} for message in kind.conversation()][
        :-1
    ]
    trained = ChatTokenizer.from_folder(folder, template, kind.variables).with_tools(TOOL_LIST)
    again = ChatTokenizer.from_folder(folder).with_tools(TOOL_LIST)
    asked = trained.encode_prompt(talk)
    assert trained.decode_raw(asked) == said(folder, talk, tools=TOOL_LIST) and again.encode_prompt(talk) == asked


VALUES: dict[str, Any] = {
    "text": "a\"b'c\\d\n{% é 😀 }} \x1f", "nothing": None, "none": 1, "in": 1, "yes": True,
    "many": [1, -2.5, 1e-5, {"k": None, 'q"': [False]}], "not a name": 1,
    "bos_token": "<B>", "tools": [{"name": "f"}],
}  # fmt: skip
PRINTS = (
    "\n{{ text }}|{{ nothing is none }}|{{ yes }}|{{ many | tojson }}|{{ bos_token }}|{{ tools | tojson }}"
    "{% macro inside() %}{{ text }}{{ yes }}{% endmacro %}{{ inside() }}{% for m in messages %}{{ m.content }}"
    "{{ text }}{% endfor %}\n"
)


def test_values_stand_in_the_template_and_give_way_to_those_of_a_caller(tmp_path: Path) -> None:
    folder = Kind(CHATML, []).save(tmp_path)
    write_trained_template(ModelConfig(chat_template=PRINTS, chat_template_args=VALUES), folder)
    assert said(folder) == make_with(PRINTS, VALUES)._template.render(TALK)
    other: dict[str, Any] = {"text": "mine", "yes": False, "tools": TOOL_LIST}
    assert said(folder, **other) == make_with(PRINTS, VALUES | other)._template.render(TALK)


def test_without_a_template_of_the_config_a_folder_stays_as_it_is(tmp_path: Path) -> None:
    folder = KINDS["hermes"].save(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_trained_template(ModelConfig(), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("template", ["", TEMPLATE], ids=["its own", "the config's"])
def test_a_template_that_was_written_is_not_written_into_again(tmp_path: Path, template: str) -> None:
    folder = KINDS["hermes"].save(tmp_path)
    written = []
    for _ in range(3):
        write_trained_template(ModelConfig(chat_template=template, chat_template_args=ARGUMENTS), folder)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1] == written[2]


@pytest.mark.slow
@pytest.mark.parametrize("has_model", [False, True], ids=["a new model", "a model with another template"])
@pytest.mark.parametrize("is_older", [False, True], ids=["", "begun by older code"])
async def test_every_policy_has_the_template_that_trained(
    is_older: bool, has_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "model")
    change(folder, "tokenizer_config.json", chat_template="stale {{ messages[0].content }}")
    sets = [f"model.path={folder}"] if has_model else []
    settings = override_config(config(tmp_path, "rl.num_iterations=1", *sets), [])
    model = settings.model.model_copy(update={"chat_template": TEMPLATE, "chat_template_args": ARGUMENTS})
    session = session_of(create_or_continue(settings.model_copy(update={"model": model})), tmp_path)
    run = session.run
    with monkeypatch.context() as patched:
        if is_older:
            patched.setattr(base, "write_trained_template", lambda model, folder: None)
        tokenizer = (await base_tokenizer(session)).ref
        policy = (await base_policy(session, tokenizer=tokenizer)).ref
    if has_model:
        await base_probe(session, policy=policy)
    batch = commit_batch(run, 0)
    trained = await train(session, iteration=0, batch=batch)
    policy = (await checkpoint(session, iteration=0, batch=batch, previous=policy, metrics=trained.metrics)).ref
    metrics = {**trained.metrics, "rollout/reward_mean": 0.0, "rollout/num_tokens": 100}
    await commit_iteration(session, 0, {"batch": batch, "policy": policy}, metrics)
    expected = session.data.tokenizer.decode_raw(session.data.tokenizer.encode_prompt(TALK))
    await session.close()
    assert expected.startswith(ARGUMENTS["style"]) and expected.endswith("<think>\n\n</think>\n\n")
    for version in (0, 1):
        stored = materialise(run.store, run.policy(version)[0], tmp_path / "stored")
        assert is_older or said(stored) == expected
        await export_policy(run.config, version, tmp_path / f"exported-{version}")
        assert said(tmp_path / f"exported-{version}") == expected
    assert (
        said(source_of(config(tmp_path, "run=b", "model.path=run:a", f"scratch={tmp_path}/scratch")).folder) == expected
    )
    assert not [fault for fault in audit.verify(run)[1] if "evaluation" not in fault], (
        "nothing of the store was written into"
    )
