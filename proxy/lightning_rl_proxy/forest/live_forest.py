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

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from lightning_rl_adapters.semconv import ForkCause
from lightning_rl_proxy.forest import fork_causes, message_fingerprint, raw_prompts, restated_answers
from lightning_rl_proxy.forest.fork_causes import Fork
from lightning_rl_proxy.forest.message_fingerprint import ConversationFingerprint, Head, MessageFingerprint, Numbering
from lightning_rl_proxy.forest.nodes import (
    Answered,
    LiveCall,
    Place,
    Prompt,
    RequestKey,
    Thought,
    Trail,
    refused,
    with_token,
)
from lightning_rl_proxy.forest.shown_images import ShownImages
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.images import Shown

_End = tuple[bytes, int, tuple[str, ...], MessageFingerprint]
_AT_HAND = 4  # requests; those answered or continued last keep their whole prompts


class LiveForest:
    """The answered calls of one attempt, as far as later requests may continue them."""

    def __init__(self) -> None:
        self.texts = raw_prompts.Texts()
        self.images = ShownImages()
        self.tools_recorded: set[str] = set()  # by their digests
        self._unread: list[list[Answered]] = []  # the answers of each request since the last one
        # What is read, in order of answers: all calls; those behind a head and key; the last at an end; the last that
        # said a message; and, by the key behind it and its tool-call ids, the answer with those ids. `_requests` are
        # whole prompts, `_begun` all beginnings of conversations, with their head and without (None).
        self._live: list[LiveCall] = []
        self._answered: dict[tuple[Head, bytes], list[LiveCall]] = {}
        self._ends: dict[_End, LiveCall] = {}
        self._by_answer: dict[tuple[bytes, MessageFingerprint], LiveCall] = {}
        self._issued: dict[tuple[Head, bytes, tuple[str, ...]], LiveCall] = {}
        self._requests: set[tuple[Head, bytes]] = set()
        self._begun: set[tuple[Head | None, bytes]] = set()
        self._at_hand: deque[list[LiveCall]] = deque()
        self._cut: dict[str, None] = {}  # the texts of answers that more may stand behind

    def find_place(
        self,
        model: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        renderer: Renderer,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Place:
        """The place of a request that has just arrived; `kwargs` are what its renderer was told for it alone."""
        if renderer.vision is not None:
            messages = self.images.named(messages)
        turn = self.find_turn(model, messages, tools, kwargs)
        added = self._added(renderer, turn, tools)
        if added is None and turn.request.messages is not messages:
            turn = self.find_turn(model, messages, tools, kwargs, as_written=True)
            added = self._added(renderer, turn, tools)
        if turn.parent is None:
            ids, media = self._shown(renderer, renderer.render(messages, tools), messages)
            return replace(turn.with_prompt(ids, messages), media=media)
        before, response = self._prompt_of(turn.parent), turn.parent.call.response_ids
        if added is None:
            ids, media = self._shown(renderer, renderer.render(messages, tools), messages)
            return replace(self._anew(turn, ids, messages), media=media)
        added, more = self._shown(renderer, added, turn.new_messages, behind=len(before.ids) + len(response))
        prompt = before.then(response + added)
        placed = turn.parent.placed() if self.images else []  # which looks at every call before
        media = [Shown(one.start, one.length, self.images[one.sha256]) for one in placed]
        return replace(turn, added_ids=added, prompt_ids=prompt.ids, prompt=prompt, media=[*media, *more])

    def _added(self, renderer: Renderer, turn: Place, tools: list[dict[str, Any]] | None) -> list[int] | None:
        """The ids that a request's new messages add to its parent; None without one, or where they cannot be added."""
        if turn.parent is None:
            return None
        before = self._prompt_of(turn.parent).ids
        messages, response, words = turn.new_messages, turn.parent.call.response_ids, list[int]()
        if messages and messages[0].get(restated_answers.BEHIND):
            text = restated_answers.words_behind(renderer, response, messages[0], turn.parent.cut or "")
            words = renderer.encode_behind(renderer.tokenizer.guarded(text))
            messages = messages[1:]
        added = renderer.extend(before, response + words, messages, tools) if messages else None
        return None if added is None else words + added

    def _shown(
        self, renderer: Renderer, ids: list[int], messages: Sequence[dict[str, Any]], behind: int = 0
    ) -> tuple[list[int], list[Shown]]:
        """The rendered ids of `messages` with their images in them."""
        if renderer.vision is None:
            return ids, []
        return renderer.vision.expand(ids, self.images.of(messages), behind)

    def find_turn(
        self,
        model: str,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        as_written: bool = False,
    ) -> Place:
        """The place by messages alone of a request that nobody here renders: without prompt ids.

        `as_written`: no answer in it is read as another that it restates (see `restated_answers`).
        """
        request = RequestKey(message_fingerprint.seed(model), messages, message_fingerprint.digest_tools(tools, kwargs))
        trail = self.follow(request)
        if trail is None:
            return Place(None, [], [], messages, None, request, None)
        if not as_written and (other := self._restated(trail)) is not None:
            request, trail = other.request, other
            messages = request.messages
        if trail.continued is not None:
            return Place(trail.continued, [], [], messages[trail.continued.length :], None, request, trail)
        fork, nearest = self._fork(trail)
        return Place(None, [], [], messages, fork, request, trail, nearest)

    def _restated(self, trail: Trail) -> Trail | None:
        """The trail of a request with its answers read as what they are, where it continues a call only so."""
        messages = trail.request.messages
        behind = messages[0 if trail.continued is None else trail.continued.length :]
        if not any(message.get("role") == "assistant" for message in behind):
            return None
        if (read := restated_answers.restated(messages, self._cut)) is None:
            return None
        other = self.follow(trail.request._replace(messages=read))
        if other is None or other.continued is None:
            return None
        added = other.request.messages[other.continued.length :]
        first = 1 if added and added[0].get(restated_answers.BEHIND) else 0
        return None if any(message.get("role") == "assistant" for message in added[first:]) else other

    def find_raw_prompt(self, model: str, prompt: str | list[int], reader: raw_prompts.RawPromptReader) -> Place:
        """The place of a prompt that its client wrote itself, as text or as token ids."""
        whole = raw_prompts.message(prompt, reader)
        # Its messages are no conversation of a chat, even where the words are the same.
        turn = self.find_turn(f"{model}\ncompletions", [whole], None)
        return self.texts.place(turn, model, prompt, reader)

    def commit(self, answers: list[Answered]) -> None:
        """Make the delivered answers of one request continuable; of equal conversations the last answered wins."""
        self._unread.append(answers)

    def remember(self, answers: Sequence[Answered]) -> list[LiveCall]:
        """Make the answers of one exchange continuable now, and give them."""
        first, *_ = answers
        trail = first.place.trail or _opened(first.place.request)
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
        answer = numbering.numbered(message_fingerprint.fingerprint_of(message))
        added = trail.request.messages[trail.continued.length if trail.continued else 0 :]
        thoughts: dict[int, Thought] = {}
        depth = skipped + len(trail.fingerprints) + 1
        if answered.thought is not None:
            for at, one in enumerate(added, start=depth - len(added)):
                if one.get("role") == "assistant":
                    thoughts[at] = partial(_same, message_fingerprint.thought(one))
            thoughts[depth] = answered.thought
        return LiveCall(
            call=answered.call,
            parent=place.parent,
            before=trail.continued,
            conversation=ConversationFingerprint(trail.head, [*trail.fingerprints[seen - skipped :], answer]),
            depth=depth,
            keys=[*trail.keys[seen - skipped :], message_fingerprint.chain(trail.keys[-1], answer)],
            numbering=(numbering.called, numbering.answered),
            forms=_lengthened(trail.continued, [message_fingerprint.comparable(one) for one in (*added, message)]),
            reasoned=answered.reasoned,
            prompt=place.prompt or (Prompt(place.prompt_ids) if place.prompt_ids else None),
            served_by=answered.served_by,
            thoughts=thoughts,
            cut=_cut_text(message) if answered.cut else None,
        )

    def _add(self, trail: Trail, live: LiveCall) -> None:
        """Have later requests find the call."""
        self._live.append(live)
        self._answered.setdefault((trail.head, live.key), []).append(live)
        self._requests.add((trail.head, trail.keys[-1]))
        for key in live.keys:
            self._begun.add((trail.head, key))
            self._begun.add((None, key))
        self._by_answer[trail.request.seed, _bare(live.answer)] = live
        if live.issued_ids():
            self._issued[trail.head, live.key, live.answer.ids] = live
        self._ends[_end(trail.request, live.answer)] = live
        if live.cut:
            self._cut[live.cut] = None

    def follow(self, request: RequestKey) -> Trail | None:
        """The trail of a request, to the deepest call that it continues; None while nothing is answered."""
        while self._unread:
            self.remember(self._unread.pop(0))
        if not self._live:
            return None
        trail = self._read(request)
        head = trail.head
        for depth, message in enumerate(trail.fingerprints, start=trail.skipped() + 1):
            trail.keys.append(message_fingerprint.chain(trail.keys[-1], message))
            if message.ids and (issued := self._issued.get((head, trail.keys[-1], message.ids))) is not None:
                trail.identified[depth] = issued
        for key in reversed(trail.keys):
            if (equal := self._answered.get((head, key))) is not None:
                trail.continued = _chosen(equal, trail)
                if trail.continued is not None:
                    break
        trail.repeats = (head, trail.keys[-1]) in self._requests
        return trail

    def _read(self, request: RequestKey) -> Trail:
        """A request's trail before it is followed: read from the start, or from a call whose messages it repeats."""
        start = self._start(request)
        if start is not None and start.conversation.head.tools == request.tools:
            numbering = Numbering(*start.numbering, start.number_of)
            fingerprints = message_fingerprint.read(request.messages[start.length :], numbering)
            return Trail(request, start.conversation.head, start, fingerprints, [start.key], numbering)
        return _read_whole(request)

    def _start(self, request: RequestKey) -> LiveCall | None:
        """The call that ends with the last answer in the messages, if they repeat all of it."""
        messages = request.messages
        roles = (at for at in range(len(messages) - 1, -1, -1) if messages[at].get("role") == "assistant")
        last = next(roles, None)
        if last is None:
            return None
        live = self._ends.get(
            _end(request._replace(messages=messages[:last]), message_fingerprint.fingerprint_of(messages[last]))
        )
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
            fork, nearest = None if turn.trail.repeats else refused(turn.parent, ids), turn.parent
        fork = None if fork is None else with_token(fork, nearest, ids)
        return Place(None, ids, ids, messages, fork, turn.request, turn.trail, nearest)

    def _fork(self, trail: Trail) -> tuple[Fork | None, LiveCall | None]:
        """Why a request continues nothing, and the call that it was compared with; None while nothing is answered.

        Nearest is the conversation with the most messages in common at its beginning; where there are none, the one of
        the latest answer that the request still holds; of equally near ones that with the same head, then the one
        answered last.
        """
        conversation, seed = trail.conversation(), trail.request.seed
        answers = [message for message in conversation.body if message.role == "assistant"]
        calls = [self._by_answer.get((seed, _bare(message))) for message in answers]
        answered = [live for live in calls if live is not None]
        shared = len(conversation.body)
        while shared and (None, trail.key_at(shared)) not in self._begun:
            shared -= 1
        nearest = answered[-1] if shared == 0 and answered else self._nearest(trail, shared)
        if nearest is None:
            return None, None
        if nearest.conversation.head == trail.head and (altered := trail.altered(nearest, shared)) is not None:
            at = len(trail.head.systems) + altered - 1
            return Fork(ForkCause.EDITED_TEXT, at, "assistant"), nearest
        holds_answer = bool(answered) or trail.continued is not None
        return fork_causes.find(conversation, nearest.whole(), shared, holds_answer=holds_answer), nearest

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
        exchange = next((lives for lives in self._at_hand if live in lives), None)
        if exchange is not None:
            self._at_hand.remove(exchange)
        prompt = live.prompt = live.prompt or Prompt(live.prompt_ids(), own=True)
        self._keep_at_hand(exchange or [live])
        return prompt

    def _keep_at_hand(self, answered: list[LiveCall]) -> None:
        """Keep the whole prompts of the latest exchanges, since they are likely to go on; of others they are joined."""
        self._at_hand.append(answered)
        if len(self._at_hand) > _AT_HAND:
            for live in self._at_hand.popleft():
                live.prompt = None


def _opened(request: RequestKey) -> Trail:
    """The trail of a request before which nothing was answered."""
    trail = _read_whole(request)
    for message in trail.fingerprints:
        trail.keys.append(message_fingerprint.chain(trail.keys[-1], message))
    return trail


def _read_whole(request: RequestKey) -> Trail:
    """A request's trail before it is followed, read from the start."""
    numbering = Numbering()
    head, fingerprints = message_fingerprint.split(message_fingerprint.read(request.messages, numbering), request.tools)
    return Trail(request, head, None, fingerprints, [request.seed], numbering)


def _lengthened(before: LiveCall | None, forms: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """The forms of a conversation that goes on with these; a second branch begins a list of its own."""
    if before is None:
        return forms
    if len(before.forms) > before.length:
        return before.forms[: before.length] + forms
    before.forms += forms
    return before.forms


def _end(request: RequestKey, answer: MessageFingerprint) -> _End:
    """What a call that answers messages is looked up by: their number, the texts that differ most, the answer."""
    messages = request.messages
    texts = [message.get("content") for message in (*messages[:2], *messages[-1:])]
    return request.seed, len(messages), tuple(text for text in texts if isinstance(text, str)), answer


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


def _cut_text(message: dict[str, Any]) -> str | None:
    text = message.get("content")
    return text.strip() if isinstance(text, str) and not message.get("tool_calls") else None


def _same(thought: bytes) -> bytes:
    return thought


def _bare(message: MessageFingerprint) -> MessageFingerprint:
    return message._replace(ids=()) if message.ids else message
