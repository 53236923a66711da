"""`rl.branches = "all"`: each reply is trained once, each rollout counts once, and branches are
found wherever their rollouts come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.algorithms.advantages import ESTIMATORS, rollout_means, rollout_sums
from rlpipe.base.references import ArtifactRef
from rlpipe.chat_api.chat import read_request
from rlpipe.config.training import RlConfig
from rlpipe.engines.client import NOTHING_YET, Completion, logprobs_of, tokens_of
from rlpipe.extras.agents.conversation import ConversationTree, Node, masks_of_each_reply_once
from rlpipe.extras.agents.player import branch_rows
from rlpipe.loop.session import Session
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.rollout import ROLLOUTS as ROLLOUT_COLUMNS
from rlpipe.records.rollout import Branch, Rollout, with_branches
from rlpipe.stages.branches import branches_of, shards_with_branches
from rlpipe.stages.filtering import filter_groups, with_advantages
from rlpipe.stages.generation import generate
from rlpipe.stages.sampling import sample_prompts
from rlpipe.stages.scoring import score
from rlpipe.store.artifacts import read_manifest, read_records
from rlpipe.trainer.rl import advantages
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world
from tests.batches import read_rl_batch, token_advantages
from tests.data.test_chat import make
from tests.rows import rollout
from tests.stages.test_agents import POLICY, made_session
from tests.trainer.test_gap import gaps_of

# parent of each node (-1: none), what the agent put before its reply, and tokens of the reply
TREES = st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=25)
FORKING = '''
import json, urllib.request

def agent(prompt, client):
    """A reply, two after that, one after each of these, and one in a conversation of its own."""
    def ask(messages, n=1):
        headers = {"Authorization": "Bearer " + client["api_key"]}
        body = json.dumps({"messages": messages, "n": n}).encode()
        request = urllib.request.Request(client["base_url"] + "/chat/completions", body, headers)
        return [choice["message"] for choice in json.load(urllib.request.urlopen(request))["choices"]]

    asked = {"role": "user", "content": "go on"}
    said = [*prompt["messages"], ask(prompt["messages"])[0], asked]
    for message in reversed(ask(said, 2)):
        last = ask([*said, message, asked])[0]
    if prompt["answer"] == "forks":
        last = ask([{"role": "user", "content": "you have said " + last["content"]}])[0]
    return {"reward": float(len(last["content"]))}
'''


def tree_of(parts: list[tuple[int, int, int]]) -> tuple[list[Node], list[list[int]]]:
    """A tree, and the tokens of each reply: no token is there twice."""
    nodes: list[Node] = []
    replies: list[list[int]] = []
    token = 0

    def said(count: int) -> Completion:
        nonlocal token
        token += count
        numbers = [*range(token - count, token)]
        return Completion(tokens_of(numbers), logprobs_of([0.0] * count), "stop", [(0, count)], "e")

    for place, num_put, num_sampled in parts:
        parent = nodes[place % len(nodes)] if nodes and place >= 0 else None
        put, sampled = said(num_put if parent else 0), said(num_sampled)
        replies.append(sampled.tokens.tolist())
        before, mask = (parent.completion, parent.policy_mask) if parent else (NOTHING_YET, b"")
        mask += bytes(len(put.tokens)) + b"\1" * num_sampled
        nodes.append(Node(parent, [], [], [1, 2], before.then(put).then(sampled), mask, []))
    return nodes, replies


@given(parts=TREES, random=st.randoms(use_true_random=False))
def test_each_reply_is_trained_once(parts: list[tuple[int, int, int]], random: Any) -> None:
    nodes, replies = tree_of(parts)
    inner = {id(node.parent) for node in nodes}
    leaves = [node for node in nodes if id(node) not in inner]
    random.shuffle(leaves)
    masks = masks_of_each_reply_once(leaves)
    assert masks[0] == leaves[0].policy_mask, "the row of the rollout is what it is where it alone is trained"
    trained = Counter[int]()
    for leaf, mask in zip(leaves, masks, strict=True):
        assert len(mask) == len(leaf.completion.tokens)
        trained.update(token for token, is_trained in zip(leaf.completion.tokens, mask, strict=True) if is_trained)
    assert trained == Counter(token for reply in replies for token in reply)


@given(parts=TREES, cut=st.sets(st.integers(0, 24)), random=st.randoms(use_true_random=False))
def test_with_masked_truncation_a_whole_reply_is_trained_once_and_one_that_was_cut_never(
    parts: list[tuple[int, int, int]], cut: set[int], random: Any
) -> None:
    """Whole replies of a branch that was cut off later were in no loss,
    where no branch before it had them."""
    nodes, replies = tree_of([(place, max(num_put, 1), max(num_sampled, 1)) for place, num_put, num_sampled in parts])
    inner = {id(node.parent) for node in nodes}
    leaves = [node for node in nodes if id(node) not in inner]
    random.shuffle(leaves)
    is_cut = {id(leaf) for leaf in leaves[1:] if nodes.index(leaf) in cut}  # nothing goes on from one that was cut off
    reasons = ["length" if id(leaf) in is_cut else "stop" for leaf in leaves]
    ended = [
        replace(leaf, completion=replace(leaf.completion, finish_reason=reason))
        for leaf, reason in zip(leaves, reasons, strict=True)
    ]
    own = rollout_row(0, 0, 0.0, "stop", ended[0].completion.tokens, ended[0].policy_mask)
    for masking in (False, True):
        rl = RlConfig(branches="all", agent="a:b", mask_truncated=masking)
        rows: list[Any] = [own, *branches_of([own], branch_rows(0, 0, ended, rl), rl)]
        trained = Counter(int(token) for row in rows for token in row.completion_tokens[row.loss_mask == 1])
        kept = [reply for node, reply in zip(nodes, replies, strict=True) if not (masking and id(node) in is_cut)]
        assert trained == Counter(token for reply in kept for token in reply)
        assert all(row.loss_mask.any() for row in rows), "no row for nothing"
    cut_off = replace(own, finish_reason="length")
    masking_rl = RlConfig(branches="all", agent="a:b", mask_truncated=True)
    assert branches_of([cut_off], branch_rows(0, 0, ended, masking_rl), masking_rl) == [], (
        "its reward is of what was cut off"
    )


def test_two_replies_that_nothing_stands_between_are_two_branches() -> None:
    """A mask would show one reply, of which the half is masked when it was cut off."""
    silent = (
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    tree = ConversationTree(make(silent))
    asked: list[Any] = [{"role": "user", "content": "hi"}]
    first = read_request({"messages": asked})
    said = Completion(tokens_of([1, 2]), logprobs_of([-0.5] * 2), "stop", [(0, 2)], "e")
    node = tree.reply(first, tree.context(first, 100), said, {"role": "assistant", "content": "x"})
    for content, parent in (("", None), ("more", node)):
        news = {"role": "user" if content else "system", "content": content}
        assert tree.context(read_request({"messages": [*node.messages, news]}), 100).parent is parent


def rollout_row(group_index: int, rollout_index: int, reward: float, reason: str, tokens: Any, mask: bytes) -> Rollout:
    place = {"group_index": group_index, "rollout_index": rollout_index, "environment": "", "finish_reason": reason}
    return rollout(place | {"completion_tokens": tokens.tolist(), "loss_mask": [*mask], "reward": reward})


def branch(group_index: int, rollout_index: int, mask: Sequence[int], finish_reason: str = "stop") -> Branch:
    tokens = np.arange(len(mask), dtype=np.int32)
    logprobs = np.full(len(mask), -0.5, dtype=np.float32)
    prompt_tokens, loss_mask = np.array([7, 8], dtype=np.int32), np.array(mask, dtype=np.int8)
    return Branch(group_index, rollout_index, 0, prompt_tokens, tokens, loss_mask, logprobs, finish_reason)


ROLLOUTS = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.lists(st.integers(0, 5), min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=12,
)  # the group, the reward, and the scored tokens of each row


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(made=ROLLOUTS, with_kl=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_a_rollout_counts_once_however_many_rows_it_has(
    estimator: str, made: list[tuple[int, float, list[int]]], with_kl: bool, seed: int
) -> None:
    made = sorted(made, key=lambda entry: entry[0])
    groups_R, rewards_R, rows_R = (
        np.array([*map(of, made)]) for of in (lambda r: r[0], lambda r: r[1], lambda r: len(r[2]))
    )
    lengths_B = np.array([length for *_, lengths in made for length in lengths])
    rollout_B = np.repeat(np.arange(len(made)), rows_R)
    lengths_R = np.array([sum(lengths) for *_, lengths in made])
    assert rollout_sums(lengths_B, rollout_B).tolist() == lengths_R.tolist()
    kl: dict[str, Any] = (
        {"kl_N": np.random.default_rng(seed).random(lengths_B.sum()), "kl_coef": 0.1} if with_kl else {}
    )
    how: dict[str, Any] = {"estimator": estimator, "gamma": 0.9, **kl}
    rows = rewards_R[rollout_B], groups_R[rollout_B], lengths_B
    found = token_advantages(*rows, **how, rollout_B=rollout_B)
    alone = (
        rows if estimator == "reinforce_plus_plus" else (rewards_R, groups_R, lengths_R)
    )  # it compares tokens, row by row
    assert found.tolist() == token_advantages(*alone, **how).tolist()
    single = token_advantages(rewards_R, groups_R, lengths_R[: len(made)], **how)
    assert (
        single.tolist()
        == token_advantages(rewards_R, groups_R, lengths_R, **how, rollout_B=np.arange(len(made))).tolist()
    )


def test_five_branches_do_not_move_the_mean_of_the_group() -> None:
    rollouts = [made_rollout(0, 0, 1.0, "stop"), made_rollout(0, 1, 0.0, "stop")]
    branches = [branch(0, 0, [1, 0, 1]) for _ in range(5)]
    for estimator in ("grpo", "dr_grpo", "rloo", "maxrl"):
        expected = [one.advantage for one in with_advantages(rollouts, estimator, 1.0)]
        assert [one.advantage for one in with_advantages(rollouts, estimator, 1.0, branches)] == expected
    first, second = (one.advantage for one in with_advantages(rollouts, "opo", 1.0, branches))
    assert (first, second) == (pytest.approx(1 - 12 / 14), pytest.approx(-12 / 14)), (
        "its length is that of all its rows"
    )


def made_rollout(group_index: int, rollout_index: int, reward: float, reason: str) -> Rollout:
    return rollout_row(group_index, rollout_index, reward, reason, np.ones(2, np.int32), bytes([1, 1]))


def test_branches_stand_behind_their_rollout_and_one_of_none_is_a_fault() -> None:
    rollouts = [made_rollout(group, index, 0.0, "stop") for group, index in ((0, 0), (0, 1), (3, 0))]
    branches = [branch(3, 0, [1]), branch(0, 0, [1]), branch(3, 0, [1, 1])]
    rows, rollout_B = with_branches(rollouts, branches)
    assert rows == [rollouts[0], branches[1], rollouts[1], rollouts[2], branches[0], branches[2]]
    assert rollout_B.tolist() == [0, 0, 1, 2, 2, 2] and with_branches([], [])[1].tolist() == []
    with pytest.raises(AssertionError, match=r"branches of no rollout: \[\(0, 2\)\]"):
        with_branches(rollouts, [branch(0, 2, [1])])


def test_a_rollout_that_is_masked_or_not_trained_takes_its_branches_with_it() -> None:
    rollouts = [made_rollout(0, 0, 0.0, "length"), made_rollout(0, 1, 0.0, "stop")]
    branches = [branch(0, 0, [1]), branch(0, 1, [1]), branch(0, 1, [1], "length"), branch(0, 2, [1])]
    assert branches_of(rollouts, branches, RlConfig()) == branches[:3]
    assert branches_of(rollouts, branches, RlConfig(mask_truncated=True)) == branches[1:2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "forking.py").write_text(FORKING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def forking_session(folder: Path, store: str, *sets: str, answers: str = "forks") -> Session:
    small = ["rl.agent=forking:agent", "rl.turns_max=6", "rl.branches=all", "rl.filters={}"]
    return made_session(folder, store, *small, *sets, answers=answers)


async def sampled(session: Session) -> tuple[ArtifactRef, list[ArtifactRef]]:
    """Prompts and shards of iteration 0."""
    at = {"iteration": 0, "round_index": 0}
    prompts = (await sample_prompts(session, before=None, **at)).ref
    num_shards = -(-session.config.rl.num_prompts // session.config.rl.shard_prompts)
    part = {"prompts": prompts, "policy": POLICY, **at}
    return prompts, [(await generate(session, shard=shard, **part)).ref for shard in range(num_shards)]


@pytest.mark.slow
@pytest.mark.parametrize(("answers", "num_beside"), [("forks", 2), ("goes on", 1)])
async def test_what_is_trained_is_every_reply_once(folder: Path, answers: str, num_beside: int) -> None:
    session = forking_session(folder, "store", answers=answers)
    at = {"iteration": 0, "round_index": 0}
    prompts, shards = await sampled(session)
    scores = await score(session, prompts=prompts, rollouts=shards, **at)
    batch = await filter_groups(session, prompts=[prompts], scores=[scores.ref], branches=shards, **at)
    read = read_rl_batch(session.run.store, batch.ref, 1)
    assert read.rollout_B.tolist() == [place for place in range(4) for _ in range(1 + num_beside)]
    assert read.group_index_B.tolist() == [group for group in range(2) for _ in range(2 * (1 + num_beside))]
    pool: Any = session.pool
    num_sampled = sum(read.lengths_B)
    replies = Counter[tuple[int, ...]]()  # what was trained, stretch by stretch
    for sequence in read.steps[0]:
        stretches = np.split(sequence.scored, np.flatnonzero(np.diff(sequence.scored) > 1) + 1)
        replies.update(tuple(sequence.tokens[places].tolist()) for places in stretches)
        assert (sequence.rollout_logprobs == -0.5).all()
    num_replies = 5 + (answers == "forks")
    assert replies.total() == 4 * num_replies and sum(len(group.params) for group in pool.groups) == 4 * num_replies
    assert num_sampled == sum(len(reply) * count for reply, count in replies.items())
    assert batch.metrics["rollout/num_trained"] == 4 and batch.metrics["rollout/num_branches_trained"] == 4 * num_beside
    branches = read_records(session.run.store, batch.ref, "branches.parquet", Branch)
    assert batch.metrics["rollout/num_branch_tokens_trained"] == sum(int(one.loss_mask.sum()) for one in branches)
    rollouts = read_records(session.run.store, batch.ref, "batch.parquet", Rollout)
    lengths_R = rollout_sums(read.lengths_B, read.rollout_B)
    advantages_N = token_advantages(
        read.rewards_B, read.group_index_B, read.lengths_B, estimator="grpo", rollout_B=read.rollout_B
    )
    assert [one.advantage for one in rollouts] == rollout_means(advantages_N, lengths_R).tolist()
    await session.close()


@pytest.mark.slow
async def test_the_default_keeps_what_it_kept_and_trains_the_last_alone(folder: Path) -> None:
    refs = {}
    for branches in ("last", "all"):
        session = forking_session(folder, branches, f"rl.branches={branches}")
        at = {"iteration": 0, "round_index": 0}
        prompts, shards = await sampled(session)
        scores = await score(session, prompts=prompts, rollouts=shards, **at)
        beside = shards_with_branches(session.config, shards)
        batch = await filter_groups(session, prompts=[prompts], scores=[scores.ref], branches=beside, **at)
        refs[branches] = session.run.store, shards[0], scores.ref, batch.ref
        await session.close()
    files = {name: {file.plain_name: file.sha256 for ref in of for file in read_manifest(store, ref.folder).files}
             for name, (store, *of) in refs.items()}  # fmt: skip
    assert (
        files["last"].keys() == files["all"].keys()
        and files["last"]["scores.parquet"] == files["all"]["scores.parquet"]
    )
    assert files["last"]["rollouts.parquet"] == files["all"]["rollouts.parquet"]
    store, shard, _, batched = refs["last"]
    assert read_rl_batch(store, batched, 1).rollout_B.tolist() == [0, 1, 2, 3]
    kept = read_records(store, shard, "branches.parquet", Branch)
    assert all(np.array_equal(one.loss_mask == 1, one.rollout_logprobs < 0) for one in kept), (
        "1 where a token was sampled"
    )
    manifest = read_manifest(store, batched.folder)
    assert not {"rl.branches"} & manifest.settings.keys() and not [
        name for name in manifest.metrics if "branch" in name
    ]


async def test_a_group_that_is_dropped_takes_its_branches_with_it(folder: Path) -> None:
    session = forking_session(folder, "store", "rl.completion_tokens_max=20", "rl.mask_truncated=true")
    at = {"iteration": 0, "round_index": 0}
    prompts, shards = await sampled(session)
    store = session.run.store
    assert {
        one.finish_reason for one in read_records(store, shards[0], "rollouts.parquet", Rollout, ROLLOUT_COLUMNS)
    } == {"length"}
    assert len(read_records(store, shards[0], "branches.parquet", Branch)) >= 4
    scores = await score(session, prompts=prompts, rollouts=shards, **at)
    batch = await filter_groups(session, prompts=[prompts], scores=[scores.ref], branches=shards, **at)
    assert (
        batch.metrics["rollout/groups_dropped_all_truncated"] == 2
        and batch.metrics["rollout/num_branches_trained"] == 0
    )
    assert [file.plain_name for file in read_manifest(store, batch.ref.folder).files] == ["batch.parquet"]
    await session.close()


def test_the_trainer_gives_branches_the_advantage_of_their_rollout(tmp_path: Path) -> None:
    ranks = trainer_world.one_rank(tmp_path, tokens_max=512)
    rows = trainer_world.rollout_rows(3, 2)
    for row in rows:
        row["loss_mask"] = [1] * len(row["loss_mask"])
    plain = trainer_world.batch(ranks.store, "plain", rows)
    added = [branch(2, 0, [0, 0, 1, 1]), branch(0, 0, [1]), branch(2, 0, [1, 0, 1])]
    added = [replace(one, completion_tokens=one.completion_tokens + 2) for one in added]
    [file] = read_manifest(ranks.store, "plain").files
    files = {
        "batch.parquet": ranks.store.read(f"plain/{file.name}"),
        "branches.parquet": to_parquet(to_table(added, Branch)),
    }
    ref = trainer_world.artifact(ranks.store, "branched", files, {"empty_groups": []})
    alone, both = read_rl_batch(ranks.store, plain, 3), read_rl_batch(ranks.store, ref, 3)
    assert both.rollout_B.tolist() == [0, 0, 1, 2, 3, 4, 4, 4, 5] and [len(step) for step in both.steps] == [3, 2, 4]
    assert [one.row for step in both.steps for one in step] == [*range(9)]
    settings_of_job = RlConfig.model_validate(trainer_world.RL)
    expected_N, found_N = (
        np.concatenate(advantages(ranks, batch, [], settings_of_job)).tolist() for batch in (alone, both)
    )
    starts = {place: found_N[int(start)] for place,
              start in zip(both.rollout_B.tolist(), np.cumsum(both.lengths_B) - both.lengths_B,
                           strict=True)}  # fmt: skip
    assert [starts[place] for place in range(6)] == [
        expected_N[int(start)] for start in np.cumsum(alone.lengths_B) - alone.lengths_B
    ]
    assert found_N == np.repeat([starts[place] for place in both.rollout_B.tolist()], both.lengths_B).tolist()
    trainer = Trainer(ranks)
    trainer_world.run(trainer, "load", trainer_world.load_new("new"))
    metrics = trainer_world.run(trainer, "train", trainer_world.train("new", "after", "rl", ref, {"num_steps": 3}))[
        "metrics"
    ]
    assert metrics["train/num_tokens"] == sum(alone.lengths_B) + 5
    stored = gaps_of(trainer)  # of the rollouts alone, as the rows of batch.parquet are
    assert [len(row["gap"]) for row in stored] == alone.lengths_B.tolist()
    assert [(row["group_index"], row["rollout_index"]) for row in stored] == [
        (group, index) for group in range(3) for index in range(2)
    ]
    trainer_world.run(trainer, "load", trainer_world.load_new("new"))
    trainer_world.run(trainer, "train", trainer_world.train("new", "after", "rl", plain, {"num_steps": 3}))
    for row, other in zip(stored, gaps_of(trainer), strict=True):
        np.testing.assert_allclose(np.array(row["gap"], float), np.array(other["gap"], float), atol=1e-2)
