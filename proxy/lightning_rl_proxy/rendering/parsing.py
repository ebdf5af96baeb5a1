"""Sampled tokens -> what they add to an answer, as they come.

What has been told is always the beginning of what the reader makes of the whole answer. So only the regular course of
a format is followed (reasoning, text, calls); after anything else nothing more is told before the end.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from lightning_rl_proxy.rendering.base import (
    Delta,
    Markup,
    ParsedAnswer,
    SampledToken,
)
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer

Channel = Literal["content", "reasoning"]
State = Literal["start", "reasoning", "content", "calls", "held", "over"]

_log = logging.getLogger(__name__)
_INCOMPLETE = "\ufffd"  # what an unfinished character decodes to
_CLOSED_CALLS = 32  # that are read as they close; behind them those that have closed are, at 64, 128, ...
_MAY_CLOSE = 256  # the same, of a format of which any token of its own may close a call
_CHARACTER = 4  # tokens that an unfinished character can be in at most


class Reader(Protocol):
    """What can read sampled tokens: a `Renderer`, or what takes them as mere text."""

    stop_token_ids: list[int]
    tokenizer: FastTokenizer

    @property
    def markup(self) -> Markup | None:
        """What can be followed while an answer comes; None where it can only be parsed as a whole."""
        ...

    def parse(
        self,
        call_id: str,
        prompt_ids: list[int],
        response_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        tools: Sequence[dict[str, Any]] | None,
    ) -> ParsedAnswer:
        """The answer that the sampled ids mean. Without tools there is nothing to call: markup of calls is content."""
        ...

    def encode_behind(self, text: str) -> list[int]:
        """The ids of `text` in the middle of a conversation."""
        ...


class AnswerEnd(NamedTuple):
    """Where an answer ends beside where the model ends it: before the first of these texts, or, with `one_tool_call`,
    with its first tool call; and behind one of the `stop_token_ids`, which its text then lacks."""

    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    one_tool_call: bool = False


_MODELS_END = AnswerEnd()


class AnswerParser:
    """Sampled tokens of one answer -> deltas as they come, and at last the Answer.

    `prefix_ids` are the forced tokens with which the answer begins; they stand behind `prompt_ids`, and nobody sampled
    them. An answer of one tool call has the end of the turn, too, where the model says it there, so that it is learnt;
    the model is asked for one token more than the call, or some white space.
    After `ended` (a stop string has matched; behind the one tool call comes anything else than that end) tokens are
    only counted, as `overshoot`: they belong to no answer. With `tokens` the deltas hold the sampled ones.
    """

    def __init__(
        self,
        reader: Reader,
        call_id: str,
        prompt_ids: list[int],
        tools: Sequence[dict[str, Any]] | None,
        end: AnswerEnd = _MODELS_END,
        *,
        prefix_ids: Sequence[int] = (),
        tokens: bool = False,
    ) -> None:
        self.ended = False
        self.overshoot = 0
        self._reader = reader
        self._call_id = call_id
        self._prompt_ids = prompt_ids
        self._tools = tools
        self._prefix_ids = list(prefix_ids)
        self._parallel = not end.one_tool_call
        self._wants_tokens = tokens
        self._kept: list[int] = []
        self._called: int | None = None  # the number of kept tokens to the end of the one call that is wanted
        self._followed = 0  # of the kept tokens; the rest may be the beginning of a stop string
        self._logprobs: list[float] | None = []
        self._streamed_tokens = 0  # of the kept tokens, in deltas
        self._streamed: dict[Channel, str] = {"content": "", "reasoning": ""}
        self._calls_streamed = 0
        self._closed = 0  # how often a mark has closed a call
        self._match: _Match | None = None
        tokenizer, markup = reader.tokenizer, reader.markup
        # A token of the format stays, though the answer ends behind it: what it closes is read by it.
        self._unread = frozenset(end.stop_token_ids) - tokenizer.added_ids
        if markup is not None and not tools:
            markup = markup.without_calls()
        if markup is not None and self._unread:
            markup = markup._replace(unseen=markup.unseen | self._unread)
        stops = [text for text in end.stop if text]
        self._stops = _StopStrings(stops, reader, self._unread) if stops else None
        self._course = None
        self._alone = tokenizer.added_ids | self._unread
        self._one_by_one = bool(stops)
        if markup is not None:
            self._course = _Course(markup, tokenizer.decode, reasons=self._prompt_opens_reasoning(markup))
            self._alone = self._alone.union(markup.tokens, markup.ends)
            # Where marks are mere text, any token may complete one.
            self._one_by_one |= len(markup.tokens) < len(markup.marks())
        self._waiting = [delta for run in self._runs(self._prefix_ids) for delta in self._follow(run)]

    def push(self, token_ids: list[int], logprobs: list[float] | None) -> list[Delta]:
        """The deltas of some more tokens. What comes after the answer's end is counted as `overshoot`."""
        deltas, self._waiting = self._waiting, []
        place = 0
        for run in self._runs(token_ids):
            if self.ended:
                break
            place += len(run)
            more = None if logprobs is None else logprobs[place - len(run) : place]
            deltas += self._keep(run, more) if self._called is None else self._close(run, more)
        self.overshoot += len(token_ids) - place
        return deltas

    def finish(self, finish_reason: str) -> tuple[ParsedAnswer, list[Delta]]:
        """The whole answer, and the deltas that were held back."""
        if self._called is not None and not self._kept_end():
            self._end_behind_call()
        meant = self._prefix_ids + self._kept
        if self._match is not None:
            meant = self._prefix_ids + self._kept[: self._followed]
            meant += self._reader.encode_behind(self._match.partial) if self._match.partial else []
        parsed = self._parse(meant, "stop" if self.ended else finish_reason)
        answer = msgspec.structs.replace(
            parsed,
            tool_calls=parsed.tool_calls if self._parallel else parsed.tool_calls[:1],  # of formats that list them
            token_ids=self._kept,
            logprobs=self._logprobs,
            output_tokens=len(self._kept),
            stop_match=None if self._match is None else self._match.stop,
        )
        self._followed = len(self._kept)
        deltas = self._waiting + self._tell("reasoning", self._rest("reasoning", answer.reasoning or ""))
        deltas += self._tell("content", self._rest("content", answer.content))
        deltas += self._tell_calls(answer.tool_calls)
        if tokens := self._take_tokens():
            deltas.append(Delta(kind="content", tokens=tokens))
        return answer, deltas

    def _runs(self, token_ids: Sequence[int]) -> Iterator[list[int]]:
        """The tokens in pieces that mean one thing: marks alone, plain text together."""
        run: list[int] = []
        for token in token_ids:
            if self._one_by_one or token in self._alone:
                if run:
                    yield run
                    run = []
                yield [token]
            else:
                run.append(token)
        if run:
            yield run

    def _keep(self, run: list[int], logprobs: list[float] | None) -> list[Delta]:
        self._kept += run
        if logprobs is None:
            self._logprobs = None
        elif self._logprobs is not None:
            self._logprobs += logprobs
        if self._stops is None:
            self._followed += len(run)
            return self._follow(run)
        certain, self._match = self._stops.push(run[0])
        deltas: list[Delta] = []
        for token in certain:
            self._followed += 1
            deltas += self._follow([token])
            if self._called is not None:
                self._match = None
                queued = self._kept[self._followed :]
                scores = None if self._logprobs is None else self._logprobs[self._followed :]
                self._drop_from(self._followed)
                for at, late in enumerate(queued):
                    self._close([late], None if scores is None else scores[at : at + 1])
                return deltas
        self.ended = self._match is not None
        return deltas

    def _close(self, run: list[int], logprobs: list[float] | None) -> list[Delta]:
        """Behind the one call: the end of the turn belongs to the answer, with white space before it."""
        if self.ended:
            self.overshoot += len(run)
        elif self._kept_end() or (
            run[0] not in self._reader.stop_token_ids and self._reader.tokenizer.decode(run).strip()
        ):
            self._end_behind_call()
            self.overshoot += len(run)
        else:
            self._kept += run
            self._followed += len(run)
            if logprobs is None:
                self._logprobs = None
            elif self._logprobs is not None:
                self._logprobs += logprobs
        return []

    def _kept_end(self) -> bool:
        """Whether the end of the turn was sampled behind the one call."""
        return any(token in self._reader.stop_token_ids for token in self._kept[self._called :])

    def _end_behind_call(self) -> None:
        """The answer ends with its one call, or with the end of the turn behind that."""
        assert self._called is not None
        self.ended = True
        if not self._kept_end():
            self.overshoot += len(self._kept) - self._called
            self._drop_from(self._called)

    def _drop_from(self, place: int) -> None:
        del self._kept[place:]
        if self._logprobs is not None:
            del self._logprobs[place:]
        self._followed = min(self._followed, place)

    def _follow(self, run: list[int]) -> list[Delta]:
        """The deltas of tokens that belong to the answer for certain."""
        if self._course is None:
            if not self._parallel and run[0] in self._reader.tokenizer.added_ids:
                self._closed += 1
                if self._is_looked_at() and self._calls_so_far():
                    self._called = self._followed
            return []
        deltas: list[Delta] = []
        for channel, text in self._course.push(run):
            deltas += self._tell(channel, text)
        if self._course.closed_call and (self._course.state == "calls" or not self._parallel):
            self._closed += 1
            if not self._is_looked_at():
                return deltas  # they are told later
            calls = self._calls_so_far()
            if calls and not self._parallel:
                self._called = self._followed
                if (mark := self._course.opened_call) is not None:  # of the next one: it is no part of the answer
                    self._called -= self._tokens_of(mark)
                    self._end_behind_call()
            deltas += self._tell_calls(calls if self._parallel else calls[:1])
        return deltas

    def _tokens_of(self, mark: str) -> int:
        """How many tokens the mark takes that the last one has completed."""
        decode, kept = self._reader.tokenizer.decode, self._kept[: self._followed]
        return next(n for n in range(1, len(kept) + 1) if mark in decode(kept[-n:]) or n == len(kept))

    def _is_looked_at(self) -> bool:
        """Whether calls are looked for where one has closed, or may have: each look reads the whole answer again."""
        most = _CLOSED_CALLS if self._course is not None else _MAY_CLOSE
        return self._closed <= most or not self._closed & (self._closed - 1)

    def _prompt_opens_reasoning(self, markup: Markup) -> bool:
        return markup.reasoning is not None and bool(self._parse(self._reader.encode_behind("x"), "stop").reasoning)

    def _calls_so_far(self) -> list[dict[str, Any]]:
        return self._parse(self._prefix_ids + self._kept[: self._followed], "stop").tool_calls

    def _parse(self, ids: list[int], finish_reason: str) -> ParsedAnswer:
        ids = [token for token in ids if token not in self._unread] if self._unread else ids
        return self._reader.parse(self._call_id, self._prompt_ids, ids, None, finish_reason, self._tools)

    def _tell(self, channel: Channel, text: str) -> list[Delta]:
        if not text:
            return []
        self._streamed[channel] += text
        return [Delta(kind=channel, text=text, tokens=self._take_tokens())]

    def _tell_calls(self, calls: list[dict[str, Any]]) -> list[Delta]:
        new = range(self._calls_streamed, len(calls))
        self._calls_streamed = len(calls)
        return [Delta(kind="tool_call", tool_call=calls[i], tool_index=i, tokens=self._take_tokens()) for i in new]

    def _take_tokens(self) -> list[SampledToken] | None:
        """Those since the last time."""
        if not self._wants_tokens:
            return None
        first, self._streamed_tokens = self._streamed_tokens, self._followed
        decode, logprobs = self._reader.tokenizer.decode, self._logprobs
        return [
            SampledToken(self._kept[at], decode([self._kept[at]]), None if logprobs is None else logprobs[at])
            for at in range(first, self._followed)
        ]

    def _rest(self, channel: Channel, text: str) -> str:
        prefix = self._streamed[channel]
        if not text.startswith(prefix):
            _log.error(
                "the %s of call %s was streamed otherwise than it is recorded: its renderer's markup is wrong; "
                "use another renderer for this model",
                channel,
                self._call_id,
            )
        return text[len(prefix) :]


