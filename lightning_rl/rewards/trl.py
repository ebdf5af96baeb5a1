"""Reward functions as TRL's `GRPOTrainer` takes them: lists of prompts and completions in, a list of numbers out.

Invariant: every rollout's final reward is the weighted sum of what the functions gave it, as TRL adds them up, and what
each of them gave stands beside it under the function's name.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from lightning_rl.processes.event_loop import AsyncAgents
from lightning_rl.rewards import FinishedRollout
from lightning_rl.rewards.checked import RewardError, finite
from lightning_rl.rewards.functions import RewardFunctionError
from lightning_rl.trajectories.conversation import text_of
from lightning_rl_adapters.credit import FINAL

_NOT_GIVEN = ("trainer_state", "log_extra", "log_metric", "environments")
_NO_COLUMNS = ("prompt", "completion", "completion_ids")  # of a task, as TRL passes none of them on


class TrlRewards:
    """TRL's `reward_funcs` and `reward_weights` as a `GroupReward`: `lrl.PPO(config, reward=TrlRewards([f, g]))`.

    Each function is called once for a group, as `f(prompts=[...], completions=[...], completion_ids=[...], **columns)`,
    where every list has one entry for each rollout. A completion is the policy's last answer:
    `[{"role": "assistant", "content": text}]`, or the text alone where the task's `prompt` is text; its ids are those
    that were sampled. A prompt is the task's; of a task without one it is what the policy was told before. The columns
    are the other entries of the tasks. What TRL tells beyond that there is not: `trainer_state`, `log_extra`,
    `log_metric`, `environments`.

    A function returns a number for each rollout; None where it does not judge one, which another has to. Sync ones are
    called in the trainer's thread, one after the other; async ones of a group run at once, on one event loop.

    Args:
        functions: one, or several.
        weights: a number for each of them; by default all count 1.

    Raises:
        RewardFunctionError: two functions have one name, there are more or fewer weights than functions, or a function
            needs what it is not given.
    """

    def __init__(
        self, functions: Callable[..., Any] | Sequence[Callable[..., Any]], *, weights: Sequence[float] | None = None
    ) -> None:
        given = [functions] if callable(functions) else list(functions)
        self.functions = {_name(function): function for function in given}
        for function in given:
            _check(function)
        if not given or len(self.functions) < len(given) or (FINAL in self.functions and len(given) > 1):
            names = ", ".join(map(_name, given)) or "none"
            raise RewardFunctionError(
                f"TRL's reward functions ({names}): give one or more, each of a name of its own, and none of several "
                f"named {FINAL!r}, since that is their sum"
            )
        self.weights = [1.0] * len(given) if weights is None else [finite(each, "a reward weight") for each in weights]
        if len(self.weights) != len(given):
            raise RewardFunctionError(
                f"{len(self.weights)} weights for {len(given)} reward functions: give one for each"
            )
        self._async = AsyncAgents()

    def __call__(self, rollouts: Sequence[FinishedRollout]) -> list[dict[str, float]]:
        """The rewards of a group's rollouts, in their order.

        Raises:
            RewardError: naming the function, for another number of rewards than of rollouts, or what is no finite
                number; naming the rollout that no function judges.
        """
        arguments = _arguments(rollouts)
        returned = [function(**_taken(function, arguments)) for function in self.functions.values()]
        if any(inspect.isawaitable(each) for each in returned):
            returned = self._async.submit(_gathered(returned)).result()
        by_function = {
            name: _numbers(each, name, rollouts) for name, each in zip(self.functions, returned, strict=True)
        }
        return [self._rewards(rollout, by_function, place) for place, rollout in enumerate(rollouts)]

    def _rewards(
        self, rollout: FinishedRollout, by_function: Mapping[str, list[float | None]], place: int
    ) -> dict[str, float]:
        values = {name: numbers[place] for name, numbers in by_function.items()}
        own = {name: value for name, value in values.items() if value is not None}
        if not own:
            raise RewardError(
                f"rollout {rollout.rollout_id}: {', '.join(self.functions)} returned None, so nothing judges it; let "
                "one return a number"
            )
        weights = dict(zip(self.functions, self.weights, strict=True))
        return own | {FINAL: math.fsum(weights[name] * value for name, value in own.items())}


async def _gathered(returned: Sequence[Any]) -> list[Any]:
    async def awaited(each: Any) -> Any:
        return await each if isinstance(each, Awaitable) else each

    return await asyncio.gather(*map(awaited, returned))


def _arguments(rollouts: Sequence[FinishedRollout]) -> dict[str, list[Any]]:
    tasks = [rollout.task if isinstance(rollout.task, Mapping) else {} for rollout in rollouts]
    names = {name for task in tasks for name in task if name not in _NO_COLUMNS}
    columns = {name: [task.get(name) for task in tasks] for name in sorted(names)}
    prompts = [task.get("prompt", _told(rollout)) for task, rollout in zip(tasks, rollouts, strict=True)]
    completions = [
        rollout.answer if isinstance(prompt, str) else [{"role": "assistant", "content": rollout.answer}]
        for prompt, rollout in zip(prompts, rollouts, strict=True)
    ]
    ids = [rollout.answer_ids for rollout in rollouts]
    return columns | {"prompts": prompts, "completions": completions, "completion_ids": ids}


def _told(rollout: FinishedRollout) -> list[dict[str, str]]:
    """What the policy was told before its last answer."""
    return [{"role": str(message.get("role")), "content": text_of(message)} for message in rollout.messages[:-1]]


def _taken(function: Callable[..., Any], arguments: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Those of the arguments that the function has names for. Raises RewardError where it needs others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some functions in C nobody can tell
        return dict(arguments)
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty and each.kind not in any_number]
    if missing := [each.name for each in needed if each.name not in arguments]:
        raise RewardError(
            f"the reward function {_name(function)} needs {missing[0]!r}, which no task has: there are "
            f"{', '.join(sorted(arguments))}"
        )
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(arguments)
    return {each.name: arguments[each.name] for each in parameters if each.name in arguments}


def _numbers(returned: Any, name: str, rollouts: Sequence[FinishedRollout]) -> list[float | None]:
    try:
        values = list(returned)
    except TypeError:
        values = None
    if values is None or len(values) != len(rollouts):
        many = type(returned).__name__ if values is None else f"{len(values)} rewards"
        raise RewardError(
            f"the reward function {name} returned {many} for {len(rollouts)} completions; return a list of as many"
        )
    return [
        None if value is None else finite(value, f"rollout {rollout.rollout_id}: the reward of {name}")
        for value, rollout in zip(values, rollouts, strict=True)
    ]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _check(function: Any) -> None:
    if not callable(function) or isinstance(function, type) or hasattr(function, "named_parameters"):
        raise RewardFunctionError(
            f"{function!r:.80} is no reward function; a reward model is reward.reward_model.model_path"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some functions in C nobody can tell
        return
    missing = [each.name for each in parameters if each.name in _NOT_GIVEN and each.default is each.empty]
    if missing:
        raise RewardFunctionError(
            f"the reward function {_name(function)} needs {missing[0]!r}, which it is not given: leave it out, or give "
            "it a default"
        )
