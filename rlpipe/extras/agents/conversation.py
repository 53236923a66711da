"""The tokens of one rollout of an agent, as a tree: a node for each reply, a branch for each leaf.

A call continues the node whose conversation it repeats: that node's tokens stay as they were
sampled, and only the new messages are encoded. Where it repeats none (the agent has rewritten its
history, or the chat template cannot continue the conversation), a new branch begins, and the whole
conversation is encoded as its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlpipe.base.errors import UserError
from rlpipe.chat_api.chat import ChatRequest, encoded_prompt
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.encoding import TooLong
from rlpipe.engines.client import NOTHING_YET, Completion
from rlpipe.records.prompt import Message, Messages, Tool


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens after which a reply is sampled: the prompt of a branch, and all tokens after it so
    far.
    """

    parent: Node | None  # none: a new branch
    prompt_tokens: list[int]
    prior: Completion  # unfinished
    policy_mask: bytes  # of the tokens of `prior`: 1 on those that were sampled
    added: list[Messages]  # the new messages of each call of the branch, this one last


@dataclass(frozen=True, eq=False)
class Node:
    """A reply, and everything before it."""

    parent: Node | None
    messages: Messages  # of the conversation, the reply last
    tools: list[Tool]
    prompt_tokens: list[int]
    # of the whole branch so far: it ends with what was sampled for this reply
    completion: Completion
    policy_mask: bytes
    added: list[Messages]

    @property
    def num_turns(self) -> int:
        """Replies of the branch."""
        return len(self.added)

    @property
    def replies(self) -> Iterator[Node]:
        """The replies of the branch, this one first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(eq=False)
class ConversationTree:
    """The replies given to one agent."""

    tokenizer: ChatTokenizer
    nodes: list[Node] = field(default_factory=list)
    last: Node | None = None  # the newest reply; of several choices the first

    def context(self, request: ChatRequest, tokens_max: int) -> Context:
        """The context of a call: the branch that it continues, or a new one. UserError when the
        chat template refuses the conversation; TooLong when it has more than `tokens_max` tokens.
        """
        known = [node for node in list(self.nodes) if self._goes_on(node, request)]
        for node in sorted(known, key=lambda node: len(node.messages), reverse=True):
            news = request.messages[len(node.messages) :]
            try:
                tokens = self.tokenizer.encode_continuation(news, tokens_max)
            except TooLong:
                raise
            except UserError:  # a template that does not continue: the next best is to begin anew
                continue
            # nothing would stand between two replies, and a mask shows where one ends
            if not tokens:
                continue
            mask = node.policy_mask + bytes(len(tokens))
            return Context(node, node.prompt_tokens, node.completion.told(tokens), mask, [*node.added, news])
        tokens = encoded_prompt(self.tokenizer, request, tokens_max)
        return Context(None, tokens, NOTHING_YET, b"", [request.messages])

    def _goes_on(self, node: Node, request: ChatRequest) -> bool:
        """True when a call is the node's conversation and more. A truncated reply has no end after
        which a message could follow.
        """
        news = request.messages[len(node.messages) :]
        return (
            bool(news)
            and node.completion.finish_reason == "stop"
            and node.tools == request.tools
            and request.messages[: len(node.messages)] == node.messages
            and not any(message["role"] == "assistant" for message in news)
        )

    def reply(self, request: ChatRequest, context: Context, sampled: Completion, message: Message) -> Node:
        """Adds the node of a reply: `sampled` are the tokens after its context."""
        node = Node(
            context.parent,
            [*request.messages, message],
            request.tools,
            context.prompt_tokens,
            context.prior.then(sampled),
            context.policy_mask + bytes([1]) * len(sampled.tokens),
            context.added,
        )
        assert len(node.policy_mask) == len(node.completion.tokens)
        self.nodes.append(node)
        return node

    @property
    def branches(self) -> list[Node]:
        """The replies that no other reply continues, in the order in which they were given."""
        inner = {id(node.parent) for node in self.nodes}
        return [node for node in self.nodes if id(node) not in inner]


def masks_of_each_reply_once(branches: list[Node]) -> list[bytes]:
    """The masks of branches, in which each reply has mask 1 in one branch only: 0 in each later
    branch that shares it.

    Shared replies are at the beginning: branches have the same replies up to where they part.
    """
    masks: list[bytes] = []
    masked: set[int] = set()
    for branch in branches:
        shared = next((len(node.completion.tokens) for node in branch.replies if id(node) in masked), 0)
        masks.append(bytes(shared) + branch.policy_mask[shared:])
        masked |= {id(node) for node in branch.replies}
    return masks
