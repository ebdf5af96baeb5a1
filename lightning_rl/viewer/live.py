"""What happens in a run right now: who waits for what, what is open, how its engines are, and what `doctor` says.

A server is asked with the admin key of its run's folder or of the environment; what comes back holds no key.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.control_plane.several_servers import together
from lightning_rl.errors import Explained
from lightning_rl.inspect.doctor import diagnose
from lightning_rl.inspect.rollout_source import PagedStore
from lightning_rl.inspect.run_stats import Evidence
from lightning_rl.store.errors import StoreError
from lightning_rl.viewer.index import Index
from lightning_rl.viewer.run_folder import KEY_FILE, URL_FILE

_OPEN = 50  # rollouts that are listed
_REST = 20  # looks of the doctor take at most a share of 1 / _REST of the time


def server_of(run_dir: Path, former: PagedStore | None) -> PagedStore | None:
    """The server of a run that is alive, by the key in its folder; None where there is no such key. `former` is closed
    where it is another one: a run that goes on has another server."""
    file, key = run_dir / URL_FILE, run_dir / KEY_FILE
    url = file.read_text(encoding="utf-8").strip().rstrip("/") if file.is_file() and key.is_file() else None
    if former is not None and former.url == url:
        return former
    if former is not None:
        former.close()
    return None if url is None else PagedStore(url, key.read_text(encoding="utf-8").strip())


def at_servers(stores: Sequence[PagedStore]) -> dict[str, Any]:
    """What the servers of a run say of themselves, together; `problem` where one does not answer."""
    try:
        state = together([store.state() for store in stores])
        engines = together([{each["engine_id"]: each for each in store.engines()} for store in stores])
        workers = [worker for store in stores for worker in store.workers()]
    except (StoreError, OSError) as error:
        return {"problem": f"the server does not answer: {error}"}
    models = state.get("models", {})
    return {
        "engines": [_engine(each) for each in engines.values()],
        "models": models,
        "workers": [{"worker": each.worker_id, "attempts": len(each.attempts)} for each in workers],
        "open_attempts": state.get("open_attempts", 0),
        "in_flight": sum(model.get("in_flight") or 0 for model in models.values()),
        "counters": state.get("counters", {}),
        "records_waiting": state.get("records_waiting", 0),
        "claims_held_back": state.get("claims_held_back", 0),
        "claims_waiting": state.get("claims_waiting", 0),
        "tokens_pending": state.get("tokens_pending", 0),
    }


def _engine(engine: dict[str, Any]) -> dict[str, Any]:
    return {name: engine.get(name) for name in ("model", "kind", "url", "policy_version", "away", "in_flight")}


def open_rollouts(index: Index) -> dict[str, Any]:
    """The rollouts that are queued or run, the oldest first."""
    query = (
        "SELECT rollout_id, status, mode, step, agent, task, created, attempts FROM rollouts "
        "WHERE status IN ('queued', 'running') ORDER BY status = 'queued', position LIMIT ?"
    )
    with index.reading() as connection:
        counted = dict(map(tuple, connection.execute("SELECT status, count(*) FROM rollouts GROUP BY 1")))
        return {"counts": counted, "open": [dict(row) for row in connection.execute(query, (_OPEN,))]}


def waiting(
    server: dict[str, Any] | None, counts: dict[str, int], state: str, *, trains: bool = True
) -> list[dict[str, str]]:
    """Who waits, and for what, in words; the nearest cause first. Nobody `trains` where a server runs alone."""
    if state != "running":
        return []
    causes: list[dict[str, str]] = []
    server_state = server or {}
    for name, model in server_state.get("models", {}).items():
        if model.get("paused"):
            causes.append(
                {"who": f"calls of {name}", "what": "new weights: the model is paused while they are handed over"}
            )
        if model.get("waiting"):
            causes.append({"who": f"{model['waiting']} calls", "what": f"a place at the engines of {name}"})
    for engine in server_state.get("engines", ()):
        if engine["away"]:
            causes.append(
                {"who": f"engine {engine['url'] or engine['kind']}", "what": f"being well again: {engine['away']}"}
            )
    if server_state.get("claims_held_back"):
        causes.append(
            {
                "who": f"{server_state['claims_held_back']} slots of runners",
                "what": "engines that bear one more rollout",
            }
        )
    running, queued = counts.get("running", 0), counts.get("queued", 0)
    if running:
        causes.append(
            {
                "who": "the trainer" if trains else "whoever queued them",
                "what": f"{running} rollouts that run" + f", {queued} queued" * bool(queued),
            }
        )
    elif queued:
        causes.append({"who": f"{queued} rollouts", "what": "a runner that takes them"})
    elif server_state.get("claims_waiting"):
        cause = "the trainer: it computes an update, or saves" if trains else "rollouts: none is queued"
        causes.append({"who": f"{server_state['claims_waiting']} runners", "what": cause})
    if server_state.get("records_waiting"):
        causes.append(
            {"who": f"{server_state['records_waiting']} records", "what": "the store, on their way from the journal"}
        )
    return causes


class Doctor:
    """The doctor's findings on a run, looked for again as the run goes on; never twice at once.

    A look reads the whole store, so the next one comes when enough time has passed that all looks together stay cheap.

    Args:
        evidence: gathers what the findings are of.
        now: what is another thing once there may be more to find.
        ended: whether the run has: its last look comes at once.
    """

    def __init__(
        self, evidence: Callable[[], Evidence], now: Callable[[], Any], ended: Callable[[], bool] = lambda: False
    ) -> None:
        self._evidence, self._now, self._ended = evidence, now, ended
        self._lock = threading.Lock()
        self._next = 0.0
        self._looked: Any = None
        self._tried: Any = None
        self._answer: dict[str, Any] = {"findings": [], "looked_at": {}, "pending": True}

    def findings(self, *, wait: bool = False) -> dict[str, Any]:
        """What is known now; a new look begins behind it where one is due. `wait` takes it at once."""
        if wait:
            with self._lock:
                self._look()
        elif (time.monotonic() >= self._next or self._is_the_last()) and self._lock.acquire(blocking=False):
            threading.Thread(target=self._look_behind, name="viewer-doctor", daemon=True).start()
        return self._answer

    def _is_the_last(self) -> bool:
        return self._tried is not None and self._ended() and self._now() != self._tried

    def _look_behind(self) -> None:
        try:
            self._look()
        finally:
            self._lock.release()

    def _look(self) -> None:
        now = self._now()
        if now == self._looked:
            return
        self._tried, began = now, time.monotonic()
        try:
            diagnosis = diagnose(self._evidence())
            self._answer = {"findings": msgspec.to_builtins(diagnosis.findings), "looked_at": diagnosis.looked_at}
            self._looked = now
        except (Explained, StoreError, OSError) as error:
            self._answer = {"findings": [], "looked_at": {}, "problem": str(error)}
        self._next = time.monotonic() + _REST * (time.monotonic() - began)