class _Course:
    """Where in its format's regular course an answer is; gives out text that will stay where it is."""

    def __init__(self, markup: Markup, decode: Callable[[list[int]], str], *, reasons: bool) -> None:
        self.state: State = "reasoning" if reasons else "start"
        self.closed_call = False  # by the tokens pushed last
        self.opened_call: str | None = None  # the mark of another one, which is what has closed it
        self._markup = markup
        self._marks = markup.marks()
        # Of two marks that begin at one place the first in the alphabet is found.
        self._mark = re.compile("|".join(re.escape(mark) for mark in sorted(self._marks)) or "(?!)")
        self._textual = set(self._marks).difference(markup.tokens.values())
        self._open, self._close = markup.reasoning or ("", "")
        self._call, self._call_end = markup.calls or ("", "")
        self._text = _TextPiece(decode)
        self._buffer = ""  # text that may be the beginning of a mark, or what stands before one
        self._space = ""  # white space that goes if nothing follows it
        self._bare = True  # of the state's text nothing but white space has come
        self._told_content = False
        self._may_open = reasons  # a prompt that opened reasoning may see it opened again

    def push(self, run: list[int]) -> list[tuple[Channel, str]]:
        """The text that a run of plain tokens, or one other token, adds."""
        self.closed_call, self.opened_call = False, None
        if self.state == "over" or run[0] in self._markup.unseen:
            return []
        mark = self._markup.tokens.get(run[0])
        if mark is None and run[0] not in self._markup.ends and run[0] not in self._markup.foreign:
            return self._read(self._text.push(run))
        pieces = self._read(self._text.flush())
        if mark is not None:
            pieces += self._say(self._buffer)
            self._buffer = ""
            self._text.after(run)
            self._pass(mark)
        elif run[0] in self._markup.ends:
            self.state = "over"
        elif self.state != "calls":
            self.state = "held"
        # Some parsers leave the mark out and join what stands around it, which may be the parts of one character.
        return [] if self.state == "held" else pieces

    def _read(self, text: str) -> list[tuple[Channel, str]]:
        pieces: list[tuple[Channel, str]] = []
        self._buffer += text
        while match := self._mark.search(self._buffer):
            mark = match[0]
            pieces += self._say(self._buffer[: match.start()])
            self._buffer = self._buffer[match.end() :]
            if mark in self._textual:
                self._pass(mark)
            elif self.state != "calls":
                # Text that only looks like a mark is one to some parsers.
                self.state = "held"
        overlap = _overlap(self._buffer, self._marks)
        pieces += self._say(self._buffer[: len(self._buffer) - overlap])
        self._buffer = self._buffer[len(self._buffer) - overlap :]
        return pieces

    def _pass(self, mark: str) -> None:
        """Go on behind a mark."""
        if mark == self._call_end:
            self.closed_call = self.state in ("calls", "held")
        elif mark == self._call and not self._call_end:
            self.closed_call = self.state in ("calls", "held")
            self.opened_call = mark if self.closed_call else None
        if self.state == "calls" or self.state == "held":
            return
        state: State = "held"
        opened_again = self.state == "reasoning" and self._may_open and self._bare
        if mark == self._open and (self.state == "start" or opened_again):
            state, self._may_open = "reasoning", False
        elif mark == self._close and self.state == "reasoning":
            state = "content"
        elif mark == self._call and self.state in ("start", "content"):
            state = "calls"
        self.state, self._space, self._bare = state, "", True

    def _say(self, text: str) -> list[tuple[Channel, str]]:
        if not text or self.state in ("calls", "held", "over"):
            return []
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if not stripped:
            return []
        if self.state != "reasoning" and not self._told_content:
            if self._markup.bare_calls and stripped.lstrip().startswith("{"):
                self.state = "held"
                return []
            self._told_content = True
        if self.state == "start":
            self.state, self._bare = "content", not self._markup.keeps_space
        if self._bare:
            stripped, self._bare = stripped.lstrip(), False
        return [("reasoning" if self.state == "reasoning" else "content", stripped)]


