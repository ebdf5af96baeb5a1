"""One attempt's live forest: find the place of a request, continue it at token level, commit the answer.

A request's place depends on its messages alone: the deepest answered call whose conversation, as the client saw it,
is a prefix of the request's. Several that fit are equal for the client; the one answered last is continued, unless
tool-call ids of ours in the history say which it was: that is all that ids do. What the client says holds: an answer
that it altered is another history, under our ids or others. So is one whose reasoning it altered; what it left out of
an answer's reasoning is as it was sampled. No lock is held over a generation, so calls may overlap as they like. What a
chat backend's prompt was in tokens is known after its answer, if ever: its place by messages comes first, and
`with_prompt` corrects it.

What a client sends again is not read again: the messages of a call are kept as they came, and a request that begins
with a call's messages, by equality, is read from there on. That is a shortcut alone: it ends where reading would.
Nothing is read before there is something to compare it with: answers wait as they came for the next request, and what
was asked while nothing was answered is read with its answer.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.media import Placed, referred, url_of
from lightning_rl_adapters.semconv import ForkCause
from lightning_rl_proxy import echo, forks, images
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.echo import Conversation, Echo, Head, Numbering
from lightning_rl_proxy.engines.base import Engine
from lightning_rl_proxy.exchange import Exchange
from lightning_rl_proxy.forks import Fork
from lightning_rl_proxy.history import History
from lightning_rl_proxy.images import Image, Shown
from lightning_rl_proxy.ledger import AttemptInfo
from lightning_rl_proxy.rendering import Renderer
from lightning_rl_proxy.texts import Texts

_OPENING = 4  # tokens; so long may a format's opening of the reasoning be, which ends the prompt of some
_End = tuple[bytes, int, tuple[str, ...], Echo]
_NO_TOOLS = echo.digest_tools(None)
_AT_HAND = 4  # exchanges; those answered or continued last keep their whole prompts
# What identifies the reasoning of a message (see `echo.thought`); None where nobody knows.
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
    messages that it adds, by depth; of a message without one any reasoning is the same.
    """

    call: Call
    parent: "LiveCall | None"
    before: "LiveCall | None"
    conversation: Conversation
    depth: int
    keys: list[bytes]
    numbering: tuple[int, int]
    forms: list[dict[str, Any] | None]
    reasoned: bool
    prompt: Prompt | None
    served_by: Engine | None
    thoughts: dict[int, Thought] = {}

    @property
    def key(self) -> bytes:
        """What stands for the conversation to its answer."""
        return self.keys[-1]

    @property
    def length(self) -> int:
        """The number of messages to its answer, the head's included."""
        return len(self.conversation.head.systems) + self.depth

    @property
    def answer(self) -> Echo:
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
        said = node.call.response_ids
        for call in reversed(later):
            ids += said
            ids += call.prompt_ids
            said = call.response_ids
        return ids

    def placed(self) -> list[Placed]:
        """The images of the call's whole prompt, where they stand in it."""
        found: list[Placed] = []
        length = 0
        for call in self._chain():
            found += [image.moved(length) for image in call.media]
            length += len(call.prompt_ids) + len(call.response_ids)
        return found

    def context(self) -> list[int]:
        """The call's whole prompt and its response."""
        return self.prompt_ids() + self.call.response_ids

    def lineage(self) -> "Iterator[LiveCall]":
        """The calls of this conversation, this one first."""
        node: LiveCall | None = self
        while node is not None:
            yield node
            node = node.before

    def whole(self) -> Conversation:
        """The call's conversation from its first message to its answer."""
        parts = [node.conversation.body for node in self.lineage()]
        return Conversation(self.conversation.head, [message for part in reversed(parts) for message in part])

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
        if message.get("role") != "assistant" or not (said := echo.thought(message)):
            return True
        node = next((node for node in self.lineage() if depth in node.thoughts), None)
        return node is None or node.thoughts[depth]() in (said, None)

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
        if len(there) < len(forms):
            return False
        echoes = [Echo("system", text, b"", ()) for text in self.conversation.head.systems] + self.whole().body
        for index, (message, form) in enumerate(zip(there, forms, strict=True)):
            if message != form:
                heard, known = echo.hear(message), echoes[index]
                calls = known.calls if known.role == "tool" else heard.calls  # `ids` tell which it answers
                if heard._replace(calls=calls) != known:
                    return False
                if not self.thinks(index + 1 - len(self.conversation.head.systems), message):
                    return False
                self.forms[index] = echo.comparable(message)
        return True

    def _chain(self) -> list[Call]:
        chain: list[Call] = []
        node: LiveCall | None = self
        while node is not None:
            chain.append(node.call)
            node = node.parent
        return chain[::-1]


