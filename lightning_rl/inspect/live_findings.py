"""What `lightning-rl doctor` knows, said while the run happens: each finding once, and again where it has become worse.

Metrics and the records of the newest steps are looked at after every step; the store, which takes longer the longer the
run is, after the 4th, 8th, 16th, ... of them, so that all looks together cost no more than a few of the last one.
"""

import logging
import shlex
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lightning_rl.config.schema import Config
from lightning_rl.errors import Explained
from lightning_rl.inspect.doctor import DEAD_STEPS, SEVERITIES, Finding, diagnose
from lightning_rl.inspect.run_stats import RECENT, Evidence, gather, settings_of
from lightning_rl.trajectories.step_record import StepRecord

_FIRST_LOOK = 4  # steps, until the store is looked at
_TOLD = SEVERITIES[:-1]  # what may be worth a look is left to who asks
# Told where they happen, with what the agent said (`problems.Problems`).
_KNOWN = ("agent_error_", "no_reward", "lost_rewards", "rollouts_without_calls")
_log = logging.getLogger(__name__)


class Findings:
    """Warns of what keeps the run in `run_dir` from learning; `earlier` are the records of a run that goes on."""

    def __init__(self, run_dir: Path, config: Config, earlier: Iterable[StepRecord] = ()) -> None:
        self._run_dir = run_dir
        self._settings = settings_of(config)
        self._steps: deque[StepRecord] = deque(earlier, maxlen=RECENT)
        self._told: dict[str, int] = {}  # by name, how bad it was

    def add(self, record: StepRecord) -> None:
        """A step has made this of its rollouts."""
        self._steps.append(record)

    def look(self, history: Sequence[Mapping[str, float]]) -> None:
        """Warn of what is new; `history` are the metrics of the run so far."""
        rows = [dict(row) for row in history if "critic/score/mean" in row]
        if len(rows) < DEAD_STEPS:
            return
        for finding in diagnose(self._evidence(rows)).findings:
            how_bad = SEVERITIES.index(finding.severity)
            known = finding.name.startswith(_KNOWN)
            if finding.severity in _TOLD and not known and how_bad < self._told.get(finding.name, len(SEVERITIES)):
                self._told[finding.name] = how_bad
                self._tell(int(rows[-1]["step"]), finding)

    def _evidence(self, rows: list[dict[str, float]]) -> Evidence:
        looks_at_store = len(rows) >= _FIRST_LOOK and len(rows).bit_count() == 1
        if looks_at_store:
            try:
                return gather(self._run_dir)
            except Explained as error:
                _log.info("the store is not looked at: %s", error)
        steps = [*self._steps]
        return Evidence(run_dir=str(self._run_dir), metrics=rows, steps=steps, settings=self._settings, trains=True)

    def _tell(self, step: int, finding: Finding) -> None:
        _log.warning(
            "step %d: %s: %s. What to do: %s; more with `lightning-rl doctor %s`",
            step,
            finding.severity,
            finding.told,
            finding.advice,
            shlex.quote(str(self._run_dir)),
        )
