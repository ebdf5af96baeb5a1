"""One attempt's live forest: find the place of a request, continue it at token level, commit the answer.

A request's place depends on its messages alone: the deepest answered call whose conversation, as the client saw it,
is a prefix of the request's. Several that fit are equal for the client; the one answered last is continued, unless
tool-call ids of ours in the history say which it was. No lock is held over a generation, so calls may overlap as they
like. What a chat backend's prompt was in tokens is known after its answer, if ever: its place by messages comes first,
and `with_prompt` corrects it.

Tool-call ids that we issued are anchors: behind an equal history, a message with all ids of an answer of ours is that
answer, even where the client altered its text or arguments. The tokens that were sampled are what the policy said, and
the results that follow are results of those calls; the edit is of the client's own copy, and is only noted
(`Place.echo_edited`). An altered system, user or tool message is another history, anchors behind it or not.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.semconv import ForkCause
from lightning_rl_proxy import echo, forks
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.echo import Conversation, Echo
from lightning_rl_proxy.forks import Fork
from lightning_rl_proxy.ledger import AttemptInfo
from lightning_rl_proxy.rendering import Renderer

_OPENING = 4  # tokens; so long may a format's opening of the reasoning be, which ends the prompt of some


@dataclass(eq=False, slots=True)
class LiveCall:
    """An answered call that later calls may continue.

    `parent` is the call that it continues in tokens, `before` the one that it continues in messages: a call that had
    to be rendered anew has only the latter. `echoes` are the messages that it adds to `before`, its answer the last;
    `depth` is the number of messages with all before. `reasoned`: whether it reasoned before it answered.
    """

    call: Call
    parent: "LiveCall | None"
    before: "LiveCall | None"
    conversation: Conversation
    depth: int
    key: bytes
    reasoned: bool

    def context(self) -> tuple[list[int], list[int]]:
        """The call's whole prompt and its response."""
        chain = self._chain()
        prompt: list[int] = []
        for call in chain[:-1]:
            prompt += call.prompt_ids
            prompt += call.response_ids
        return prompt + self.call.prompt_ids, self.call.response_ids

    def whole(self) -> Conversation:
        """The call's conversation from its first message to its answer."""
        parts = [self.conversation.body]
        node = self.before
        while node is not None:
            parts.append(node.conversation.body)
            node = node.before
        return Conversation(self.conversation.head, [message for part in reversed(parts) for message in part])

    def at_depth(self, depth: int) -> "LiveCall | None":
        """The call of this conversation whose answer is its message number `depth`, from 1."""
        node: LiveCall | None = self
        while node is not None and node.depth > depth:
            node = node.before
        return node if node is not None and node.depth == depth else None

    def exact(self) -> bool:
        """Whether the ids of the whole context are known."""
        return all(call.exact for call in self._chain())

    def reasons_at(self, token: int) -> bool:
        """Whether that token of prompt and response is one of an answer that was reasoned."""
        end, node = len(self.context()[0]) + len(self.call.response_ids), self
        while True:
            start = end - len(node.call.response_ids)
            if start - _OPENING <= token < end:
                return node.reasoned
            if token >= start or node.parent is None:
                return False
            end = start - len(node.call.prompt_ids)
            node = node.parent

    def _chain(self) -> list[Call]:
        chain: list[Call] = []
        node: LiveCall | None = self
        while node is not None:
            chain.append(node.call)
            node = node.parent
        return chain[::-1]


@dataclass(eq=False, slots=True)
class Trail:
    """A request's way through what the attempt knows: `keys[i]` stands for its first i messages behind the head.

    `anchored` are the answers that its tool-call ids name, by depth; `continued` is the call that it continues in
    messages.
    """

    conversation: Conversation
    keys: list[bytes]
    anchored: dict[int, LiveCall] = field(default_factory=dict)
    echo_edited: bool = False
    continued: LiveCall | None = None

    def seen(self) -> int:
        """How many messages behind the head the continued call has seen, its answer included."""
        return 0 if self.continued is None else self.continued.depth


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where a request goes: the call it continues (or None), the ids it adds, the whole prompt, the fork if it is one.

    `nearest` is the call whose conversation the fork was compared with.
    """

    parent: LiveCall | None
    added_ids: list[int]
    prompt_ids: list[int]
    new_messages: Sequence[dict[str, Any]]
    fork: Fork | None
    trail: Trail
    nearest: LiveCall | None = None

    @property
    def echo_edited(self) -> bool:
        """Whether the history holds an answer of ours that the client altered."""
        return self.trail.echo_edited

    def attributes(self) -> dict[str, Any]:
        """What the span of a call says of its place, beside its parent."""
        edited = {semconv.ECHO_EDITED: True} if self.echo_edited else {}
        return edited if self.fork is None else edited | self.fork.attributes()

    def with_prompt(self, prompt_ids: list[int], messages: Sequence[dict[str, Any]]) -> "Place":
        """This place, now that the ids of its prompt are known; a new root where they do not continue its parent's."""
        if self.parent is None:
            fork = None if self.fork is None else _with_token(self.fork, self.nearest, prompt_ids)
            return replace(self, added_ids=prompt_ids, prompt_ids=prompt_ids, fork=fork)
        prompt, response = self.parent.context()
        context = prompt + response
        if prompt_ids[: len(context)] != context:
            fork = _refused(self.parent, prompt_ids)
            return Place(None, prompt_ids, prompt_ids, messages, fork, self.trail, self.parent)
        return replace(self, added_ids=prompt_ids[len(context) :], prompt_ids=prompt_ids)


