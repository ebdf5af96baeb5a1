"""The store over HTTP, for trainers and runners: the control plane's requests as typed calls.

Invariant: every call may be repeated. What could be made twice carries an id that is chosen here, so a
connection that breaks in mid-answer is retried without harm. Safe to share between threads.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlencode

import msgspec
import urllib3

from lightning_rl.store.answers import (
    AttemptsAnswer,
    ClaimsAnswer,
    LeaseAnswer,
    LeasesAnswer,
    LogsAnswer,
    PageAnswer,
    RewardedAnswer,
    RewardsAnswer,
    RolloutsAnswer,
    TracesAnswer,
    WorkersAnswer,
)
from lightning_rl.store.contract import (
    Attempt,
    AttemptLog,
    Claim,
    Ending,
    Finish,
    Log,
    Resources,
    ResourcesRequest,
    Reward,
    Rollout,
    RolloutDetail,
    RolloutRequest,
    RolloutTrace,
    WorkerInfo,
    body_of,
    body_of_request,
)
from lightning_rl.store.errors import (
    Conflict,
    ForeignAnswer,
    Invalid,
    NotAllowed,
    NotFound,
    StoreUnwritable,
    Unreachable,
)
from lightning_rl.store.run_store import TRACES_AT_ONCE
from lightning_rl_adapters.ids import new_id
from lightning_rl_proxy.recording.ledger import AttemptTokens

T = TypeVar("T")

_UNWRITABLE = 507
_ERRORS = {
    400: Invalid,
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    413: Invalid,
    _UNWRITABLE: StoreUnwritable,
}
# Connections are refused while a server starts, and 502-504 come from relays in front of it.
_RETRY: Final = {
    "total": 4,
    "backoff_factor": 0.2,
    "status_forcelist": (502, 503, 504),
    "allowed_methods": None,
    "raise_on_status": False,
    "redirect": 0,
}
_ANSWER_SECONDS = 60.0  # for an answer, beyond the time that a long poll may take
_ENQUEUE_BATCH = 1000
_REWARDS_AT_ONCE = 8  # attempts that are given rewards at a time
_PATIENCE_SECONDS = 60.0  # with a store that cannot be written
_ROOT = "/api/v1"
_SHOWN = 120  # characters, of an answer that is not ours
_MAX_PAUSE_SECONDS = 2.0  # between two tries of that


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Whether it is another's: of a request that is tried again here nobody needs to hear, `Unreachable` says it."""
    if not record.msg.startswith("Retrying"):
        return True
    args = record.args if isinstance(record.args, tuple) else ()
    return not any(isinstance(argument, str) and argument.startswith(f"{_ROOT}/") for argument in args)


logging.getLogger("urllib3.connectionpool").addFilter(_is_not_ours)