class _Match(NamedTuple):
    """A stop string, and the text before it in the token that it begins in."""

    stop: str
    partial: str


class _AnswerPiece(NamedTuple):
    """Tokens that give whole characters only together, their text, and its place in the answer's visible text."""

    tokens: list[int]
    start: int
    text: str


class _StopStrings:
    """Looks for stop strings in the visible text; gives out tokens once they are part of none."""

    def __init__(self, stops: list[str], reader: Reader, unread: frozenset[int]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops))
        self._unseen = reader.tokenizer.special_ids.union(reader.stop_token_ids, unread)
        self._text = _TextPiece(reader.tokenizer.decode)
        self._tail = ""
        self._length = 0  # of the visible text
        self._tokens: list[int] = []  # the piece that is to come
        self._piece = ""
        self._queue: deque[_AnswerPiece] = deque()

    def push(self, token: int) -> tuple[list[int], _Match | None]:
        """The tokens that are now known to stand before any stop string, and the match that this token completes."""
        self._tokens.append(token)
        if token not in self._unseen:
            self._piece += self._text.push([token])
        if self._text.waiting:
            return [], None
        piece = _AnswerPiece(self._tokens, self._length, self._piece)
        self._tokens, self._piece = [], ""
        self._queue.append(piece)
        window = self._tail + piece.text
        begin = self._length - len(self._tail)
        self._length += len(piece.text)
        self._tail = window[max(0, len(window) - self._longest + 1) :]
        occurrences = ((window.find(stop), stop) for stop in self._stops)
        first = min(((place + len(stop), place, stop) for place, stop in occurrences if place >= 0), default=None)
        if first is None:
            return self._before(self._length - _overlap(window, self._stops)), None
        _, place, stop = first
        certain = self._before(begin + place)
        cut = self._queue[0]
        return certain, _Match(stop, cut.text[: begin + place - cut.start])

    def _before(self, place: int) -> list[int]:
        """Take the tokens whose text ends there at the latest."""
        tokens: list[int] = []
        while self._queue and self._queue[0].start + len(self._queue[0].text) <= place:
            tokens += self._queue.popleft().tokens
        return tokens


