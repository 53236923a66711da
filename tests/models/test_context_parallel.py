"""Rows that ranks share: the same logprobs and gradients as of rows that one rank holds, and a
share of their memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from rlpipe.base.errors import UserError
from rlpipe.extras.plan.trial import LiveBytes
from rlpipe.models.causal import small_windows
from rlpipe.models.context_parallel import ContextGroup, check_context_group, use_context_group, uses_context_group
from rlpipe.models.flex import use_flex
from rlpipe.models.small import VOCABULARY, small_config, small_model
from rlpipe.trainer.batches import Microbatch, collate
from rlpipe.trainer.model import PolicyModel, layers_of, recompute
from rlpipe.trainer.packing import Row, Text, sequence_of
from rlpipe.trainer.probe_rows import behind, sequence
from rlpipe.trainer.selftest import PROMPT
from tests.context_group_world import on_ranks

LENGTHS = (61, 33, 29, 17, 5, 3)
Placed = tuple[list[Text], list[Row]]
# plain, repeated key-value heads, windows, windows of some layers, chunks,
# experts, latent heads of other sizes
FAMILIES = ["qwen2", "llama", "qwen3", "mistral", "gemma3_text", "llama4_text", "qwen3_moe", "deepseek_v3"]


def single() -> Placed:
    return [[sequence(length, VOCABULARY, 0)] for length in LENGTHS[:3]], [[0], [1], [2]]


def packed() -> Placed:
    return [[sequence(length, VOCABULARY, 0)] for length in LENGTHS], [[0, 2, 4], [1, 3, 5]]


def shared() -> Placed:
    prompt = sequence(PROMPT, VOCABULARY, 2).tokens
    return [
        [behind(prompt, sequence(length, VOCABULARY, 0)) for length in LENGTHS[1:4]],
        [sequence(61, VOCABULARY, 0)],
    ], [[0, 1]]


def policy_of(family: str, context: ContextGroup | None = None, **changes: object) -> PolicyModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4}
    policy = PolicyModel(small_model(small_config(AutoConfig.for_model(family), **heads | changes)), context=context)
    if context:
        use_context_group(policy.lm, context)
    return policy


def passes(policy: PolicyModel, batch: Microbatch) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs and entropies, and the whole gradient of a weighted sum of both."""
    with small_windows(policy.lm.config):
        logprobs_N, entropy_N = policy(
            batch.tokens_RL,
            batch.positions_RL,
            batch.source_N,
            batch.target_N,
            temperature=0.9,
            branch_RL=batch.branch_RL,
        )
        ((logprobs_N - 0.1 * entropy_N) * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
    gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in policy.parameters()]
    return logprobs_N.detach(), entropy_N.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def weights_of(policy: PolicyModel, other: PolicyModel) -> PolicyModel:
    policy.load_state_dict(other.state_dict())
    return policy


@pytest.mark.slow
@pytest.mark.parametrize("rows", [single, packed, shared])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_whole_rows(family: str, rows: Callable[[], Placed]) -> None:
    whole, batch = policy_of(family), collate(*rows())
    logprobs_N, entropy_N, gradient = passes(whole, batch)
    for count in (2, 4):
        assert batch.tokens_RL.shape[1] % count or rows is not packed, "rows are filled"
        done = on_ranks(count, lambda context: passes(weights_of(policy_of(family, context), whole), batch))
        for logprobs, entropies, _ in done:
            assert torch.equal(logprobs, done[0][0]) and torch.equal(entropies, done[0][1]), "a rank sees others"
            torch.testing.assert_close(logprobs, logprobs_N, rtol=0, atol=2e-6)
            torch.testing.assert_close(entropies, entropy_N, rtol=0, atol=2e-6)
        summed = torch.stack([part for _, _, part in done]).double().sum(0)
        assert float((summed - gradient).norm() / gradient.norm()) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "family", ["qwen2", "gpt_oss"]
)  # plain, and sinks of heads, whose own code has no other attention to exchange in
def test_flex_attention_of_shared_rows_too(family: str) -> None:
    """Without gradients, for which it has no kernel on a CPU."""
    whole, batch = policy_of(family), collate(*shared())
    given = (batch.tokens_RL, batch.positions_RL, batch.source_N, batch.target_N)

    def logprobs_of(policy: PolicyModel) -> Tensor:
        use_flex(policy.lm)
        with torch.no_grad():
            return policy(*given, temperature=1.0, branch_RL=batch.branch_RL)[0]

    expected = logprobs_of(whole)
    for logprobs_N in on_ranks(2, lambda context: logprobs_of(weights_of(policy_of(family, context), whole))):
        torch.testing.assert_close(logprobs_N, expected, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_rank_holds_its_share_of_what_a_long_row_takes(recomputed: bool) -> None:
    """Bytes at the most, of the forward and backward pass over one row."""
    text = sequence(255, VOCABULARY, 0)
    batch = collate([[sequence_of(np.resize(text.tokens, 2048), np.arange(1, 2048))]], [[0]])

    def held(context: ContextGroup | None) -> int:
        policy = policy_of("qwen2", context, num_hidden_layers=4)
        for layer in layers_of(policy.lm) if recomputed else []:
            recompute(layer)
        for parameter in policy.parameters():  # gradients are not divided, but reduced at once
            parameter.register_post_accumulate_grad_hook(lambda whole: setattr(whole, "grad", None))
        with LiveBytes([*policy.parameters(), *policy.buffers()]) as live:
            logprobs_N, _ = policy(batch.tokens_RL, batch.positions_RL, batch.source_N, batch.target_N, 1.0, False)
            logprobs_N.sum().backward()
        return live.most

    alone = held(None)
    for count in (2, 4):
        share = max(on_ranks(count, held)) / alone
        print(f"{count} ranks: {share:.3f} of {alone / 2**20:.1f} MiB")
        assert share < 1.4 / count


def test_a_family_that_cannot_share_rows_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"trainer\.context_ranks=3: the 4 attention heads .* of qwen2 .*; use 1 or 2"):
        check_context_group(policy_of("qwen2").lm.config, 3)
    with pytest.raises(
        UserError, match=r"rows of bloom cannot be split .*: its attention .*; use trainer.context_ranks = 1"
    ):
        on_ranks(2, lambda context: policy_of("bloom", context))
    assert not uses_context_group(policy_of("qwen2").lm)
