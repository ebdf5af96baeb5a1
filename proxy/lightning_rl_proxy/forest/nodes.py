"""What an attempt's live forest is made of: its answered calls, a request's way to them, and the place that it gets.

Data and what follows from it alone; who adds calls and looks for places is `live_forest`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.media import Placed
from lightning_rl_adapters.semconv import ForkCause
from lightning_rl_proxy.engines.base import Engine
from lightning_rl_proxy.forest import fork_causes, message_fingerprint
from lightning_rl_proxy.forest.fork_causes import Fork
from lightning_rl_proxy.forest.message_fingerprint import ConversationFingerprint, Head, MessageFingerprint, Numbering
from lightning_rl_proxy.rendering.images import Shown

_OPENING = 4  # tokens; so long may a format's opening of the reasoning be, which ends the prompt of some
_NO_TOOLS = message_fingerprint.digest_tools(None)
# What identifies the reasoning of a message (see `message_fingerprint.thought`); None where nobody knows.
Thought = Callable[[], bytes | None]
_LONG = 1024  # tokens; the JSON of a shorter prompt is made in less time than it takes to keep it


class Prompt:
    """A whole prompt while it is at hand. One that goes on from it takes over its list of ids and begins with its JSON.

    So a list that `ids` gave may grow once the prompt's answer is committed; who needs it for longer copies it.
    """

    __slots__ = ("_encoded", "_ids", "_length", "_own")

    def __init__(self, ids: list[int], *, own: bool = False, encoded: bytes | None = None) -> None:
        self._ids, self._length, self._own = ids, len(ids), own
        self._encoded = encoded

    @property
    def ids(self) -> list[int]:
        """Its token ids."""
        if len(self._ids) != self._length:
            self._ids, self._own = self._ids[: self._length], True
        return self._ids

    @property
    def encoded(self) -> bytes | None:
        """The ids as a JSON list, where it was made already."""
        return self._encoded

    def then(self, more: list[int]) -> "Prompt":
        """The prompt with these ids behind it; a long one with its JSON."""
        encoded = None
        if len(self.ids) > _LONG and more:
            self._encoded = self._encoded or msgspec.json.encode(self.ids)
            encoded = b"".join((memoryview(self._encoded)[:-1], b",", memoryview(msgspec.json.encode(more))[1:]))
        whole = self.ids if self._own else self.ids.copy()
        whole += more
        return Prompt(whole, own=True, encoded=encoded)


class LiveCall(msgspec.Struct, eq=False):
    """An answered call that later calls may continue.

    `parent` is the call that it continues in tokens, `before` the one that it continues in messages: a call that had
    to be rendered anew has only the latter. `conversation` holds the messages that it adds to `before`, its answer the
    last, and `keys` what stands for the conversation before each of them and after the last; `depth` is the number of
    messages behind the head with all before, `numbering` the counts of their tool calls. `forms` are all messages to
    the answer as the client last wrote them, None for one that equality cannot tell; the calls of a line share the
    list, so that it may go on behind the answer. `reasoned`: whether it reasoned before it answered. `prompt` is its
    whole prompt while that is at hand, `served_by` the engine that sampled it. `thoughts` are those of the assistant's
    messages that it adds, by depth; of a message without one any reasoning is the same. `cut` is its text where that
    ends without the end of the turn and calls nothing: more may stand behind it.
    """

    call: Call
    parent: "LiveCall | None"
    before: "LiveCall | None"
    conversation: ConversationFingerprint
    depth: int
    keys: list[bytes]
    numbering: tuple[int, int]
    forms: list[dict[str, Any] | None]
    reasoned: bool
    prompt: Prompt | None
    served_by: Engine | None
    thoughts: dict[int, Thought] = {}
    cut: str | None = None

    @property
    def key(self) -> bytes:
        """What stands for the conversation to its answer."""
        return self.keys[-1]

    @property
    def length(self) -> int:
        """The number of messages to its answer, the head's included."""
        return len(self.conversation.head.systems) + self.depth

    @property
    def answer(self) -> MessageFingerprint:
        """Its answer, as a message."""
        return self.conversation.body[-1]

    def issued_ids(self) -> bool:
        """Whether the ids of its tool calls are ours: those carry the call's own; services number theirs anew."""
        return bool(self.answer.ids) and all(self.call.call_id in name for name in self.answer.ids)

    def prompt_ids(self) -> list[int]:
        """The call's whole prompt, in a list of the caller's own."""
        later: list[Call] = []
        node = self
        while node.prompt is None and node.parent is not None:
            later.append(node.call)
            node = node.parent
        ids = node.call.prompt_ids.copy() if node.prompt is None else node.prompt.ids.copy()
        response_ids = node.call.response_ids
        for call in reversed(later):
            ids += response_ids
            ids += call.prompt_ids
            response_ids = call.response_ids
        return ids

    def placed(self) -> list[Placed]:
        """The images of the call's whole prompt, where they stand in it."""
        images: list[Placed] = []
        length = 0
        for call in self._chain():
            images += [image.moved(length) for image in call.media]
            length += len(call.prompt_ids) + len(call.response_ids)
        return images

    def context(self) -> list[int]:
        """The call's whole prompt and its response."""
        return self.prompt_ids() + self.call.response_ids

    def lineage(self) -> "Iterator[LiveCall]":
        """The calls of this conversation, this one first."""
        node: LiveCall | None = self
        while node is not None:
            yield node
            node = node.before

    def whole(self) -> ConversationFingerprint:
        """The call's conversation from its first message to its answer."""
        parts = [node.conversation.body for node in self.lineage()]
        return ConversationFingerprint(
            self.conversation.head, [message for part in reversed(parts) for message in part]
        )

    def at_depth(self, depth: int) -> "LiveCall | None":
        """The call of this conversation whose answer is its message number `depth`, from 1."""
        return next((node for node in self.lineage() if node.depth == depth), None)

    def key_at(self, depth: int) -> bytes | None:
        """What stands for the first `depth` messages of this conversation, if it has so many."""
        for node in self.lineage():
            first = node.depth + 1 - len(node.keys)
            if depth >= first:
                return node.keys[depth - first] if depth <= node.depth else None
        return None

    def thinks(self, depth: int, message: dict[str, Any]) -> bool:
        """Whether a message says no other reasoning than message number `depth` of this conversation."""
        if message.get("role") != "assistant" or not (digest := message_fingerprint.thought(message)):
            return True
        node = next((node for node in self.lineage() if depth in node.thoughts), None)
        return node is None or node.thoughts[depth]() in (digest, None)

    def number_of(self, call_id: str) -> int | None:
        """The number, in the conversation, of the latest tool call with that id."""
        for node in self.lineage():
            end = node.numbering[0]
            for message in reversed(node.conversation.body):
                if message.role == "tool":
                    continue
                end -= len(message.ids)
                for index in range(len(message.ids) - 1, -1, -1):
                    if message.ids[index] == call_id:
                        return end + index
        return None

    def exact(self) -> bool:
        """Whether the ids of the whole context are known."""
        return all(call.exact for call in self._chain())

    def reasons_at(self, token: int) -> bool:
        """Whether that token of prompt and response is one of an answer that was reasoned."""
        end, node = len(self.context()), self
        while True:
            start = end - len(node.call.response_ids)
            if start - _OPENING <= token < end:
                return node.reasoned
            if token >= start or node.parent is None:
                return False
            end = start - len(node.call.prompt_ids)
            node = node.parent

    def begins(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Whether the messages begin with this conversation; False where only reading them all would tell.

        What differs is read alone. Behind an equal beginning that reads the same as it did, so that the order in which
        the messages are compared does not matter.
        """
        there, forms = messages[: self.length], self.forms[: self.length]
        if there == forms:
            self.forms[: self.length] = there  # whose texts need no look when they come again
            return True
        fingerprints = [
            MessageFingerprint("system", text, b"", ()) for text in self.conversation.head.systems
        ] + self.whole().body
        for index, (message, form) in enumerate(zip(there, forms, strict=True)):
            if message != form:
                fingerprint, expected = message_fingerprint.fingerprint_of(message), fingerprints[index]
                calls = expected.calls if expected.role == "tool" else fingerprint.calls  # `ids` tell which it answers
                if fingerprint._replace(calls=calls) != expected:
                    return False
                if not self.thinks(index + 1 - len(self.conversation.head.systems), message):
                    return False
                self.forms[index] = message_fingerprint.comparable(message)
        return True

    def _chain(self) -> list[Call]:
        chain: list[Call] = []
        node: LiveCall | None = self
        while node is not None:
            chain.append(node.call)
            node = node.parent
        return chain[::-1]


class RecordedAnswer(NamedTuple):
    """An answer that another gateway gave, or this one before a restart; and the attributes of its span."""

    live: LiveCall
    said: dict[str, Any]


class RequestKey(NamedTuple):
    """What identifies a request: the key of its model's conversations, its messages, and the digest of its tools."""

    seed: bytes
    messages: Sequence[dict[str, Any]]
    tools: bytes


class Trail(msgspec.Struct, eq=False):
    """A request's way through what the attempt knows.

    `start` is a call whose conversation the messages begin with; `fingerprints` are those behind it, and `keys[i]`
    stands for
    the conversation with the first i of them. `identified` are the answers among them that the tool-call ids name,
    by depth; `continued` is the call that it continues in messages; `repeats`: all of it was asked before.
    """

    request: RequestKey
    head: Head
    start: LiveCall | None
    fingerprints: list[MessageFingerprint]
    keys: list[bytes]
    numbering: Numbering
    identified: dict[int, LiveCall] = {}
    continued: LiveCall | None = None
    repeats: bool = False

    def skipped(self) -> int:
        """How many messages behind the head were not read."""
        return 0 if self.start is None else self.start.depth

    def seen(self) -> int:
        """How many messages behind the head the continued call has seen, its answer included."""
        return 0 if self.continued is None else self.continued.depth

    def conversation(self) -> ConversationFingerprint:
        """All of the request."""
        previous = [] if self.start is None else self.start.whole().body
        return ConversationFingerprint(self.head, previous + self.fingerprints)

    def key_at(self, depth: int) -> bytes | None:
        """What stands for the first `depth` messages behind the head."""
        skipped = self.skipped()
        return self.keys[depth - skipped] if self.start is None or depth >= skipped else self.start.key_at(depth)

    def altered(self, live: LiveCall, to: int | None = None) -> int | None:
        """The depth of the first message, up to `to`, whose reasoning is other than it is in a call's conversation;
        None where there is none. Behind an equal beginning, only messages are read that `start` does not hold."""
        lineage_ids = (
            {id(node) for node in self.start.lineage()} if self.start is not None and live is not self.start else ()
        )
        messages, systems, first = self.request.messages, len(self.head.systems), None
        for node in live.lineage():
            if node is self.start or id(node) in lineage_ids:
                break
            for depth, thought in node.thoughts.items():
                if (to is not None and depth > to) or systems + depth > len(messages):
                    continue
                digest = message_fingerprint.thought(messages[systems + depth - 1])
                if digest and thought() not in (digest, None):
                    first = depth if first is None else min(first, depth)
        return first

    def named(self) -> dict[int, LiveCall]:
        """All answers that the tool-call ids name, by depth."""
        before = {} if self.start is None else {n.depth: n for n in self.start.lineage() if n.issued_ids()}
        return before | self.identified


class Place(msgspec.Struct, frozen=True, eq=False):
    """Where a request goes: the call it continues (or None), the ids it adds, the whole prompt, the fork if it is one.

    `trail` is None where nothing was answered yet. `nearest` is the call whose conversation the fork was compared with,
    `prompt` the whole prompt where it goes on from one, `media` the images of the whole prompt.
    """

    parent: LiveCall | None
    added_ids: list[int]
    prompt_ids: list[int]
    new_messages: Sequence[dict[str, Any]]
    fork: Fork | None
    request: RequestKey
    trail: Trail | None
    nearest: LiveCall | None = None
    prompt: Prompt | None = None
    media: Sequence[Shown] = ()

    @property
    def added_media(self) -> list[Placed]:
        """The images among the ids that it adds."""
        before = len(self.prompt_ids) - len(self.added_ids)
        return [one.placed.moved(-before) for one in self.media if one.start >= before]

    @property
    def continued(self) -> LiveCall | None:
        """The call that it goes on with: in tokens, or else in messages."""
        return self.parent or (None if self.trail is None else self.trail.continued)

    @property
    def repeats(self) -> bool:
        """Whether all of it was asked before."""
        return self.trail is not None and self.trail.repeats

    def attributes(self) -> dict[str, Any]:
        """What the span of a call says of its place, beside its parent."""
        more: dict[str, Any] = {}
        if self.parent is None and self.request.tools != _NO_TOOLS:
            more[semconv.TOOLS] = self.request.tools.hex()
        return more if self.fork is None else more | self.fork.attributes()

    def with_prompt(self, prompt_ids: list[int], messages: Sequence[dict[str, Any]]) -> "Place":
        """This place, now that the ids of its prompt are known; a new root where they do not continue its parent's."""
        if self.parent is None:
            fork = None if self.fork is None else with_token(self.fork, self.nearest, prompt_ids)
            return replace(self, added_ids=prompt_ids, prompt_ids=prompt_ids, fork=fork)
        context = self.parent.context()
        if prompt_ids[: len(context)] != context:
            fork = None if self.repeats else refused(self.parent, prompt_ids)
            return Place(None, prompt_ids, prompt_ids, messages, fork, self.request, self.trail, self.parent)
        return replace(self, added_ids=prompt_ids[len(context) :], prompt_ids=prompt_ids)


class Answered(NamedTuple):
    """An answer as it came: `message` to the request at `place`.

    `text` is the model and the prompt that its client wrote, where it wrote no messages; `reasoned` and `served_by` as
    in LiveCall. `thought` is the answer's; None where reasoning, the client's too, tells no answers apart: it is a
    service's. `cut`: whether the answer may go on, since the end of its turn was not sampled.
    """

    place: Place
    call: Call
    message: dict[str, Any]
    reasoned: bool
    served_by: Engine | None = None
    text: tuple[str, str | list[int]] | None = None
    thought: Thought | None = None
    cut: bool = False


def refused(parent: LiveCall, ids: list[int]) -> Fork:
    """The fork of a request that continues `parent` in messages, but whose prompt `ids` do not continue its tokens."""
    fork = with_token(Fork(ForkCause.NOT_APPEND_ONLY), parent, ids)
    stripped = fork.token is not None and parent.reasons_at(fork.token)
    return replace(fork, cause=ForkCause.REASONING_STRIPPED) if stripped else fork


def with_token(fork: Fork, nearest: LiveCall | None, ids: list[int]) -> Fork:
    """The fork with the first token of `ids` that differs from `nearest`, where all of its ids are known."""
    if nearest is None or fork.cause == ForkCause.NEW_CONVERSATION or not nearest.exact():
        return fork
    return replace(fork, token=fork_causes.first_difference(ids, nearest.context()))
