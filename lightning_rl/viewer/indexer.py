"""The thread that keeps a run's index up to date: rollouts first, so that lists show them, then steps, then words.

Invariant: what the run's folder says wrong (a newer store, a damaged record) is kept as words for the page and tried
again; it never ends the viewer.
"""

import logging
import sqlite3
import threading
from pathlib import Path

import msgspec
import sqlalchemy as sa

from lightning_rl.errors import Explained
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.store.errors import StoreError
from lightning_rl.trajectories import step_record
from lightning_rl.viewer.index import Index
from lightning_rl.viewer.source import Source

_PAUSE_SECONDS = 1.0  # between two looks at a run
_CALLS_AT_ONCE = 500
_TASKS_AT_ONCE = 2000
_DAMAGED = (sqlite3.Error, sa.exc.SQLAlchemyError, msgspec.MsgspecError, ValueError, KeyError, TypeError)
_log = logging.getLogger(__name__)


class Indexer:
    """Fills `index` from `source`, and from the step records in `run_dir` where there is one, until `close`."""

    def __init__(self, index: Index, source: Source, run_dir: Path | None) -> None:
        self.index = index
        self.problem: str | None = None  # why the run cannot be read, in words
        self.words = 0.0  # the share of calls that searches find
        self.begun = threading.Event()  # some rollouts are listed, or why none are is known
        self.ready = threading.Event()  # all are
        self.stepped = threading.Event()  # and what steps made of them
        self._source = source
        self._run_dir = run_dir
        self._stop = threading.Event()
        self._untold: list[int] = []  # rollouts whose tasks, or errors, no search finds yet
        self._thread = threading.Thread(target=self._work, name="viewer-index", daemon=True)

    def start(self) -> None:
        """Begin to look at the run."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._source.close()

    def look(self) -> None:
        """Enter what is new in the run. Raises what reading it raises."""
        records = self._new_steps()  # before the rollouts, so that each of a record's is entered
        with self._source.moment():
            for placed in self._source.arrived():
                self.index.put(placed)
                self._untold += [position for position, _ in placed]
                self.begun.set()
                if self._stop.is_set():
                    return
            for placed in self._source.changed(self.index.open_rollouts()):
                self.index.put(placed)
                self._untold += [position for position, rollout in placed if rollout.error is not None]
        self.begun.set()
        self.ready.set()
        self.problem = self._enter_steps(records)
        self.stepped.set()
        self._enter_words()

    def read(self, rollout_id: str) -> RolloutTrace:
        """All that was recorded in a rollout. Raises NotRecorded, and what reading the run raises."""
        return self._source.trace(rollout_id)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except (Explained, StoreError, OSError) as error:
                self.problem = str(error)
            except _DAMAGED as error:
                _log.warning("the run cannot be read", exc_info=True)
                self.problem = f"the run cannot be read: {type(error).__name__}: {error}"
            self.begun.set()
            self._stop.wait(_PAUSE_SECONDS)

    def _new_steps(self) -> list[tuple[Path, int]]:
        """The records that are to be entered; those of steps that a resumed run does anew are out."""
        if self._run_dir is None:
            return []
        steps, files = self.index.steps(), step_record.files(self._run_dir)
        if gone := steps.keys() - {int(file.stem) for file, _ in files}:
            self.index.drop_steps(gone)
        return [(file, at) for file, at in files if steps.get(int(file.stem)) != at]

    def _enter_steps(self, records: list[tuple[Path, int]]) -> str | None:
        """Enter step records; why the last that cannot be read cannot."""
        problem = None
        for file, written in records:
            if self._stop.is_set():
                break
            try:
                self.index.put_step(step_record.whole(file), written)
            except step_record.UnreadableRecord as error:
                problem = str(error)
        return problem

    def _enter_words(self) -> None:
        while not self._stop.is_set():
            tasks, self._untold = self._untold[:_TASKS_AT_ONCE], self._untold[_TASKS_AT_ONCE:]
            if tasks:
                self.index.put_tasks(tasks)
            with self._source.moment():  # a short one: a run that goes on cannot tidy its log behind a reader
                calls, share = self._source.calls(_CALLS_AT_ONCE)
            self.index.put_calls(calls)
            self.words = share if not self._untold else min(share, 0.99)
            if share >= 1.0 and not self._untold:
                return
            self._stop.wait(0.002)  # requests for pages come first
