"""One rollout of an agent: every call of the agent is sampled by the pool, stored, and recorded as
tokens.

An agent that is started again gets its earlier replies again, as long as it makes the same calls: a
call is identified by the tokens before its reply, and by the number of earlier calls with these
tokens. Calls end with the agent that made them: one without a reply at that time is dropped, as if
it had never been sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rlpipe.base.errors import UserError
from rlpipe.base.seeds import rollout_seed
from rlpipe.chat_api.chat import ChatRefused, ChatRequest, GivenReplies, assistant_message
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.encoding import TooLong
from rlpipe.engines.client import Completion, Sampling
from rlpipe.engines.pool import EnginePool, GroupRequest
from rlpipe.extras.agents.conversation import Context, ConversationTree, Node
from rlpipe.records.rollout import OUT_OF_TURNS, TRUNCATED


class CallKey(NamedTuple):
    """The identity of a call: the hash of the tokens before its reply, and the number of equal
    calls before it.
    """

    context_sha256: str
    repetition: int


Replies = dict[CallKey, list[Completion]]  # what was sampled for each call, one completion a choice
Keep = Callable[[CallKey, list[Completion]], Awaitable[None]]  # no completions: what was kept for the call is forgotten


@dataclass(frozen=True)
class Terms:
    """The settings of a rollout's sampling: `params` has its seed and its largest number of tokens
    after the prompt.
    """

    prompt_id: str
    params: Sampling
    calls_max: int
    context_tokens_max: int


class AgentRollout:
    """Answers the calls of an agent in one rollout. Each try of the rollout is a `one_try`."""

    def __init__(self, pool: EnginePool, tokenizer: ChatTokenizer, terms: Terms, kept: Replies, keep: Keep) -> None:
        self.terms = terms
        self.failure: Exception | None = None  # not the agent's fault: the stage raises it
        self.was_asked = False  # in some try the policy was sampled for a call
        self._pool = pool
        self._tokenizer = tokenizer
        self._kept = kept
        self._keep = keep
        self._begin()

    def _begin(self) -> None:
        """Starts a try: no calls yet; stored replies of an earlier try are kept."""
        self.conversation = ConversationTree(self._tokenizer)
        self.limit = ""  # the one that the last call was refused for
        self._num_refused = 0
        self._num_asked: Counter[str] = Counter()  # of calls that were not refused, as is
        self._num_completions = 0
        self._calls: set[asyncio.Task[GivenReplies]] = set()  # in progress
        self._sampling: dict[CallKey, asyncio.Task[list[Completion]]] = {}
        self._answered: set[CallKey] = set()
        self._over = asyncio.Event()  # the agent has ended: nothing of this try changes any more

    @contextlib.asynccontextmanager
    async def one_try(self) -> AsyncIterator[None]:
        """Runs the agent once, in the body.

        At the end all of its calls have ended; those without a reply are sampled and stored no
        more.
        """
        self._begin()
        try:
            yield
        finally:
            self._over.set()
            while pending := [task for task in (*self._calls, *self._sampling.values()) if not task.done()]:
                await asyncio.wait(pending)
        for key in self._sampling:
            if key not in self._answered and self._kept.pop(key, None):
                await self._keep(key, [])

    def answer(self, request: ChatRequest) -> asyncio.Task[GivenReplies]:
        """The replies to a call. ChatRefused, also when the agent ends before them; then the call
        does not count.
        """
        call = asyncio.create_task(self._answer(request))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _answer(self, request: ChatRequest) -> GivenReplies:
        self._check_goes_on()
        try:
            if self.failure is None:
                return await self._replies(request)
        except (ChatRefused, asyncio.CancelledError):
            raise
        except Exception as error:
            # any error: the stage raises it, unless the agent has ended
            self._check_goes_on()
            self.failure = error
        raise ChatRefused(503, "the run that samples has failed", "run_failed") from self.failure

    def _check_goes_on(self) -> None:
        """ChatRefused when the agent has ended while a call is still read, encoded or sampled."""
        if self._over.is_set():
            raise ChatRefused(401, "the agent of this rollout has ended", "invalid_api_key")

    async def _replies(self, request: ChatRequest) -> GivenReplies:
        try:
            context = await asyncio.to_thread(self.conversation.context, request, self.terms.context_tokens_max)
        except TooLong as error:
            self._check_goes_on()
            raise self._too_long() from error
        except UserError as error:
            raise ChatRefused(400, str(error), "chat_template") from error
        self._check_goes_on()
        terms, num_before = self.terms, len(context.prior.tokens)
        room = min(terms.params.max_new_tokens, terms.context_tokens_max - len(context.prompt_tokens))
        if room <= num_before:
            raise self._too_long()
        if self._num_completions + request.num_choices > terms.calls_max:
            raise self._out_of_turns(request.num_choices)
        digest = _sha256(context, request)
        key = CallKey(digest, self._num_asked[digest])
        self._num_asked[digest] += 1
        self._num_completions += request.num_choices
        tokens_max = room if request.tokens_max is None else min(room, num_before + request.tokens_max)
        self.was_asked = True
        self._sampling[key] = asyncio.create_task(self._sampled(request.num_choices, context, key, tokens_max))
        return await self._given(request, context, key)

    async def _given(self, request: ChatRequest, context: Context, key: CallKey) -> GivenReplies:
        num_refused = self._num_refused
        sampled = await self._sampling[key]
        self._check_goes_on()
        nodes = []
        for index, completion in enumerate(sampled):
            seed = self._seed(key, index)
            text = self._tokenizer.decode(completion.tokens.tolist())
            message = assistant_message(text, request, lambda number, seed=seed: f"call_{seed:08x}{number}")
            nodes.append(self.conversation.reply(request, context, completion, message))
        self._answered.add(key)
        self.conversation.last = nodes[0]
        if self._num_refused == num_refused:  # the agent has gone on, with less
            self.limit = ""
        messages = [node.messages[-1] for node in nodes]
        return GivenReplies(messages, sampled, len(context.prompt_tokens) + len(context.prior.tokens))

    async def _sampled(self, num_choices: int, context: Context, key: CallKey, tokens_max: int) -> list[Completion]:
        """Samples for a call, one completion a choice; they are stored before the agent gets any of
        them.
        """
        if key in self._kept:
            return self._kept[key]
        params = [
            replace(self.terms.params, max_new_tokens=tokens_max, seed=self._seed(key, index))
            for index in range(num_choices)
        ]
        group = GroupRequest(
            self.terms.prompt_id, context.prompt_tokens, params, [context.prior] * num_choices, context.prior.engine
        )
        [completions] = await self._pool.generate([group], enough=self._over)
        self._check_goes_on()
        sampled = [_after(completion, len(context.prior.tokens)) for completion in completions]
        self._kept[key] = sampled  # first: a failed write may be in the store all the same
        await self._keep(key, sampled)
        return sampled

    def _seed(self, key: CallKey, choice: int) -> int:
        return rollout_seed(self.terms.params.seed, "call", *key, choice)

    def _out_of_turns(self, num_choices: int) -> ChatRefused:
        """The refusal of a call that asks for more completions than are left."""
        num_left = self.terms.calls_max - self._num_completions
        message = (
            f"rl.turns_max={self.terms.calls_max}: of so many completions of this rollout {num_left} are left, and"
            f" {num_choices} are asked for"
        )
        return self._refusal(OUT_OF_TURNS, message, "turns_max")

    def _too_long(self) -> ChatRefused:
        """The refusal of a conversation that leaves no token for a reply, whether it was encoded,
        or is so long that it need not be.
        """
        terms = self.terms
        message = (
            f"the conversation leaves no token for a reply: it may have {terms.context_tokens_max} tokens, "
            f"{terms.params.max_new_tokens} of them after its first messages, the reply included"
        )
        return self._refusal(TRUNCATED, message, "context_length_exceeded")

    def _refusal(self, limit: str, message: str, code: str) -> ChatRefused:
        self.limit, self._num_refused = limit, self._num_refused + 1
        return ChatRefused(400, message, code)

    @property
    def finish_reason(self) -> str:
        """The reason why the rollout ended, once its agent has: its last reply was truncated, or a
        limit refused its last call; else "stop".
        """
        last = self.conversation.last
        is_cut = (
            last is not None
            and last.completion.finish_reason == TRUNCATED
            and len(last.completion.tokens) >= self._room(last)
        )
        return TRUNCATED if is_cut else self.limit or "stop"

    def _room(self, node: Node) -> int:
        return min(self.terms.params.max_new_tokens, self.terms.context_tokens_max - len(node.prompt_tokens))


def _sha256(context: Context, request: ChatRequest) -> str:
    """The hash of a call: of everything that its samples depend on, except the rollout's seed."""
    tokens = np.array([*context.prompt_tokens, *context.prior.tokens], np.int32)
    request_text = f"{len(context.prompt_tokens)} {request.num_choices} {request.tokens_max} "
    return hashlib.sha256(request_text.encode() + tokens.tobytes()).hexdigest()


def _after(completion: Completion, num_tokens: int) -> Completion:
    """The part of a completion after its first `num_tokens`."""
    tokens, logprobs = completion.tokens[num_tokens:], completion.rollout_logprobs[num_tokens:]
    # a call is sampled by the version that the pool serves, and no other
    spans = [(completion.spans[-1][0], len(tokens))]
    return Completion(tokens, logprobs, completion.finish_reason, spans, completion.engine)
