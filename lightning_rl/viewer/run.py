"""A run that is looked at: every question of the page by its path, answered with JSON-able values.

Invariant: page, report and notebook's cell ask the same paths, so what one shows the others show.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.config.schema import TrainConfig
from lightning_rl.errors import Explained
from lightning_rl.files import newest_checkpoints
from lightning_rl.inspect import folder
from lightning_rl.inspect.recorded import RUN_ID, STORE, NotRecorded
from lightning_rl.inspect.rollout_source import PagedStore
from lightning_rl.inspect.run_stats import Evidence, gather, gather_at
from lightning_rl.inspect.trained import TrainingRecord
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.telemetry import made_with
from lightning_rl.viewer import live, rollout_view, run_folder, search
from lightning_rl.viewer.index import Index
from lightning_rl.viewer.indexer import Indexer
from lightning_rl.viewer.source import FolderSource, ServerSource, ServerSources, Source

Query = Mapping[str, str]
_TRACES = 32  # rollouts that are kept read, for the calls that are asked next
_FIRST_SECONDS = 2.0  # that an answer waits for the first rollouts of a run
_OF_THE_FOLDER = ("summary", "metrics", "config", "doctor")  # what needs no index
_OF_ALL = ("tasks", "groups")  # what compares rollouts of the whole run
_CURVES = (
    "critic/score/mean", "val/reward", "tune/reward", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac",
    "actor/grad_norm", "response_length/mean", "num_turns/mean", "training/rollout_probs_diff_mean",
    "training/staleness/mean", "perf/tokens_per_s", "timing_s/step",
)  # fmt: skip


class ViewedRun:
    """One run folder, or a server, and its index. `start` begins to read it, `close` ends that.

    Args:
        run_dir: the run's folder; None where there is only a server.
        stores: the servers that have the run's rollouts; none: the folder's own store has them.
        name: what the page calls it.
    """

    def __init__(self, run_dir: Path | None, stores: Sequence[PagedStore] = (), name: str | None = None) -> None:
        self.run_dir = run_dir
        self.name = name or (run_dir.name if run_dir is not None else "server")
        self._stores = stores
        self._index: Index | None = None
        self._indexer: Indexer | None = None
        self._doctor = live.Doctor(self._evidence, self._how_far, lambda: self._state() != "running")
        self._trace = functools.lru_cache(_TRACES)(lambda rollout_id, version: self._read_trace(rollout_id))
        self._server: PagedStore | None = None  # of a run that is alive
        self._starting = threading.Lock()
        self._paths: dict[str, Callable[[Query], Any]] = {
            "summary": lambda _: self.summary(),
            "metrics": self.metrics,
            "config": lambda _: {"config": self.settings(), "made_with": self._made_with()},
            "now": lambda _: self.now(),
            "doctor": lambda _: self._doctor.findings(),
            "choices": lambda _: search.choices(self.index),
            "rollouts": self.rollouts,
            "groups": lambda query: search.groups(self.index, query),
            "tasks": lambda query: search.tasks(self.index, query),
        }

    @property
    def has_rollouts(self) -> bool:
        """Whether there is a store, of the folder's or a server's, that has its rollouts."""
        return bool(self._stores) or self.run_dir is None or (self.run_dir / STORE).is_file()

    @property
    def index(self) -> Index:
        """The run's index, which is begun when it is first asked for."""
        self.start()
        assert self._index is not None
        return self._index

    @property
    def indexer(self) -> Indexer:
        """What keeps the index up to date."""
        self.start()
        assert self._indexer is not None
        return self._indexer

    def start(self, *, behind: bool = True, searched: bool = True) -> None:
        """Begin to read the run: in a thread, or (`behind` false) at once and once. Without `searched` no search finds
        its words, which take most of the time to enter."""
        with self._starting:
            if self._indexer is not None:
                return
            self._index = Index(searched=searched)
            self._indexer = Indexer(self._index, self._source(), self.run_dir)
            if behind:
                self._indexer.start()
            else:
                self._indexer.look()

    def close(self) -> None:
        """Read no more, and remove the index."""
        if self._indexer is not None and self._index is not None:
            self._indexer.close()
            self._index.close()
        if self._server is not None:
            self._server.close()

    def _source(self) -> Source:
        if self._stores:
            sources = [ServerSource(store, self._run_id()) for store in self._stores]
            return sources[0] if len(sources) == 1 else ServerSources(sources)
        assert self.run_dir is not None
        return FolderSource(self.run_dir)

    def _run_id(self) -> str | None:
        file = None if self.run_dir is None else self.run_dir / RUN_ID
        return file.read_text(encoding="utf-8").strip() if file is not None and file.is_file() else None

    def _evidence(self) -> Evidence:
        if self._stores:
            return gather_at(self._stores, self._run_id(), self.run_dir)
        assert self.run_dir is not None
        return gather(self.run_dir)

    def _state(self) -> str:
        return "running" if self.run_dir is None else run_folder.state(self.run_dir)

    def _how_far(self) -> Any:
        """What is another thing once there is more of the run for the doctor to look at."""
        if self.run_dir is None:
            return self.index.version
        metrics = self.run_dir / run_folder.METRICS
        return metrics.stat().st_mtime if metrics.is_file() else 0.0

    def answer(self, path: str, query: Query) -> Any:
        """What the page asks at `path` below the run. Raises NotRecorded, WrongQuery, what reading the run raises."""
        if path not in _OF_THE_FOLDER:
            begun = self.indexer.ready if path.startswith(_OF_ALL) else self.indexer.begun
            begun.wait(_FIRST_SECONDS)
        if (handler := self._paths.get(path)) is not None:
            return handler(query)
        noun, _, rest = path.partition("/")
        match noun, rest.split("/"):
            case "rollouts", [rollout_id]:
                return self.rollout(rollout_id)
            case "rollouts", [rollout_id, "calls", attempt, number]:
                return self.call(rollout_id, attempt, number, query)
            case "rollouts", [rollout_id, "images", sha256]:
                return rollout_view.data_url(self._trace_of(rollout_id), sha256)
            case "groups", [group_id]:
                return {"rollouts": search.group(self.index, group_id)}
            case "tasks", [task_key]:
                return search.task(self.index, task_key, query)
        raise NotRecorded(f"there is nothing at {path!r}")

    def rollouts(self, query: Query) -> dict[str, Any]:
        """A page of the rollouts (`search.page`), with `problem`: why not all can be read, if so."""
        page = search.page(self.index, query)
        return page | {"problem": None if self._indexer is None else self._indexer.problem}

    def summary(self) -> dict[str, Any]:
        """The run in a line."""
        fields: dict[str, Any] = {"name": self.name, "folder": None, "state": "running", "problem": None}
        if self.run_dir is not None:
            fields |= _of_folder(self.run_dir)
        if self._indexer is not None:
            fields["problem"] = self._indexer.problem or fields["problem"]
            fields["indexed"] = self._indexer.words
            fields["listed"] = self._indexer.ready.is_set()
            fields["version"] = self.index.version
        return fields

    def metrics(self, query: Query) -> dict[str, Any]:
        """The curves of the metrics in `names` (with commas; by default the usual ones), and the names of all."""
        rows = self._rows()
        all_names = sorted({name for row in rows for name in row} - {"step", "time"})
        names = [name for name in (query.get("names") or "").split(",") if name] or _usual(all_names)
        return {"names": all_names, "series": run_folder.series(rows, names)}

    def now(self) -> dict[str, Any]:
        """What happens now."""
        state = self._state()
        rows, config = self._rows(), self.settings()
        server = None
        if self._stores:
            server = live.at_servers(self._stores)
        elif state == "running" and self.run_dir is not None:
            self._server = live.server_of(self.run_dir, self._server)
            server = None if self._server is None else live.at_servers([self._server])
        rollouts = live.open_rollouts(self.index)
        last = rows[-1] if rows else None
        return {
            "state": state,
            "checkpoint": self._checkpoint() if state == "stopped" else None,
            "step": None if last is None else int(last["step"]),
            "steps": config.get("trainer.total_training_steps"),
            "last": last,
            "account": run_folder.account(rows),
            "evaluations": [] if self.run_dir is None else run_folder.evaluations(self.run_dir),
            "server": server,
            "rollouts": rollouts,
            "waiting": live.waiting(server, rollouts["counts"], state, trains=bool(config or self._stores)),
            "doctor": self._doctor.findings(),
        }

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """One rollout laid open, with its neighbours in its group."""
        trace = self._trace_of(rollout_id)
        answer = rollout_view.rollout(trace, self.config, self._record_of(trace))
        group = search.group(self.index, trace.rollout.group_id) if trace.rollout.group_id else []
        answer["group"] = [
            {name: row[name] for name in ("rollout_id", "reward", "advantage", "status")} for row in group
        ]
        return answer

    def call(self, rollout_id: str, attempt: str, number: str, query: Query) -> dict[str, Any]:
        """One call, with its tokens from `start` on."""
        start = query.get("start") or "0"
        if not (attempt.isdecimal() and number.isdecimal() and start.isdecimal()):
            raise search.WrongQuery(f"attempt {attempt!r}, call {number!r} and start {start!r} are numbers")
        trace, place = self._trace_of(rollout_id), (int(attempt), int(number))
        return rollout_view.call(trace, place, self.config, self._record_of(trace), self.decode, int(start))

    def image(self, rollout_id: str, sha256: str) -> tuple[bytes, str]:
        """An image of a rollout, and its media type."""
        return rollout_view.image(self._trace_of(rollout_id), sha256)

    def diagnosis(self) -> dict[str, Any]:
        """What the doctor finds, looked for now."""
        return self._doctor.findings(wait=True)

    @functools.cached_property
    def config(self) -> TrainConfig | None:
        """The run's keys with their types; None where it has none, or of another release."""
        try:
            return None if self.run_dir is None else folder.config_of(self.run_dir)
        except Explained:
            return None

    @functools.cached_property
    def decode(self) -> Callable[[list[int]], str] | None:
        """What makes text of token ids; None where the model's tokenizer is not on this machine."""
        return None if self.run_dir is None else folder.decoder(self.run_dir, self.config)

    def settings(self) -> dict[str, Any]:
        """The run's keys, flat, without secrets."""
        return {} if self.run_dir is None else run_folder.config(self.run_dir)

    def _made_with(self) -> list[dict[str, Any]]:
        """What each session of the run was made with, without its command line, which may hold a key."""
        sessions = [] if self.run_dir is None else made_with.sessions(self.run_dir)
        return [msgspec.to_builtins(msgspec.structs.replace(session, command="")) for session in sessions]

    def _checkpoint(self) -> str | None:
        """The name of the one that the run would go on from, if any."""
        folders = [] if self.run_dir is None else newest_checkpoints(self.run_dir / "checkpoints", 1)
        return folders[0].name if folders else None

    def _rows(self) -> list[dict[str, float]]:
        return [] if self.run_dir is None else run_folder.metrics(self.run_dir)

    def _record_of(self, trace: RolloutTrace) -> TrainingRecord | None:
        """What a step made of the rollout: the index has it, or until it does, the step's record."""
        record = self.index.record_of(trace.rollout.rollout_id)
        if record is not None or self.run_dir is None or self.indexer.stepped.is_set():
            return record
        return folder.beside(self.run_dir, trace.rollout).record

    def _trace_of(self, rollout_id: str) -> RolloutTrace:
        open_rollouts = self.index.open_rollouts()
        if rollout_id in open_rollouts:
            return self._read_trace(rollout_id)  # it changes from one look to the next
        return self._trace(rollout_id, self.index.version)  # a late reward changes one that has ended

    def _read_trace(self, rollout_id: str) -> RolloutTrace:
        return self.indexer.read(rollout_id)


