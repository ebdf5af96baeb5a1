"""The gateway that the players play against, and what came of each conversation: seen, stored, asked.

The engine says what is scripted, so every play of a conversation must leave the same forest.
"""

import json
import subprocess
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_proxy.engines.base import EngineFinish, EngineTokens, TokenRequest
from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import MODEL, SECRET, TOKENIZER, MemoryLedger, ScriptedEngine, Served, listening
from tests.sdk import players
from tests.sdk.players import CONVERSATIONS, PLAYERS, Conversation, Door, Mode, Played, Seen, play

Play = Callable[[str, Mode, str, Door], Played]
DOORS = ("url", "tagged", "key")
ENDED_BY_THE_GATEWAY = ("stop", "one_call")  # how far an engine got beyond the end is chance


class StagedEngine(ScriptedEngine):
    """A scripted engine whose context may be too short for any prompt."""

    too_long = False

    async def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        if self.too_long:
            raise PromptTooLong(len(request.prompt), 8)
        parts = super().generate(request)
        try:
            async for part in parts:
                yield part
        finally:
            await parts.aclose()


class Stored(NamedTuple):
    """One call of a stored forest, as it must be whoever asked: `parent` is its number, and there are no ids."""

    parent: int | None
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str
    delivered: bool
    overshoot: int
    agent: str | None
    model: str
    requested_model: str
    wished: dict[str, Any]


class Outcome(NamedTuple):
    """A play, its forest, the ignored fields of each call, and how many requests met an error by status."""

    played: Played
    forest: list[Stored]
    ignored: list[list[str]]
    refused: int


class Stage:
    """A gateway, and one attempt after the other on it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._attempts = 0

    def play(self, player: str, mode: Mode, conversation: str, *, door: str = "url", by: Play = play) -> Outcome:
        """Play a conversation in an attempt of its own."""
        self._attempts += 1
        served, asked = self.served, CONVERSATIONS[conversation]
        rollout, attempt = f"r{self._attempts}", f"a{self._attempts}"
        engine = served.engine
        assert isinstance(engine, StagedEngine)
        engine.script.clear()
        engine.script.extend(asked.said)
        engine.abilities = frozenset({"min_p", *asked.abilities})
        engine.too_long = conversation == "too_long"
        if asked.status == 409:
            served.ledger.closed.add(attempt)
        before = self._refused(asked)
        url = served.base_url(rollout, attempt, "solver" if door == "tagged" else None)
        root = served.url if door == "key" else url.removesuffix("/v1")
        played = by(player, mode, conversation, Door(root, served.key(rollout, attempt)))
        served.seal(rollout, attempt)
        forest, ignored = self._forest(rollout, early=conversation in ENDED_BY_THE_GATEWAY)
        return Outcome(played, forest, ignored, self._refused(asked) - before)

    def _refused(self, asked: Conversation) -> int:
        return self.served.gateway.counters[f"status_{asked.status}"]

    def _forest(self, rollout: str, *, early: bool) -> tuple[list[Stored], list[list[str]]]:
        spans = {span.span_id: span for span in self.served.ledger.spans if span.rollout_id == rollout}
        calls = calls_of(spans.values())
        number = {call.call_id: place for place, call in enumerate(calls)}
        forest, ignored = [], []
        for call in calls:
            told = spans[call.call_id].attributes
            forest.append(
                Stored(
                    parent=None if call.parent_id is None else number[call.parent_id],
                    prompt_ids=call.prompt_ids,
                    response_ids=call.response_ids,
                    finish_reason=call.finish_reason,
                    delivered=call.delivered,
                    overshoot=-1 if early else call.overshoot,
                    agent=call.agent,
                    model=call.model,
                    requested_model=told[semconv.REQUEST_MODEL],
                    wished=told[semconv.SAMPLING_REQUESTED],
                )
            )
            ignored.append(told.get(semconv.IGNORED_FIELDS, []))
        return forest, ignored


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """A stage whose journal is in `folder`."""
    tokenizer, router, ledger = FastTokenizer(TOKENIZER), Router(MODEL), MemoryLedger()
    engine = StagedEngine(tokenizer)
    router.register(engine)
    gateway = Gateway(
        ledger=ledger,
        secret=SECRET,
        journal=folder / "journal",
        renderer=load_renderer(TOKENIZER, "qwen3", MODEL),
        router=router,
        grace_seconds=0.2,
    )
    with listening(gateway) as (url, loop):
        yield Stage(Served(url, gateway, ledger, engine, loop))


class Environment:
    """An interpreter with an SDK that this one does not have; it plays what it is asked for."""

    def __init__(self, python: Path) -> None:
        if not python.exists():
            raise FileNotFoundError(f"{python} is missing; `make test-sdk` builds it")
        command = [str(python), str(Path(players.__file__))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def play(self, player: str, mode: Mode, conversation: str, door: Door) -> Played:
        """See `players.play`."""
        seen, *more = self._ask([player, *mode, conversation, *door])
        return Played([Seen(text, tuple(map(tuple, calls)), *rest) for text, calls, *rest in seen], *more)

    def version(self, player: str) -> str:
        """See `players.version`."""
        return str(self._ask([player]))

    def close(self) -> None:
        """End the interpreter."""
        self._process.communicate(timeout=20)

    def _ask(self, line: list[Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        assert told, f"the interpreter ended at {line}"
        return json.loads(told)


def amiss(player: str, conversation: str, outcome: Outcome) -> str | None:
    """What is not as it must be; None where all is well, be it an answer or the right error."""
    asked, played = CONVERSATIONS[conversation], outcome.played
    if asked.refused or conversation == "too_long":
        return _amiss_refused(player, conversation, outcome)
    if played.error is not None:
        return f"raised {played.error}"
    seen = [told._replace(logprobs=-1) if told.logprobs else told for told in played.seen]
    if seen != list(asked.seen):
        return f"saw {seen}, not {asked.seen}"
    if [call.parent for call in outcome.forest] != list(asked.parents):
        return f"stored parents {[call.parent for call in outcome.forest]}, not {asked.parents}"
    if {call.requested_model for call in outcome.forest} != {asked.model}:
        return f"recorded {[call.requested_model for call in outcome.forest]}, not {asked.model}"
    if any(call.wished.get(name) != value for call in outcome.forest for name, value in asked.wished.items()):
        return f"recorded the wishes {[call.wished for call in outcome.forest]}, not {asked.wished}"
    wanted = ["made_up"] if conversation == "unknown" else []
    if any(fields != wanted for fields in outcome.ignored):
        return f"ignored {outcome.ignored}, not {wanted}"
    return None


def _amiss_refused(player: str, conversation: str, outcome: Outcome) -> str | None:
    asked, error = CONVERSATIONS[conversation], outcome.played.error
    if error is None:
        return f"raised nothing, saw {outcome.played.seen}"
    if error["status"] != asked.status or any(word not in error["message"] for word in asked.refused):
        return f"raised {error}"
    if outcome.refused != 1:
        return f"was asked {outcome.refused} times"
    if outcome.forest:
        return f"stored {outcome.forest}"
    return _unknown_words(player, error) if conversation == "too_long" else None


def _unknown_words(player: str, error: dict[str, Any]) -> str | None:
    """Whether a client can tell that its prompt was too long."""
    kind = PLAYERS[player]
    if kind.sdk == "litellm":
        known = error["type"] == "ContextWindowExceededError"
    elif kind.dialect == "messages":
        known = "prompt is too long" in error["message"]
    else:
        known = error["code"] == "context_length_exceeded"
    return None if known else f"raised {error}, which its users do not look for"