class _TextPiece:
    """Token ids -> text, as soon as its characters are whole."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # some tokenizers write a space before a word unless it is the first
        self._before = ""
        self._pending: list[int] = []

    @property
    def waiting(self) -> bool:
        """Whether tokens are pending whose character is not whole."""
        return bool(self._pending)

    def push(self, ids: list[int]) -> str:
        """The text that is whole now."""
        self._pending += ids
        text = self._decode(self._context + self._pending)[len(self._before) :]
        if not text.endswith(_INCOMPLETE):
            self.after(self._pending)
            return text
        return self._settle(text) if len(self._pending) > 2 * _CHARACTER else ""

    def flush(self) -> str:
        """The text of all that is pending, whole or not."""
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)[len(self._before) :]
        self.after(self._pending)
        return text

    def after(self, ids: list[int]) -> None:
        """Go on behind these."""
        self._pending = []
        self._context = ids[-1:]
        self._before = self._decode(self._context)

    def _settle(self, text: str) -> str:
        """All but the last character, whose tokens alone may still change."""
        settled, last = self._pending[:-_CHARACTER], self._pending[-_CHARACTER:]
        settled_text = self._decode(self._context + settled)[len(self._before) :]
        ahead = _TextPiece(self._decode)
        ahead.after(settled)
        if settled_text + ahead._decode(ahead._context + last)[len(ahead._before) :] != text:
            return ""
        self.after(settled)
        self._pending = last
        return settled_text


def _overlap(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` with which one of `marks` begins."""
    begun = (mark for mark in marks if mark[0] in text)
    lengths = (n for mark in begun for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n]))
    return max(lengths, default=0)