def _of_folder(run_dir: Path) -> dict[str, Any]:
    fields: dict[str, Any] = {"folder": str(run_dir), "state": run_folder.state(run_dir), "problem": None}
    try:
        rows = run_folder.metrics(run_dir)
        config = run_folder.config(run_dir)
        evaluations = run_folder.evaluations(run_dir)
    except Explained as error:
        return fields | {"problem": str(error)}
    timed = run_folder.series(rows, ["critic/score/mean", "val/reward", "perf/calls_per_s"])
    return fields | {
        "steps": int(rows[-1]["step"]) if rows else 0,
        "seconds": max((points["seconds"][-1] for points in timed.values()), default=0.0),
        "best": run_folder.best(rows),
        "account": run_folder.account(rows),
        "evaluations": evaluations,
        "written": (run_dir / run_folder.METRICS).stat().st_mtime if rows else None,
        "model": config.get("actor_rollout_ref.model.path"),
        "has_store": (run_dir / STORE).is_file(),
        "curve": timed.get("val/reward") or timed.get("critic/score/mean"),
    }


def encoded(value: Any) -> bytes:
    """JSON that a browser reads: what is no number is null, and half a character a question mark."""
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(_whole_characters(msgspec.to_builtins(value, enc_hook=str)))


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_whole_characters(each) for each in value]
    if isinstance(value, dict):
        return {_whole_characters(name): _whole_characters(inner) for name, inner in value.items()}
    return value


def _usual(names: Sequence[str]) -> list[str]:
    """The usual curves, each followed by those of the same metric of several policies."""
    return [name for curve in _CURVES for name in (curve, *(one for one in names if one.endswith(f"/{curve}")))]
