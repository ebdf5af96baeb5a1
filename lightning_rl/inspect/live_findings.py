"""What `lightning-rl doctor` knows, said while the run happens: each finding once, and again where it has become worse.

Metrics and the records of the newest steps are looked at after every step, in a long run after each 1% more of them.
The store, which takes longer the longer the run is, is looked at after the 4th, 8th, 16th, ... step, so that all looks
together cost no more than a few of the last one. The store of a server elsewhere, which may be slow or gone, is read
behind the training, and told of after a later step.
"""

import logging
import queue
import shlex
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lightning_rl.config.schema import Config
from lightning_rl.errors import Explained
from lightning_rl.inspect import recorded
from lightning_rl.inspect.doctor import DEAD_STEPS, SEVERITIES, Finding, diagnose
from lightning_rl.inspect.run_stats import RECENT, Evidence, gather, is_of_training, of_run
from lightning_rl.trajectories.step_record import StepRecord

_FIRST_LOOK = 4  # steps, until the store is looked at
_EACH = 128  # steps, after each of which metrics are looked at; later after each further 1/128 of them
_TOLD = SEVERITIES[:-1]  # what may be worth a look is left to who asks
# Told where they happen, with what the agent said (`problems.Problems`).
_KNOWN = ("agent_error_", "no_reward", "lost_rewards", "rollouts_without_calls")
_log = logging.getLogger(__name__)


class Findings:
    """Warns of what keeps the run in `run_dir` from learning; `earlier` are the records of a run that goes on, by
    policy ("" where it is the only one)."""

    def __init__(self, run_dir: Path, config: Config, earlier: Mapping[str, Iterable[StepRecord]]) -> None:
        self._run_dir = run_dir
        self._config = config
        self._steps = {policy: deque(records, maxlen=RECENT) for policy, records in earlier.items()}
        self._reported: dict[tuple[str, str | None], int] = {}  # by name and policy, how bad it was
        self._read: queue.SimpleQueue[Evidence] = queue.SimpleQueue()  # behind the training
        self._reading = threading.Lock()

    def add(self, record: StepRecord, policy: str) -> None:
        """A step has made this of the rollouts of a policy."""
        self._steps.setdefault(policy, deque(maxlen=RECENT)).append(record)

    def look(self, history: Sequence[Mapping[str, float]]) -> None:
        """Warn of what is new; `history` are the metrics of the run so far."""
        trained = [row for row in history if is_of_training(row)]
        if len(trained) < DEAD_STEPS or len(trained) % max(len(trained) // _EACH, 1):
            return
        rows = [dict(row) for row in trained]
        for finding in diagnose(self._evidence(rows)).findings:
            how_bad = SEVERITIES.index(finding.severity)
            key, is_known = (finding.name, finding.policy), finding.name.startswith(_KNOWN)
            if finding.severity in _TOLD and not is_known and how_bad < self._reported.get(key, len(SEVERITIES)):
                self._reported[key] = how_bad
                self._tell(int(rows[-1]["step"]), finding)

    def _evidence(self, rows: list[dict[str, float]]) -> Evidence:
        if len(rows) >= _FIRST_LOOK and len(rows).bit_count() == 1:
            if not recorded.is_attached(self._run_dir):
                self._look_at_store()
            elif self._reading.acquire(blocking=False):  # else the last look still goes on
                threading.Thread(target=self._look_behind, name="the doctor's look", daemon=True).start()
        if not self._read.empty():
            return self._read.get()
        return of_run(self._run_dir, self._config, rows, {policy: [*steps] for policy, steps in self._steps.items()})

    def _look_behind(self) -> None:
        try:
            self._look_at_store()
        finally:
            self._reading.release()

    def _look_at_store(self) -> None:
        try:
            self._read.put(gather(self._run_dir))
        except Explained as error:
            _log.info("the store is not looked at: %s", error)

    def _tell(self, step: int, finding: Finding) -> None:
        _log.warning(
            "step %d: %s%s: %s. What to do: %s; more with `lightning-rl doctor %s`",
            step,
            "" if finding.policy is None else f"policy {finding.policy}: ",
            finding.severity,
            finding.told,
            finding.advice,
            shlex.quote(str(self._run_dir)),
        )
