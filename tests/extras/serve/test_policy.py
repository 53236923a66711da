"""Stop strings: what is cut, and what may be sent before it is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.extras.serve.policy import cut, has_stop, settled

PIECES = ["a", "b", "ab", "ba", "c", "", "aab"]  # of tokens, by id


def text_of(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def completion_of(tokens: list[int], reason: str = "length") -> Completion:
    return Completion(tokens_of(tokens), logprobs_of([-0.5] * len(tokens)), reason, [(1, len(tokens))], "e")


stops_of = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple)


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=12), stops_of)
def test_what_was_sent_stays_and_what_came_after_a_stop_does_not_matter(
    tokens: list[int], stops: tuple[str, ...]
) -> None:
    whole = cut(completion_of(tokens), text_of, stops)
    places = [size for size in range(len(tokens) + 1) if has_stop(text_of(tokens[:size]), stops)]
    num_kept = places[0] if places else len(tokens)
    assert whole.completion.tokens.tolist() == tokens[:num_kept]
    assert len(whole.completion.rollout_logprobs) == num_kept
    assert whole.completion.finish_reason == ("stop" if places else "length")
    assert not has_stop(whole.text, stops) and text_of(tokens).startswith(whole.text)
    if places:
        assert any(text_of(tokens[:num_kept]).startswith(whole.text + stop) for stop in stops)
        assert cut(completion_of(tokens[:num_kept], "abort"), text_of, stops) == whole
    for size in range(num_kept):
        assert whole.text.startswith(settled(text_of(tokens[:size]), stops))


def test_a_character_of_which_bytes_are_missing_is_held_back() -> None:
    assert settled("ab\ufffd", ()) == "ab" and settled("a\ufffdb", ()) == "a\ufffdb"