class HttpStore:
    """The control plane at `base_url` (without `/api/v1`), opened by an admin or a runner key.

    Each call raises the error that the server named (`Invalid`, `NotAllowed`, `NotFound`, `Conflict`),
    `StoreUnwritable` when the server could not write its store for `patience_seconds`, `Unreachable` when there was no
    answer after a few tries (`ForeignAnswer`: one that no server of this version gives).
    """

    def __init__(
        self, base_url: str, key: str, *, connections: int = 32, patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        self.patience_seconds = patience_seconds
        self.url = base_url.rstrip("/")
        self._root = self.url + _ROOT
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._closed = threading.Event()
        self._pool = urllib3.PoolManager(maxsize=connections, retries=_WhileOpen(closed=self._closed, **_RETRY))

    def close(self) -> None:
        """Close the connections. A request that another thread makes is not tried again."""
        self._closed.set()
        self._pool.clear()

    # Rollouts

    def enqueue(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """The rollouts asked for, in that order."""
        named = [msgspec.structs.replace(request, rollout_id=request.rollout_id or new_id("r")) for request in requests]
        made: list[Rollout] = []
        for start in range(0, len(named), _ENQUEUE_BATCH):
            bodies = b",".join(body_of_request(request) for request in named[start : start + _ENQUEUE_BATCH])
            made += self._call("POST", "/rollouts", b'{"rollouts":[%b]}' % bodies, RolloutsAnswer).rollouts
        return made

    def start(self, request: RolloutRequest) -> Claim:
        """Create one rollout and claim it at once."""
        rollout_id = request.rollout_id or new_id("r")
        named = msgspec.structs.replace(request, rollout_id=rollout_id)
        return self._call("POST", "/rollouts/start", body_of_request(named), Claim)

    def rollout(self, rollout_id: str) -> RolloutDetail:
        """The rollout with its attempts."""
        return self._call("GET", f"/rollouts/{rollout_id}", None, RolloutDetail)

    def find(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """The rollouts of these ids, in that order; unknown ids are left out."""
        return self._call("POST", "/rollouts/find", {"rollout_ids": rollout_ids}, RolloutsAnswer).rollouts

    def rollouts(
        self,
        *,
        status: str | None = None,
        mode: str | None = None,
        group_id: str | None = None,
        page: int = 100,
    ) -> Iterator[Rollout]:
        """All rollouts that fit, in the order they were enqueued, read `page` at a time."""
        wanted = {"status": status, "mode": mode, "group_id": group_id, "limit": str(page)}
        query = {name: value for name, value in wanted.items() if value is not None}
        while True:
            answer = self._call("GET", f"/rollouts?{urlencode(query)}", None, PageAnswer)
            yield from answer.rollouts
            if answer.cursor is None:
                return
            query["cursor"] = answer.cursor

    def rewarded(self, after: int | None = None) -> tuple[list[str], int]:
        """The rollouts that were given rewards after this position, late ones too, and the position now; with None no
        rollouts."""
        query = "" if after is None else f"?after={after}"
        answer = self._call("GET", f"/rollouts/rewarded{query}", None, RewardedAnswer)
        return answer.rollout_ids, answer.position

    def cancel(self, rollout_id: str) -> Rollout:
        """End the rollout as cancelled; one that has ended stays as it is."""
        return self._call("POST", f"/rollouts/{rollout_id}/cancel", {}, Rollout)

    def wait(self, rollout_ids: Sequence[str], wait_seconds: float, gather_seconds: float = 0.01) -> list[Rollout]:
        """Those that have ended, as soon as any has; [] when the time is up. Others may end within `gather_seconds`
        behind the first: they are told with it, as soon as all have."""
        body = {"rollout_ids": rollout_ids, "wait_seconds": wait_seconds, "gather_seconds": gather_seconds}
        return self._call("POST", "/rollouts/wait", body, RolloutsAnswer, wait_seconds + gather_seconds).rollouts

    # A worker's calls

    def claim(
        self,
        worker_id: str,
        *,
        agents: Sequence[str] | None = None,
        limit: int = 1,
        wait_seconds: float = 0,
        claim_id: str | None = None,
    ) -> list[Claim]:
        """Up to `limit` rollouts to run, as soon as there are any; [] when the time is up.

        The same `claim_id` again, for the same request, gives the same claims.
        """
        body = {
            "claim_id": claim_id or new_id("c"),
            "worker_id": worker_id,
            "agents": agents,
            "limit": limit,
            "wait_seconds": wait_seconds,
        }
        return self._call("POST", "/rollouts/claim", body, ClaimsAnswer, wait_seconds).claims

    def heartbeat(self, rollout_id: str, attempt_id: str) -> float:
        """When the renewed lease expires, in seconds since the epoch."""
        path = _attempt_path(rollout_id, attempt_id)
        return self._call("POST", f"{path}/heartbeat", {}, LeaseAnswer).lease_expires_at

    def heartbeats(self, places: Sequence[tuple[str, str]]) -> dict[str, float]:
        """`heartbeat` of many attempts, by (rollout id, attempt id): the leases by attempt id; those that are no
        longer the caller's are left out."""
        return self._call("POST", "/attempts/heartbeat", {"attempts": places}, LeasesAnswer).leases

    def workers_died(self, worker_ids: Sequence[str]) -> list[Rollout]:
        """These workers' process is gone: their attempts are lost now; the rollouts that this moved."""
        return self._call("POST", "/workers/died", {"worker_ids": worker_ids}, RolloutsAnswer).rollouts

    def workers(self) -> list[WorkerInfo]:
        """The workers that run attempts, by id."""
        return self._call("GET", "/workers", None, WorkersAnswer).workers

    def add_rewards(self, rollout_id: str, attempt_id: str, rewards: Sequence[Reward]) -> list[Reward]:
        """Give an attempt rewards; the answer has their ids.

        With the admin key also one that has ended and counts: they win over those that it has.
        """
        path = _attempt_path(rollout_id, attempt_id)
        return self._call("POST", f"{path}/rewards", {"rewards": _named(rewards)}, RewardsAnswer).rewards

    def add_late_rewards(self, rewards_by_attempt: Mapping[tuple[str, str], Sequence[Reward]]) -> None:
        """`add_rewards` for many attempts, several at once; by (rollout id, attempt id).

        Raises the error of the first that was refused, in their order; the others may have been taken.
        """
        with ThreadPoolExecutor(_REWARDS_AT_ONCE) as threads:
            answers = [
                threads.submit(self.add_rewards, *place, rewards) for place, rewards in rewards_by_attempt.items()
            ]
        for answer in answers:
            answer.result()

    def finish(self, rollout_id: str, attempt_id: str, finish: Finish) -> Attempt:
        """End the attempt; it and its spans are durable when this returns."""
        path = _attempt_path(rollout_id, attempt_id)
        return self._call("POST", f"{path}/finish", finish, Attempt)

    def finish_many(self, endings: Sequence[Ending]) -> AttemptsAnswer:
        """`add_rewards` and `finish` of many attempts, all of them or none.

        An error names the rollout that is refused; the others may be finished without it. None of them takes calls any
        more.
        """
        named = [msgspec.structs.replace(ending, rewards=_named(ending.rewards)) for ending in endings]
        return self._call("POST", "/attempts/finish", {"attempts": named}, AttemptsAnswer)

    def add_log(self, rollout_id: str, attempt_id: str, log: Log) -> None:
        """Keep what an attempt printed, which may have ended; the first log of an attempt stays."""
        self._call("POST", f"{_attempt_path(rollout_id, attempt_id)}/log", log, Log)

    def add_logs(self, logs: Sequence[AttemptLog]) -> None:
        """`add_log` of many attempts, all of them or none."""
        self._call("POST", "/attempts/logs", {"attempts": logs}, LogsAnswer)

    # Records

    def log(self, rollout_id: str, attempt_id: str) -> Log:
        """What the attempt printed, and its traceback."""
        return self._call("GET", f"{_attempt_path(rollout_id, attempt_id)}/log", None, Log)

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        """Everything recorded in these rollouts, all attempts; unknown ids are left out."""
        by_id: dict[str, RolloutTrace] = {}
        for start in range(0, len(rollout_ids), TRACES_AT_ONCE):
            body = {"rollout_ids": rollout_ids[start : start + TRACES_AT_ONCE]}
            by_id |= self._call("POST", "/rollouts/spans", body, TracesAnswer).rollouts
        return by_id

    def publish(self, resources: Mapping[str, Mapping[str, Any]], resources_id: str | None = None) -> Resources:
        """Publish resources by name; they are the latest from now on."""
        body = {"resources": resources, "resources_id": resources_id or new_id("s")}
        msgspec.convert(body, ResourcesRequest)
        return self._call("POST", "/resources", body, Resources)

    def resources(self, resources_id: str = "latest") -> Resources:
        """The resources of this id."""
        return self._call("GET", f"/resources/{resources_id}", None, Resources)

    # Engines and weights

    def register_engine(
        self,
        model: str,
        kind: str,
        url: str | None = None,
        policy_version: int = 0,
        *,
        api_key: str | None = None,
        remote_model: str | None = None,
        adapter: bool = False,
    ) -> dict[str, Any]:
        """Tell the gateway of an engine that samples `model`, or of a chat backend (kind `openai` or `litellm`) that
        answers as it; the service knows the model as `remote_model`. With `adapter` a vLLM server has each version of
        the model as a LoRA adapter, loaded as `model@version`."""
        body = {
            "model": model,
            "kind": kind,
            "url": url,
            "policy_version": policy_version,
            "api_key": api_key,
            "remote_model": remote_model,
            "adapter": adapter,
        }
        return self._call("POST", "/engines", body, dict[str, Any])

    def remove_engine(self, engine_id: str) -> dict[str, Any]:
        """Take an engine out: it gets no new calls, and those in flight end. Raises NotFound."""
        return self._call("DELETE", f"/engines/{engine_id}", None, dict[str, Any])

    def engines(self) -> list[dict[str, Any]]:
        """The registered engines."""
        answer = self._call("GET", "/engines", None, dict[str, list[dict[str, Any]]])
        return answer["engines"]

    def pause(
        self,
        model: str | None = None,
        *,
        mode: str = "drain",
        deadline_seconds: float = 30,
        lease_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Park the requests of a model (of all, without one); the gateway's state on return."""
        body = {
            "model": model,
            "mode": mode,
            "deadline_seconds": deadline_seconds,
            "lease_seconds": lease_seconds,
        }
        return self._call("POST", "/pause", body, dict[str, Any], deadline_seconds)

    def resume(
        self,
        model: str | None = None,
        policy_version: int | None = None,
        *,
        outdated: Callable[[], Sequence[str]] = tuple,
    ) -> dict[str, Any]:
        """Let parked requests go on, under `policy_version` where one is given; engines at the URLs that
        `outdated` gives do not have these weights, and take no calls until they have."""
        body = {"model": model, "policy_version": policy_version, "outdated": list(outdated())}
        return self._call("POST", "/resume", body, dict[str, Any])

    def state(self) -> dict[str, Any]:
        """The gateway's state."""
        return self._call("GET", "/state", None, dict[str, Any])

    def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        """What engines handed over for the attempts at these rollouts, by attempt id, as far as gateways remember."""
        body = {"rollout_ids": list(rollout_ids)}
        return self._call("POST", "/state/tokens", body, dict[str, dict[str, AttemptTokens]])["attempts"]

    # Runs

    def server(self) -> dict[str, Any]:
        """Version and model of the server, and how it writes chats."""
        return self._call("GET", "/server", None, dict[str, Any])

    def begin_run(
        self,
        run_id: str,
        model: str,
        lease_seconds: float,
        more_models: Sequence[str] = (),
        sessions: Sequence[str] = (),
    ) -> int:
        """Attach a run whose engines sample `model` (and `more_models`, of other policies of it); when it began, in
        nanoseconds since the epoch.

        Attempts at rollouts that end with `.` and the run's id are lost where they run, and wait where they are queued.
        `sessions`: of the run's folder, the one that begins last. Raises Conflict where the run has gone on here from
        another copy of it.
        """
        body: dict[str, Any] = {"model": model, "lease_seconds": lease_seconds, "more_models": list(more_models)}
        body["sessions"] = list(sessions)
        return int(self._call("POST", f"/runs/{run_id}/begin", body, dict[str, Any])["began_ns"])

    def renew_run(self, run_id: str, session: str | None = None) -> None:
        """Say that a run's trainer lives. Raises Conflict where the run is not attached any more, or is by another
        session."""
        self._call("POST", f"/runs/{run_id}/heartbeat", {"session": session}, dict[str, Any])

    def end_run(self, run_id: str, session: str | None = None) -> None:
        """Detach a run: its engines are out, and nothing of it is handed to runners. Raises Conflict where it is
        attached by another session."""
        self._call("POST", f"/runs/{run_id}/end", {"session": session}, dict[str, Any])

    def _call(self, method: str, path: str, body: Any, answer: type[T], wait_seconds: float = 0) -> T:
        response = self._patiently(method, path, body, wait_seconds)
        if response.status >= 400:
            raise _refusal(method, self._root + path, response)
        try:
            if response.headers.get("content-type") == "application/msgpack":
                return msgspec.msgpack.decode(response.data, type=answer)
            return msgspec.json.decode(response.data, type=answer)
        except msgspec.DecodeError as error:
            raise ForeignAnswer(
                f"{_start(response)} is no answer of a lightning-rl server of this version: {error} "
                f"({response.status} at {method} {self._root + path})"
            ) from error

    def _patiently(self, method: str, path: str, body: Any, wait_seconds: float) -> urllib3.BaseHTTPResponse:
        """The answer; while the store cannot be written, that of the last try."""
        began, pause = time.monotonic(), 0.1
        while True:
            response = self._request(method, path, body, wait_seconds)
            if response.status != _UNWRITABLE or time.monotonic() - began >= self.patience_seconds:
                return response
            if self._closed.wait(pause):
                return response
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _request(self, method: str, path: str, body: Any, wait_seconds: float) -> urllib3.BaseHTTPResponse:
        content = body if body is None or isinstance(body, bytes) else body_of(body)
        try:
            return self._pool.request(
                method,
                self._root + path,
                body=content,
                headers=self._headers | {"accept": "application/msgpack"},
                timeout=urllib3.Timeout(connect=5, read=wait_seconds + _ANSWER_SECONDS),
            )
        except urllib3.exceptions.HTTPError as error:
            cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else error
            raise Unreachable(f"{method} {self._root + path}: {cause}") from error


class _WhileOpen(urllib3.Retry):
    """Tries again until the client is closed, whose threads a program waits for as it ends."""

    def __init__(self, *arguments: Any, closed: threading.Event, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._closed = closed

    def new(self, **changed: Any) -> Self:
        return super().new(closed=self._closed, **changed)

    def is_exhausted(self) -> bool:
        return self._closed.is_set() or super().is_exhausted()


def _refusal(method: str, url: str, response: urllib3.BaseHTTPResponse) -> Exception:
    try:
        text = msgspec.json.decode(response.data)["error"]["message"]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):  # a relay's, or of another program
        text = f"{_start(response)} is no answer of a lightning-rl server"
    kind = _ERRORS.get(response.status, Unreachable)
    return kind(f"{text} ({response.status} at {method} {url})")


def _start(response: urllib3.BaseHTTPResponse) -> str:
    """The answer's first words, for an error; a page of HTML has thousands."""
    words = " ".join(response.data[:2000].decode(errors="replace").split())
    return repr(words if len(words) <= _SHOWN else f"{words[:_SHOWN]}...")


def _attempt_path(rollout_id: str, attempt_id: str) -> str:
    return f"/rollouts/{rollout_id}/attempts/{attempt_id}"


def _named(rewards: Sequence[Reward]) -> list[Reward]:
    return [msgspec.structs.replace(reward, reward_id=reward.reward_id or new_id("w")) for reward in rewards]
