"""A recorded rollout run again: the agent as it is, our server and gateway as they are, and no model.

Invariant: the agent gets what it got then, or the replay stops and says where it went another way. Nothing is written
but to a folder that is gone afterwards.
"""

import asyncio
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvicorn

from lightning_rl.agents.agent import Agent, run_agent
from lightning_rl.agents.emitted import Emitted
from lightning_rl.control_plane.app import create_app
from lightning_rl.control_plane.gateways.engines import EngineRequest
from lightning_rl.control_plane.gateways.resolve import PROXY_LLM
from lightning_rl.control_plane.gateways.server_info import ServerInfo
from lightning_rl.control_plane.gateways.store_ledger import StoreLedger
from lightning_rl.control_plane.process import IDLE_SECONDS, JOURNAL
from lightning_rl.control_plane.routes.auth import Keys
from lightning_rl.errors import Explained
from lightning_rl.inspect.replay_engine import (
    Divergence,
    HearingRenderer,
    RecordedBackend,
    RecordedEngine,
    Recording,
)
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import AttemptTrace, Claim, RolloutConfig, RolloutRequest, RolloutTrace
from lightning_rl.store.errors import Invalid
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_adapters.credit import FINAL
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import SpecialTokens
from lightning_rl_proxy.routing.router import Router

_POLICY = "main_llm"
_LEASE_SECONDS = 30 * 24 * 3600  # nobody renews it
_LAST_WORDS_SECONDS = 5.0  # for an agent whose call was refused
_START_SECONDS = 60.0

Rewards = dict[str, float]


class NotReplayable(Explained, ValueError):
    """A rollout that cannot be run again on what was recorded."""


class GatewaySetup(msgspec.Struct, frozen=True, kw_only=True):
    """How the run's gateway was set up. `tokenizer` is a folder, None where every model was a chat service."""

    tokenizer: Path | None = None
    renderer: str = "auto"
    history: Literal["keep", "template"] = "keep"
    chat_template_kwargs: dict[str, Any] = {}
    special_tokens_in_text: SpecialTokens = "text"
    unknown_model: Literal["policy", "refuse"] = "policy"
    allowed_media_domains: list[str] = []


