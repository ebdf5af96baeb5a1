"""What went wrong in rollouts, told to the user: each kind of problem once, with how often and what to do.

Failures are data and the run goes on, so nobody would see them in a reward of 0; a warning says them.
"""

import difflib
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from lightning_rl.errors import Explained
from lightning_rl.trajectories.termination import refused_prompt
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters.credit import FINAL


class AllFailed(Explained, RuntimeError):
    """The agent failed in every rollout of a step, or no rollout had a reward, or none a call, or others had theirs."""

    comes_again = True  # the rollouts are stored


class InfrastructureFailed(Explained, RuntimeError):
    """No rollout of a step could be made: what agents need, as the policy's engine, was not there."""


_NO_REWARD = (
    "return a number, or call emit_reward; where a loop of the library runs, name a function that judges it: "
    "reward.custom_reward_function.path"
)
_CALLS_OF_OTHERS = (
    "made no call, and others have at least as many conversations beyond their first: where the agent keeps a client "
    "from one rollout to another (a global one, a cached one), it calls as that other, and what is sampled so is "
    "trained with that other's reward. Make a client in each rollout; those of llm.openai() share connections"
)
_NEARLY = 0.9  # of the letters of a name
_MANY = 4  # rollouts: fewer without a call are no sign
_LONGEST_MESSAGE, _LONGEST_TRACEBACK = 500, 4000  # characters that are shown
_log = logging.getLogger(__name__)