class Recorded(NamedTuple):
    """An answer that another gateway gave, or this one before a restart; and the attributes of its span."""

    live: LiveCall
    said: dict[str, Any]


class Asked(NamedTuple):
    """What identifies a request: the key of its model's conversations, its messages, and the digest of its tools."""

    seed: bytes
    messages: Sequence[dict[str, Any]]
    tools: bytes


class Trail(msgspec.Struct, eq=False):
    """A request's way through what the attempt knows.

    `start` is a call whose conversation the messages begin with; `echoes` are those behind it, and `keys[i]` stands for
    the conversation with the first i of them. `identified` are the answers among them that the tool-call ids name,
    by depth; `continued` is the call that it continues in messages; `repeats`: all of it was asked before.
    """

    asked: Asked
    head: Head
    start: LiveCall | None
    echoes: list[Echo]
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

    def conversation(self) -> Conversation:
        """All of the request."""
        known = [] if self.start is None else self.start.whole().body
        return Conversation(self.head, known + self.echoes)

    def key_at(self, depth: int) -> bytes | None:
        """What stands for the first `depth` messages behind the head."""
        skipped = self.skipped()
        return self.keys[depth - skipped] if self.start is None or depth >= skipped else self.start.key_at(depth)

    def altered(self, live: LiveCall, to: int | None = None) -> int | None:
        """The depth of the first message, up to `to`, whose reasoning is other than it is in a call's conversation;
        None where there is none. Behind an equal beginning, only messages are read that `start` does not hold."""
        known = {id(node) for node in self.start.lineage()} if self.start is not None and live is not self.start else ()
        messages, systems, first = self.asked.messages, len(self.head.systems), None
        for node in live.lineage():
            if node is self.start or id(node) in known:
                break
            for depth, thought in node.thoughts.items():
                if (to is not None and depth > to) or systems + depth > len(messages):
                    continue
                said = echo.thought(messages[systems + depth - 1])
                if said and thought() not in (said, None):
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
    asked: Asked
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
        if self.parent is None and self.asked.tools != _NO_TOOLS:
            more[semconv.TOOLS] = self.asked.tools.hex()
        return more if self.fork is None else more | self.fork.attributes()

    def with_prompt(self, prompt_ids: list[int], messages: Sequence[dict[str, Any]]) -> "Place":
        """This place, now that the ids of its prompt are known; a new root where they do not continue its parent's."""
        if self.parent is None:
            fork = None if self.fork is None else _with_token(self.fork, self.nearest, prompt_ids)
            return replace(self, added_ids=prompt_ids, prompt_ids=prompt_ids, fork=fork)
        context = self.parent.context()
        if prompt_ids[: len(context)] != context:
            fork = None if self.repeats else _refused(self.parent, prompt_ids)
            return Place(None, prompt_ids, prompt_ids, messages, fork, self.asked, self.trail, self.parent)
        return replace(self, added_ids=prompt_ids[len(context) :], prompt_ids=prompt_ids)


class Answered(NamedTuple):
    """An answer as it came: `message` to the request at `place`.

    `text` is the model and the prompt that its client wrote, where it wrote no messages; `reasoned` and `served_by` as
    in LiveCall. `thought` is the answer's; None where reasoning, the client's too, tells no answers apart: it is a
    service's.
    """

    place: Place
    call: Call
    message: dict[str, Any]
    reasoned: bool
    served_by: Engine | None = None
    text: tuple[str, str | list[int]] | None = None
    thought: Thought | None = None