class ReplayEnding(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent ended: its rewards by name, those of single calls (name and value, sorted), and its error."""

    rewards: Rewards
    call_rewards: list[tuple[str, float]]
    error: str | None = None


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a replay.

    `now` is None where the agent did not end. `undelivered` calls were recorded, but their answers never reached the
    agent. `given_later`: the final reward was given from outside the agent, so that a replay cannot give it.
    `other_sampling` has, by call, the parameters that the agent now asks otherwise: [recorded, now].
    """

    rollout_id: str
    attempt_id: str
    calls_recorded: int
    calls_replayed: int
    undelivered: int
    recorded: ReplayEnding
    now: ReplayEnding | None
    given_later: bool
    other_sampling: dict[int, dict[str, list[Any]]]
    divergence: Divergence | None

    @property
    def agrees(self) -> bool:
        """Whether all of it was as it was recorded."""
        return (
            self.divergence is None
            and self.calls_replayed == self.calls_recorded
            and not self.other_sampling
            and self.now is not None
            and _comparable(self.recorded, self.given_later) == _comparable(self.now, self.given_later)
        )


def replay(trace: RolloutTrace, agent: Agent, resources: dict[str, dict[str, Any]], setting: GatewaySetup) -> Replay:
    """Run the agent again on the recorded answers of the rollout's counting attempt.

    Raises NotReplayable where there is no such attempt, or its calls cannot be replayed with this setting.
    """
    attempt = counting(trace)
    published = resources or {_POLICY: {"type": PROXY_LLM, "model": "policy"}}
    policy = str(published.get(_POLICY, {}).get("model", "policy"))
    renderer = _renderer(attempt, policy, setting)
    recording = Recording(attempt, None if renderer is None else renderer.tokenizer.decode)
    with (
        tempfile.TemporaryDirectory(prefix="replay-") as place,
        _served(Path(place), recording, renderer, policy, setting) as store,
    ):
        claim = _claimed(store, trace, published)
        now = _run(agent, claim, recording)
    return Replay(
        rollout_id=trace.rollout.rollout_id,
        attempt_id=attempt.attempt.attempt_id,
        calls_recorded=len(recording.calls),
        calls_replayed=recording.replayed,
        undelivered=recording.undelivered,
        recorded=_recorded(attempt),
        now=now,
        given_later=any(reward.name == FINAL and reward.call_id is None for reward in attempt.rewards),
        other_sampling=recording.other_sampling,
        divergence=recording.divergence,
    )


def counting(trace: RolloutTrace) -> AttemptTrace:
    """The attempt that counts. Raises NotReplayable where none does."""
    rollout = trace.rollout
    for attempt in trace.attempts:
        if attempt.attempt.attempt_id == rollout.counting_attempt_id:
            return attempt
    raise NotReplayable(
        f"rollout {rollout.rollout_id} is {rollout.status}, and none of its attempts counts: replay one that "
        "succeeded, or whose agent failed"
    )


def needs_tokenizer(attempt: AttemptTrace) -> bool:
    """Whether some of its calls were sampled token by token."""
    return any(entry.call.trainable for entry in Recording(attempt).calls)


def _renderer(attempt: AttemptTrace, policy: str, setting: GatewaySetup) -> Renderer | None:
    if setting.tokenizer is None:
        if needs_tokenizer(attempt):
            raise NotReplayable(
                "the calls were sampled token by token, and the tokenizer of the run's model is not known here: name "
                "its folder with --tokenizer"
            )
        return None
    try:
        return load_renderer(
            setting.tokenizer,
            setting.renderer,
            policy,
            history=setting.history,
            chat_template_kwargs=setting.chat_template_kwargs,
            special_tokens_in_text=setting.special_tokens_in_text,
        )
    except (ValueError, FileNotFoundError) as error:
        raise NotReplayable(f"the prompts cannot be written: {error}") from error


def _claimed(store: HttpStore, trace: RolloutTrace, resources: dict[str, dict[str, Any]]) -> Claim:
    """The same rollout, asked for anew; under its own id, so that the seeds of its calls are the same."""
    rollout = trace.rollout
    published = store.publish(resources)
    request = RolloutRequest(
        task=rollout.task,
        mode=rollout.mode,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        agent=rollout.agent,
        resources_id=published.resources_id,
        config=RolloutConfig(timeout_seconds=None, unresponsive_seconds=_LEASE_SECONDS),
        metadata=rollout.metadata,
    )
    return store.start(request)


def _run(agent: Agent, claim: Claim, recording: Recording) -> ReplayEnding | None:
    """How the agent ended; None where it goes on although its call was refused."""
    ended: list[ReplayEnding] = []

    def run() -> None:
        ended.append(_ending(agent, claim))
        recording.stopped.set()

    thread = threading.Thread(target=run, name="the agent", daemon=True)  # one that hangs must not keep the process
    thread.start()
    recording.stopped.wait()
    thread.join(_LAST_WORDS_SECONDS)
    return ended[0] if ended else None


def _ending(agent: Agent, claim: Claim) -> ReplayEnding:
    emitted = Emitted(claim.rollout.rollout_id, claim.attempt.attempt_id)
    rewards: Rewards | None = None
    error = None
    try:
        rewards = run_agent(agent, claim, emitted=emitted)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - whatever an agent raises is data
        error = f"{type(raised).__name__}: {raised}"
    calls = sorted((reward.name, reward.value) for reward in emitted.call_rewards)
    return ReplayEnding(rewards=rewards or {}, call_rewards=calls, error=error)


def _recorded(attempt: AttemptTrace) -> ReplayEnding:
    error = attempt.attempt.error
    calls = sorted((reward.name, reward.value) for reward in attempt.rewards if reward.call_id is not None)
    return ReplayEnding(
        rewards=attempt.attempt.rewards,
        call_rewards=calls,
        error=None if error is None else f"{error.type}: {error.message}",
    )


def _comparable(ending: ReplayEnding, given_later: bool) -> tuple[Rewards, list[tuple[str, float]], str | None]:
    """What of it a replay can give: of an error the type alone, since messages name ids and times."""
    rewards = {name: value for name, value in ending.rewards.items() if not (given_later and name == FINAL)}
    return rewards, ending.call_rewards, None if ending.error is None else ending.error.partition(":")[0]


class _ReplayServer(uvicorn.Server):
    """uvicorn that says when it answers."""

    def __init__(self, config: uvicorn.Config, started: "Future[None]") -> None:
        super().__init__(config)
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._started.set_result(None)


@contextmanager
def _served(
    place: Path,
    recording: Recording,
    renderer: Renderer | None,
    policy: str,
    setting: GatewaySetup,
) -> Iterator[HttpStore]:
    """A store, a server and a gateway of their own, in a thread, with the recording behind every model."""
    key = secrets.token_urlsafe(24)
    started: Future[None] = Future()
    config = uvicorn.Config(
        app="", ws="none", log_config=None, lifespan="on", access_log=False, timeout_keep_alive=IDLE_SECONDS
    )
    server = _ReplayServer(config, started)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        async def serve() -> None:
            sql = SqlThread()
            store = await sql.run(SqlStore, f"sqlite:///{place / 'store.db'}")
            try:
                hearing = None if renderer is None else HearingRenderer(renderer, recording)
                gateway = Gateway(
                    ledger=StoreLedger(store, sql),
                    secret=store.secret,
                    journal=place / JOURNAL,
                    renderer=hearing,
                    router=_router(recording, renderer, policy, setting.unknown_model),
                    allowed_media_domains=setting.allowed_media_domains,
                )
                config.app = create_app(
                    store,
                    gateway,
                    sql=sql,
                    keys=Keys(admin=key, runner=""),
                    gateway_url=url,
                    attach_engine=_no_engine,
                    info=ServerInfo(model=policy),
                )
                await server.serve(sockets=[listening])
            finally:
                await sql.run(store.close)
                sql.close()

        def work() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                if not started.done():
                    started.set_exception(error)
                raise

        thread = threading.Thread(target=work, name="the server of the replay", daemon=True)
        thread.start()
        store = HttpStore(url, key)
        try:
            started.result(_START_SECONDS)
            yield store
        finally:
            store.close()
            server.should_exit = True
            thread.join()


def _router(
    recording: Recording, renderer: Renderer | None, policy: str, unknown_model: Literal["policy", "refuse"]
) -> Router:
    """The recording as an engine of each model that was sampled, and as a backend of each other one."""
    router = Router(policy, unknown_model=unknown_model)
    sampled = {entry.call.model for entry in recording.calls if entry.call.trainable}
    frozen = {entry.call.model for entry in recording.calls} - sampled
    if policy not in sampled | frozen:
        (frozen if renderer is None else sampled).add(policy)
    for model in sorted(sampled):
        router.register(RecordedEngine(model, recording, renderer.stop_token_ids if renderer else ()))
    for model in sorted(frozen):
        router.register_backend(RecordedBackend(model, recording))
    return router


async def _no_engine(_request: EngineRequest) -> str:
    raise Invalid("a replay takes no engine")