class Exchange:
    """One request in flight or answered: its task, the calls sampled for it, and whether a client received it."""

    def __init__(self, body_key: bytes) -> None:
        self.body_key = body_key
        self.task: asyncio.Task[bytes] | None = None
        self.calls: list[tuple[Call, dict[str, Any]]] = []
        self.commits: list[tuple[Trail, LiveCall]] = []
        self.client_gone = False
        self.recorded = False


class Attempt:
    """The live side of one attempt: what may be continued, what is in flight, and the numbers of its calls."""

    def __init__(self, address: Address, info: AttemptInfo, checked_at: float) -> None:
        self.address = address
        self.info = info
        self.checked_at = checked_at
        self.sealed = not info.open
        self.exchanges: dict[bytes, list[Exchange]] = {}
        self.tokens_received = 0
        self._next_number = 0
        # What is answered, each list in order of answers: by head and key; the last through a beginning, by its key,
        # with its head and without (None); the last that said a message; and, by the key before it and its tool-call
        # ids, the answer with those ids.
        self._answered: dict[tuple[echo.Head, bytes], list[LiveCall]] = {}
        self._through: dict[tuple[echo.Head | None, bytes], LiveCall] = {}
        self._said: dict[tuple[bytes, Echo], LiveCall] = {}
        self._anchors: dict[tuple[echo.Head, bytes, tuple[str, ...]], LiveCall] = {}

    def take_numbers(self, n: int) -> int:
        """Reserve `n` numbers in order of arrival; the first of them."""
        first = self._next_number
        self._next_number += n
        return first

    def find_place(
        self, model: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, renderer: Renderer
    ) -> Place:
        """The place of a request that has just arrived."""
        turn = self.find_turn(model, messages, tools)
        if turn.parent is None:
            return turn.with_prompt(renderer.render(messages, tools), messages)
        prompt, response = turn.parent.context()
        added = renderer.extend(prompt, response, turn.new_messages, tools) if turn.new_messages else None
        if added is None:
            ids = renderer.render(messages, tools)
            fork, nearest = self._altered(turn) or (_refused(turn.parent, ids), turn.parent)
            return Place(None, ids, ids, messages, _with_token(fork, nearest, ids), turn.trail, nearest)
        return replace(turn, added_ids=added, prompt_ids=prompt + response + added)

    def find_turn(self, model: str, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Place:
        """The place by messages alone of a request that nobody here renders: without prompt ids."""
        trail = self._follow(model, echo.read(messages, tools))
        if trail.continued is not None:
            seen = len(trail.conversation.head.systems) + trail.seen()
            return Place(trail.continued, [], [], messages[seen:], None, trail)
        fork, nearest = self._fork(trail)
        return Place(None, [], [], messages, fork, trail, nearest)

    def commit(self, exchange: Exchange) -> None:
        """Make the answers of a delivered exchange continuable; of equal conversations the last answered wins."""
        for trail, live in exchange.commits:
            head, answer = live.conversation.head, live.conversation.body[-1]
            self._answered.setdefault((head, live.key), []).append(live)
            for key in (*trail.keys, live.key):
                self._through[head, key] = self._through[None, key] = live
            self._said[trail.keys[0], _bare(answer)] = live
            # An id that carries the call's own is ours; services number theirs anew for every answer.
            if answer.ids and all(live.call.call_id in name for name in answer.ids):
                self._anchors[head, trail.keys[-1], answer.ids] = live
        exchange.commits.clear()

    def answered(
        self, place: Place, call: Call, message: dict[str, Any], *, reasoned: bool = False
    ) -> tuple[Trail, LiveCall]:
        """What `commit` takes, so that a later request finds the answer `message` and continues `call`."""
        trail, answer = place.trail, echo.hear(message)
        added = Conversation(trail.conversation.head, [*trail.conversation.body[trail.seen() :], answer])
        key = echo.chain(trail.keys[-1], answer)
        depth = len(trail.conversation.body) + 1
        return trail, LiveCall(call, place.parent, trail.continued, added, depth, key, reasoned)

    def joinable(self, body_key: bytes, *, marked_as_retry: bool) -> Exchange | None:
        """The earlier exchange that an equal request joins instead of sampling anew.

        Equal bodies alone are separate samples; it takes a retry mark, or an earlier client that left before its whole
        answer was written. The oldest whose client is gone comes first, then the oldest undelivered.
        """
        earlier = self.exchanges.get(body_key, [])
        for exchange in earlier:
            if exchange.client_gone:
                return exchange
        if not marked_as_retry or not earlier:
            return None
        return next((exchange for exchange in earlier if not exchange.recorded), earlier[-1])

    def _follow(self, model: str, conversation: Conversation) -> Trail:
        """The trail of a request, to the deepest call that it continues."""
        head, body = conversation
        trail = Trail(conversation, [echo.seed(model)])
        for depth, message in enumerate(body, start=1):
            before = trail.keys[-1]
            anchor = self._anchors.get((head, before, message.ids)) if message.ids else None
            trail.keys.append(echo.chain(before, message) if anchor is None else anchor.key)
            if anchor is not None:
                trail.anchored[depth] = anchor
                trail.echo_edited |= trail.keys[-1] != echo.chain(before, message)
        for key in reversed(trail.keys[1:]):
            if (equal := self._answered.get((head, key))) is not None:
                trail.continued = _named(equal, trail.anchored)
                break
        return trail

    def _altered(self, turn: Place) -> tuple[Fork, LiveCall] | None:
        """The fork of a request that cannot go on behind an early answer, since it holds later ones as altered."""
        if all(message.get("role") != "assistant" for message in turn.new_messages):
            return None
        fork, nearest = self._fork(turn.trail)
        return None if fork is None or nearest is None else (fork, nearest)

    def _fork(self, trail: Trail) -> tuple[Fork | None, LiveCall | None]:
        """Why a request continues nothing, and the call that it was compared with; None while nothing is answered.

        Nearest is the conversation with the most messages in common at its beginning; where there are none, the one of
        the latest answer that the request still holds; of equally near ones that with the same head, then the one
        answered last.
        """
        body = trail.conversation.body
        said = [self._said.get((trail.keys[0], _bare(message))) for message in body if message.role == "assistant"]
        heard = [live for live in said if live is not None]
        shared = next((i for i in range(len(body), 0, -1) if (None, trail.keys[i]) in self._through), 0)
        key = trail.keys[shared]
        nearest = self._through.get((trail.conversation.head, key)) or self._through.get((None, key))
        if shared == 0 and heard:
            nearest = heard[-1]
        if nearest is None:
            return None, None
        echoes = bool(heard) or trail.continued is not None  # which may be an answer that the client altered
        return forks.find(trail.conversation, nearest.whole(), shared, echoes_answer=echoes), nearest


def new_call_id() -> str:
    """An id for a call."""
    return uuid.uuid4().hex


def _named(equal: list[LiveCall], anchored: dict[int, LiveCall]) -> LiveCall:
    """Of calls that are equal to the client, the last behind the answers that the request names by their ids."""
    if len(equal) > 1 and anchored:
        for live in reversed(equal):
            if all(live.at_depth(depth) in (named, None) for depth, named in anchored.items() if depth <= live.depth):
                return live
    return equal[-1]


def _refused(parent: LiveCall, ids: list[int]) -> Fork:
    """The fork of a request that continues `parent` in messages, but whose prompt `ids` do not continue its tokens."""
    fork = _with_token(Fork(ForkCause.NOT_APPEND_ONLY), parent, ids)
    stripped = fork.token is not None and parent.reasons_at(fork.token)
    return replace(fork, cause=ForkCause.REASONING_STRIPPED) if stripped else fork


def _with_token(fork: Fork, nearest: LiveCall | None, ids: list[int]) -> Fork:
    if nearest is None or fork.cause == ForkCause.NEW_CONVERSATION or not nearest.exact():
        return fork
    prompt, response = nearest.context()
    return replace(fork, token=forks.first_difference(ids, prompt + response))


def _bare(message: Echo) -> Echo:
    return message._replace(ids=())