class Attempt:
    """The live side of one attempt: what may be continued, what is in flight, and the numbers of its calls."""

    def __init__(self, address: Address, info: AttemptInfo, checked_at: float) -> None:
        self.address = address
        self.name = (address.rollout_id, address.attempt_id)
        self.info = info
        self.checked_at = checked_at
        self.sealed = not info.open
        self.exchanges: dict[bytes, list[Exchange]] = {}
        self.unrecorded: set[Exchange] = set()  # of them, those whose calls are not recorded yet
        self.tokens_received = 0
        self.called_at: float | None = None  # when a call last began or ended, by the monotonic clock
        self.in_flight = 0  # answers that are being worked on
        # How often a body was answered with 5xx: so many of its retries are sampled anew, equal calls or not.
        self.failed = Counter[bytes]()
        self.recorded: dict[bytes, list[Recorded]] = {}  # by their requests, of what was answered before it came here
        self.texts = Texts()
        self.placing = asyncio.Lock()  # held while another thread looks for a place
        self.unplaced = 0  # requests that look for one there, or wait until they may look
        # The images that requests have shown, by their SHA-256, and which of them each URL or reference holds.
        self.images: dict[str, Image] = {}
        self.image_urls: dict[str, str] = {}
        self.images_recorded: set[str] = set()
        self.ways: set[str] = set()  # how its prompts were to be rendered, other than all are
        self.history = History()
        self.responses: dict[str, list[dict[str, Any]]] = {}  # by the ids that a client may continue them with
        self._next_number = 0
        self._unread: list[list[Answered]] = []  # the answers of each exchange since the last request
        # What is read, in order of answers: all calls; those behind a head and key; the last at an end; the last that
        # said a message; and, by the key behind it and its tool-call ids, the answer with those ids. `_asked` are whole
        # prompts, `_begun` all beginnings of conversations, with their head and without (None).
        self._live: list[LiveCall] = []
        self._answered: dict[tuple[Head, bytes], list[LiveCall]] = {}
        self._ends: dict[_End, LiveCall] = {}
        self._said: dict[tuple[bytes, Echo], LiveCall] = {}
        self._issued: dict[tuple[Head, bytes, tuple[str, ...]], LiveCall] = {}
        self._asked: set[tuple[Head, bytes]] = set()
        self._begun: set[tuple[Head | None, bytes]] = set()
        self._at_hand: deque[list[LiveCall]] = deque()

    def number_after(self, number: int) -> None:
        """Calls up to `number` have arrived elsewhere: the next ones come after."""
        self._next_number = max(self._next_number, number + 1)

    def take_numbers(self, n: int) -> int:
        """Reserve `n` numbers in order of arrival; the first of them."""
        first = self._next_number
        self._next_number += n
        return first

    def find_place(
        self,
        model: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        renderer: Renderer,
        told: Mapping[str, Any] | None = None,
    ) -> Place:
        """The place of a request that has just arrived; `told` is what its renderer was told besides, for it alone."""
        if renderer.vision is not None:
            messages = self._with_images_named(messages)
        turn = self.find_turn(model, messages, tools, told)
        if turn.parent is None:
            ids, media = self._shown(renderer, renderer.render(messages, tools), messages)
            return replace(turn.with_prompt(ids, messages), media=media)
        before, response = self._prompt_of(turn.parent), turn.parent.call.response_ids
        added = renderer.extend(before.ids, response, turn.new_messages, tools) if turn.new_messages else None
        if added is None:
            ids, media = self._shown(renderer, renderer.render(messages, tools), messages)
            return replace(self._anew(turn, ids, messages), media=media)
        added, more = self._shown(renderer, added, turn.new_messages, behind=len(before.ids) + len(response))
        prompt = before.then(response + added)
        placed = turn.parent.placed() if self.images else []  # which looks at every call before
        media = [Shown(one.start, one.length, self.images[one.sha256]) for one in placed]
        return replace(turn, added_ids=added, prompt_ids=prompt.ids, prompt=prompt, media=[*media, *more])

    def _shown(
        self, renderer: Renderer, ids: list[int], messages: Sequence[dict[str, Any]], behind: int = 0
    ) -> tuple[list[int], list[Shown]]:
        """The rendered ids of `messages` with their images in them, which the attempt remembers."""
        if renderer.vision is None:
            return ids, []
        return renderer.vision.expand(ids, [self._image(where, url) for where, url in images.urls(messages)], behind)

    def _with_images_named(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the digests of their images for URLs: the model sees the same, however it was sent."""
        for where, url in images.urls(messages):
            self._image(where, url)
        return referred(messages, self.image_urls)

    def _image(self, where: str, url: str) -> Image:
        if url not in self.image_urls:
            image = images.read(where, url)
            self.image_urls[url] = image.sha256
            self.show(image)
        return self.images[self.image_urls[url]]

    def show(self, image: Image) -> None:
        """Remember an image, so that messages may name it by its digest."""
        self.images.setdefault(image.sha256, image)
        self.image_urls[url_of(image.sha256)] = image.sha256

    def find_turn(
        self,
        model: str,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        told: Mapping[str, Any] | None = None,
    ) -> Place:
        """The place by messages alone of a request that nobody here renders: without prompt ids."""
        asked = Asked(echo.seed(model), messages, echo.digest_tools(tools, told))
        trail = self.follow(asked)
        if trail is None:
            return Place(None, [], [], messages, None, asked, None)
        if trail.continued is not None:
            return Place(trail.continued, [], [], messages[trail.continued.length :], None, asked, trail)
        fork, nearest = self._fork(trail)
        return Place(None, [], [], messages, fork, asked, trail, nearest)

    def commit(self, exchange: Exchange) -> None:
        """Make the answers of a delivered exchange continuable; of equal conversations the last answered wins."""
        if exchange.commits:
            self._unread.append(exchange.commits)
            exchange.commits = []
        self.responses |= exchange.responses

    def remember(self, answers: Sequence[Answered]) -> list[LiveCall]:
        """Make the answers of one exchange continuable now, and give them."""
        first, *_ = answers
        trail = first.place.trail or _opened(first.place.asked)
        lives = [self._live_call(trail, answered) for answered in answers]
        for answered, live in zip(answers, lives, strict=True):
            if answered.text is None:
                self._add(trail, live)
            else:
                self.texts.add(*answered.text, live)
        if first.text is None:
            self._keep_at_hand(lives)
        return lives

    def _live_call(self, trail: Trail, answered: Answered) -> LiveCall:
        """What a later request continues, if it finds the answer."""
        place, message = answered.place, answered.message
        seen, skipped = trail.seen(), trail.skipped()
        numbering = Numbering(trail.numbering.called, trail.numbering.answered)
        answer = numbering.numbered(echo.hear(message))
        added = trail.asked.messages[trail.continued.length if trail.continued else 0 :]
        thoughts: dict[int, Thought] = {}
        depth = skipped + len(trail.echoes) + 1
        if answered.thought is not None:
            for at, one in enumerate(added, start=depth - len(added)):
                if one.get("role") == "assistant":
                    thoughts[at] = partial(_same, echo.thought(one))
            thoughts[depth] = answered.thought
        return LiveCall(
            call=answered.call,
            parent=place.parent,
            before=trail.continued,
            conversation=Conversation(trail.head, [*trail.echoes[seen - skipped :], answer]),
            depth=depth,
            keys=[*trail.keys[seen - skipped :], echo.chain(trail.keys[-1], answer)],
            numbering=(numbering.called, numbering.answered),
            forms=_lengthened(trail.continued, [echo.comparable(one) for one in (*added, message)]),
            reasoned=answered.reasoned,
            prompt=place.prompt or (Prompt(place.prompt_ids) if place.prompt_ids else None),
            served_by=answered.served_by,
            thoughts=thoughts,
        )

    def _add(self, trail: Trail, live: LiveCall) -> None:
        """Have later requests find the call."""
        self._live.append(live)
        self._answered.setdefault((trail.head, live.key), []).append(live)
        self._asked.add((trail.head, trail.keys[-1]))
        for key in live.keys:
            self._begun.add((trail.head, key))
            self._begun.add((None, key))
        self._said[trail.asked.seed, _bare(live.answer)] = live
        if live.issued_ids():
            self._issued[trail.head, live.key, live.answer.ids] = live
        self._ends[_end(trail.asked, live.answer)] = live

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

    def follow(self, asked: Asked) -> Trail | None:
        """The trail of a request, to the deepest call that it continues; None while nothing is answered."""
        while self._unread:
            self.remember(self._unread.pop(0))
        if not self._live:
            return None
        trail = self._read(asked)
        head = trail.head
        for depth, message in enumerate(trail.echoes, start=trail.skipped() + 1):
            trail.keys.append(echo.chain(trail.keys[-1], message))
            if message.ids and (issued := self._issued.get((head, trail.keys[-1], message.ids))) is not None:
                trail.identified[depth] = issued
        for key in reversed(trail.keys):
            if (equal := self._answered.get((head, key))) is not None:
                trail.continued = _chosen(equal, trail)
                if trail.continued is not None:
                    break
        trail.repeats = (head, trail.keys[-1]) in self._asked
        return trail

    def _read(self, asked: Asked) -> Trail:
        """A request's trail before it is followed: read from the start, or from a call whose messages it repeats."""
        start = self._start(asked)
        if start is not None and start.conversation.head.tools == asked.tools:
            numbering = Numbering(*start.numbering, start.number_of)
            echoes = echo.read(asked.messages[start.length :], numbering)
            return Trail(asked, start.conversation.head, start, echoes, [start.key], numbering)
        return _read_whole(asked)

    def _start(self, asked: Asked) -> LiveCall | None:
        """The call that ends with the last answer in the messages, if they repeat all of it."""
        messages = asked.messages
        roles = (at for at in range(len(messages) - 1, -1, -1) if messages[at].get("role") == "assistant")
        last = next(roles, None)
        if last is None:
            return None
        live = self._ends.get(_end(asked._replace(messages=messages[:last]), echo.hear(messages[last])))
        return live if live is not None and live.begins(messages) else None

    def _anew(self, turn: Place, ids: list[int], messages: list[dict[str, Any]]) -> Place:
        """The place of a request whose prompt `ids` had to be rendered, although it continues a call in messages."""
        assert turn.parent is not None
        assert turn.trail is not None
        fork: Fork | None
        nearest: LiveCall | None
        if any(message.get("role") == "assistant" for message in turn.new_messages):
            fork, nearest = self._fork(turn.trail)  # an early answer it is, since the later ones are altered
        else:
            fork, nearest = None if turn.trail.repeats else _refused(turn.parent, ids), turn.parent
        fork = None if fork is None else _with_token(fork, nearest, ids)
        return Place(None, ids, ids, messages, fork, turn.asked, turn.trail, nearest)

    def _fork(self, trail: Trail) -> tuple[Fork | None, LiveCall | None]:
        """Why a request continues nothing, and the call that it was compared with; None while nothing is answered.

        Nearest is the conversation with the most messages in common at its beginning; where there are none, the one of
        the latest answer that the request still holds; of equally near ones that with the same head, then the one
        answered last.
        """
        asked, seed = trail.conversation(), trail.asked.seed
        said = [self._said.get((seed, _bare(message))) for message in asked.body if message.role == "assistant"]
        heard = [live for live in said if live is not None]
        shared = len(asked.body)
        while shared and (None, trail.key_at(shared)) not in self._begun:
            shared -= 1
        nearest = heard[-1] if shared == 0 and heard else self._nearest(trail, shared)
        if nearest is None:
            return None, None
        if nearest.conversation.head == trail.head and (altered := trail.altered(nearest, shared)) is not None:
            at = len(trail.head.systems) + altered - 1
            return Fork(ForkCause.EDITED_TEXT, at, "assistant"), nearest
        echoes = bool(heard) or trail.continued is not None
        return forks.find(asked, nearest.whole(), shared, echoes_answer=echoes), nearest

    def _nearest(self, trail: Trail, shared: int) -> LiveCall | None:
        """The last call that begins with the trail's first messages: with the same head and reasoning, else with the
        same head, else with any."""
        key = trail.key_at(shared)
        nearest = None
        for live in reversed(self._live):
            if live.key_at(shared) == key:
                if live.conversation.head == trail.head:
                    if trail.altered(live, shared) is None:
                        return live
                    nearest = live if nearest is None or nearest.conversation.head != trail.head else nearest
                nearest = nearest or live
        return nearest

    def _prompt_of(self, live: LiveCall) -> Prompt:
        """A call's whole prompt, which stays at hand: what went on once may do so again."""
        kept = next((exchange for exchange in self._at_hand if live in exchange), None)
        if kept is not None:
            self._at_hand.remove(kept)
        prompt = live.prompt = live.prompt or Prompt(live.prompt_ids(), own=True)
        self._keep_at_hand(kept or [live])
        return prompt

    def _keep_at_hand(self, answered: list[LiveCall]) -> None:
        """Keep the whole prompts of the latest exchanges, since they are likely to go on; of others they are joined."""
        self._at_hand.append(answered)
        if len(self._at_hand) > _AT_HAND:
            for live in self._at_hand.popleft():
                live.prompt = None


def _opened(asked: Asked) -> Trail:
    """The trail of a request before which nothing was answered."""
    trail = _read_whole(asked)
    for message in trail.echoes:
        trail.keys.append(echo.chain(trail.keys[-1], message))
    return trail


def _read_whole(asked: Asked) -> Trail:
    """A request's trail before it is followed, read from the start."""
    numbering = Numbering()
    head, echoes = echo.split(echo.read(asked.messages, numbering), asked.tools)
    return Trail(asked, head, None, echoes, [asked.seed], numbering)


def _lengthened(before: LiveCall | None, forms: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """The forms of a conversation that goes on with these; a second branch begins a list of its own."""
    if before is None:
        return forms
    if len(before.forms) > before.length:
        return before.forms[: before.length] + forms
    before.forms += forms
    return before.forms


def _end(asked: Asked, answer: Echo) -> _End:
    """What a call that answers messages is looked up by: their number, the texts that differ most, the answer."""
    messages = asked.messages
    texts = [message.get("content") for message in (*messages[:2], *messages[-1:])]
    return asked.seed, len(messages), tuple(text for text in texts if isinstance(text, str)), answer


def _chosen(equal: list[LiveCall], trail: Trail) -> LiveCall | None:
    """Of calls whose messages are equal the last with the request's reasoning, behind the answers that the request
    names by their ids where there is such a one."""
    agreeing = (live for live in reversed(equal) if trail.altered(live) is None)
    last = next(agreeing, None)
    identified = trail.named() if last is not None and len(equal) > 1 else {}
    for live in (last, *agreeing) if last is not None and identified else ():
        if all(live.at_depth(depth) in (named, None) for depth, named in identified.items() if depth <= live.depth):
            return live
    return last


def _same(thought: bytes) -> bytes:
    return thought


def _refused(parent: LiveCall, ids: list[int]) -> Fork:
    """The fork of a request that continues `parent` in messages, but whose prompt `ids` do not continue its tokens."""
    fork = _with_token(Fork(ForkCause.NOT_APPEND_ONLY), parent, ids)
    stripped = fork.token is not None and parent.reasons_at(fork.token)
    return replace(fork, cause=ForkCause.REASONING_STRIPPED) if stripped else fork


def _with_token(fork: Fork, nearest: LiveCall | None, ids: list[int]) -> Fork:
    if nearest is None or fork.cause == ForkCause.NEW_CONVERSATION or not nearest.exact():
        return fork
    return replace(fork, token=forks.first_difference(ids, nearest.context()))


def _bare(message: Echo) -> Echo:
    return message._replace(ids=()) if message.ids else message