class Problems:
    """Warns of the rollouts of a run in `run_dir`, where the runners' logs are. `rewards_count`: whether it learns from
    rewards. `summed` are the names that `algorithm.credit.weights` adds up, where it does."""

    def __init__(
        self, run_dir: Path, *, max_tokens: int | None = None, rewards_count: bool = True, summed: Collection[str] = ()
    ) -> None:
        self._run_dir = run_dir
        self._max_tokens = max_tokens
        self._rewards_count = rewards_count
        self._summed = summed
        self._warned: set[str] = set()

    def report(self, when: str, trajectories: Sequence[Trajectory]) -> None:
        """Warn of what is new among these rollouts; `when` names the step. Nothing is wrong with cancelled ones."""
        trajectories = [one for one in trajectories if not one.cancelled]
        for kind, (count, text) in self._problems(trajectories).items():
            if kind not in self._warned:
                self._warned.add(kind)
                _log.warning("%s: %d of %d rollouts %s", when, count, len(trajectories), text)

    def report_missing_reward(self, key: str, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Warn where a key names a reward that none of the rollouts has whose agents did not fail."""
        successes = [one for one in trajectories if not one.agent_failed and not one.cancelled]
        there = {named for trajectory in successes for named in trajectory.rewards.named}
        if name == FINAL or name in there or f"{key}={name}" in self._warned or not successes:
            return
        self._warned.add(f"{key}={name}")
        _log.warning(
            "%s=%s: none of %d rollouts has a reward of that name; there are %s",
            key,
            name,
            len(successes),
            ", ".join(sorted(there | {FINAL})),
        )

    def report_misspelt_policy(self, policy: str, others: Collection[str], trajectories: Sequence[Trajectory]) -> None:
        """Warn where no rollout has a reward of the policy's name, and some have one whose name is nearly that, and is
        none of the `others`'."""
        there = {named for trajectory in trajectories for named in trajectory.rewards.named}
        near = [name for name in sorted(there.difference(others)) if _misspelt(name, policy)]
        if policy in there or not near or policy in self._warned:
            return
        self._warned.add(policy)
        _log.warning(
            "there is a reward %r, and no policy of that name: %r has no reward of its own, and counts with the final "
            "one. emit_reward(value, policy=%r) gives it one",
            near[0],
            policy,
            policy,
        )

    def check(self, when: str, trajectories: Sequence[Trajectory]) -> None:
        """Raises AllFailed where nothing can be learned from any of these rollouts: the agent failed (with the first
        traceback), gave no reward, or made no call; and where most calls seem to be recorded with other rollouts.
        Raises InfrastructureFailed where that failed on every attempt of all. Cancelled ones say nothing of these."""
        trajectories = [one for one in trajectories if not one.cancelled]
        mixed_up = _maybe_called_as_others(trajectories)
        if mixed_up >= max(_MANY, len(trajectories) / 2):
            raise AllFailed(
                f"{when}: {mixed_up} of {len(trajectories)} rollouts {_CALLS_OF_OTHERS}. Mend the agent and begin a "
                "new run; if it is meant so, set trainer.all_failed=go_on"
            )
        if trajectories and all(trajectory.error is None for trajectory in trajectories):
            self._check_successes(when, trajectories)
        errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
        lost = sum(error.infrastructure for error in errors)
        if lost and lost == len(trajectories):
            last = errors[-1]
            message = _shown(last.message.strip() or "(no message)", _LONGEST_MESSAGE)
            raise InfrastructureFailed(
                f"{when}: infrastructure failed on every attempt of all {len(errors)} rollouts, last in "
                f"{trajectories[-1].rollout_id}:\n\n{last.type}: {message}\n\nMend it, and resume the run, which "
                "samples them anew; to go on without them, set trainer.all_failed=go_on. "
                f"All {self._logs}"
            )
        unrewarded = self._rewards_count and all(trajectory.agent_failed for trajectory in trajectories)
        if lost or not errors or (len(errors) < len(trajectories) and not unrewarded):
            return
        first = next(trajectory for trajectory in trajectories if trajectory.error is not None)
        text = _shown(errors[0].traceback.rstrip() or f"{errors[0].type}: {errors[0].message}", _LONGEST_TRACEBACK)
        many = f"all {len(errors)} rollouts"
        if len(errors) < len(trajectories):
            many = f"{len(errors)} of {len(trajectories)} rollouts, and gave no reward in the others"
        raise AllFailed(
            f"{when}: the agent failed in {many}, first in {first.rollout_id}:\n\n{text}"
            "\n\nMend the agent and begin a new run; to go on with failed rollouts, set trainer.all_failed=go_on. "
            f"All {self._logs}"
        )

    def _check_successes(self, when: str, trajectories: Sequence[Trajectory]) -> None:
        if self._rewards_count and all(trajectory.agent_failed for trajectory in trajectories):
            text = self._no_reward(trajectories)
        elif not any(trajectory.calls for trajectory in trajectories):
            text = f"made no call to the model: {self._no_call(trajectories[0])}"
        else:
            return
        raise AllFailed(
            f"{when}: all {len(trajectories)} rollouts {text}\n\nMend the agent and begin a new run; to go on without "
            "them, set trainer.all_failed=go_on"
        )

    def _no_reward(self, trajectories: Sequence[Trajectory]) -> str:
        names = {name for trajectory in trajectories for name in trajectory.rewards.named}
        if not self._summed or not names:
            return f"ended without a reward: {_NO_REWARD}"
        return (
            f"gave none of the rewards that algorithm.credit.weights adds up ({', '.join(sorted(self._summed))}); "
            f"given were {', '.join(sorted(names))}: give those that it names, or name these"
        )

    def _no_call(self, trajectory: Trajectory) -> str:
        if (refused := refused_prompt(trajectory.ended_by)) is not None:
            return refused
        printed = f"; what it printed last: {trajectory.printed}" if trajectory.printed else ""
        log = self._run_dir / "server.log"
        return (
            "the agent must use llm.base_url and llm.api_key (calls that were refused, and why, are in "
            f"{log if log.exists() else 'server.log, where the server was started'}{printed})"
        )

    def _problems(self, trajectories: Sequence[Trajectory]) -> dict[str, tuple[int, str]]:
        counts: Counter[str] = Counter()
        texts: dict[str, str] = {}
        for trajectory in trajectories:
            for kind, text in self._of(trajectory):
                counts[kind] += 1
                texts.setdefault(kind, text)
        if self._rewards_count and (problem := _failing_pays(trajectories)):
            counts["failing pays"], texts["failing pays"] = problem
        if without := _maybe_called_as_others(trajectories):
            counts["calls of others"], texts["calls of others"] = without, _CALLS_OF_OTHERS
        return {kind: (count, texts[kind]) for kind, count in counts.items()}

    @property
    def _logs(self) -> str:
        """Where the tracebacks of agents are."""
        names = "runner-*.log"
        here = any(self._run_dir.glob(names))
        return f"tracebacks are in {self._run_dir / names if here else names + ' where the runners run'}"

    def _of(self, trajectory: Trajectory) -> list[tuple[str, str]]:
        problems = []
        logs = self._logs
        if trajectory.error is not None:
            message = _shown(trajectory.error.message.strip() or "(no message)", _LONGEST_MESSAGE)
            error = f"{trajectory.error.type}: {message}"
            if trajectory.error.infrastructure:
                text = f"were left out, since infrastructure failed on every attempt; the last error: {error} ({logs})"
            else:
                text = f"failed in the agent and count as algorithm.agent_failure says: {error} ({logs})"
            problems.append((re.sub(r"[0-9a-f]{8,}|\d+", "#", error), text))
        elif trajectory.agent_failed and self._rewards_count:
            problems.append(("no reward", self._no_reward([trajectory])))
        if trajectory.lost_rewards:
            text = "gave rewards to calls that they did not make, which are lost: pass the id of the answer as call_id"
            problems.append(("lost rewards", text))
        if not trajectory.calls and trajectory.error is None:
            refused = refused_prompt(trajectory.ended_by)
            text = f"made no call to the model: {self._no_call(trajectory)}; these train nothing"
            problems.append((f"no call: {refused}", text))
        if any(row.excluded == "overlong" for row in trajectory.rows):
            text = (
                f"have rows of more than {self._max_tokens} tokens, which are not trained: raise "
                "data.max_prompt_length or data.max_response_length, keep conversations shorter, or set data.overlong"
            )
            problems.append(("overlong", text))
        return problems


def _misspelt(name: str, meant: str) -> bool:
    """Whether letters are exchanged, or hardly one is another; not a word with an ending."""
    one, other = name.casefold(), meant.casefold()
    if one == other or sorted(one) == sorted(other):
        return True
    ending = one.startswith(other) or other.startswith(one)
    return not ending and difflib.SequenceMatcher(None, one, other).ratio() >= _NEARLY


def _failing_pays(trajectories: Sequence[Trajectory]) -> tuple[int, str] | None:
    """How many rollouts failed, and what is said of it where that is worth more than to end well."""
    failed = [t.reward for t in trajectories if t.agent_failed and t.reward is not None]
    well = [t.reward for t in trajectories if not t.agent_failed and t.reward is not None]
    if not failed or not well or (mean := math.fsum(well) / len(well)) >= min(failed):
        return None
    return len(failed), (
        f"failed and count as {min(failed):g}, more than the mean of those that ended well ({mean:.3g}): the model "
        "learns to make its agent fail. Set algorithm.agent_failure to less than the worst reward, or to exclude"
    )


def _maybe_called_as_others(trajectories: Sequence[Trajectory]) -> int:
    """How many rollouts made no call that may be among those of others; 0 where these have too few for that."""
    silent = (t for t in trajectories if t.error is None and not t.calls and not t.other_calls)
    without = sum(refused_prompt(trajectory.ended_by) is None for trajectory in silent)
    begun = (sum(node.parent is None for node in t.forest.nodes.values()) for t in trajectories)
    return without if without <= sum(max(number - 1, 0) for number in begun) else 0


def _shown(text: str, most: int) -> str:
    """Of a long text the beginning and the end, which say what was done and what went wrong."""
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[: most // 2]} [... {left_out} characters ...] {text[-most // 2 :]}"
