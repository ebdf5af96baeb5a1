"""A reward function in a file, as verl's `custom_reward_function`: what is trained is scored by code of one's own.

Invariant: the function is found, and takes the arguments that it will be called with, before anything is rolled out;
what it raises later is raised, never made into a reward.
"""

import asyncio
import contextlib
import difflib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_rl.agents.values import number
from lightning_rl.errors import Explained
from lightning_rl.loading import explained, find_neighbours, made_of, run_apart
from lightning_rl.processes.event_loop import AsyncAgents
from lightning_rl.rewards import FinishedRollout
from lightning_rl.rewards.checked import RewardError, finite
from lightning_rl_adapters.credit import FINAL

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_SCORE = "score"  # verl's name of the final reward


class RewardFunctionError(Explained, ValueError):
    """A reward function cannot be loaded, or cannot be called as it would be."""


class RewardFunction:
    """The function `name` in the file `path`, as a `GroupReward`: each rollout is scored for itself.

    It is called as `compute_score(data_source=..., solution_str=..., ground_truth=..., extra_info=...,
    **reward_kwargs)`, where `solution_str` is the policy's last answer alone: no reasoning, and nothing that a tool
    printed. The others are the task's, a dict as in verl's Parquet rows: `data_source`, `reward_model.ground_truth`,
    `extra_info`; without `data_source` or `extra_info` it is given None. Sync or async; async ones score all rollouts
    of a group at once, on one event loop. Sync ones are called in the thread that grades their group.

    It returns a number, or a dict with `score`: that is the final reward, and each further entry that is a number (or
    a bool) is a reward of its own name. Entries that are no numbers, such as the `pred` of verl's own functions, are
    left out: a reward is a number. NaN and infinities are errors wherever they stand.

    Raises:
        RewardFunctionError: the file or the function is not there, or it does not take these arguments.
    """

    def __init__(
        self, path: str | Path, name: str = "compute_score", reward_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.file = Path(path).expanduser().resolve()
        self.name = name
        self.reward_kwargs = dict(reward_kwargs or {})
        self._async = AsyncAgents()  # one for all calls: clients that the function keeps belong to their loop
        self.function = _function(self.file, name)
        _check_arguments(self.function, self._called(), self.reward_kwargs)

    def __call__(self, rollouts: Sequence[FinishedRollout]) -> list[dict[str, float]]:
        """The rewards of a group's rollouts, in their order.

        Raises:
            RewardError: naming a rollout, for what is no finite number, or a task without a ground truth.
        """
        results = [self._call(rollout) for rollout in rollouts]
        if any(inspect.isawaitable(result) for result in results):
            results = self._async.submit(self._gathered(rollouts, results)).result()
        return [self._rewards(rollout, result) for rollout, result in zip(rollouts, results, strict=True)]

    def _call(self, rollout: FinishedRollout) -> Any:
        arguments = task_arguments(rollout)
        with self._named(rollout):
            return self.function(solution_str=rollout.answer, **arguments, **self.reward_kwargs)

    async def _gathered(self, rollouts: Sequence[FinishedRollout], results: Sequence[Any]) -> list[Any]:
        async def awaited(rollout: FinishedRollout, result: Any) -> Any:
            with self._named(rollout):
                return await result if isinstance(result, Awaitable) else result

        pairs = zip(rollouts, results, strict=True)
        tasks = [asyncio.ensure_future(awaited(rollout, result)) for rollout, result in pairs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _rewards(self, rollout: FinishedRollout, result: Any) -> dict[str, float]:
        where = f"rollout {rollout.rollout_id}: {self._called()}"
        if not isinstance(result, Mapping):
            return {FINAL: finite(result, f"{where}: the reward")}
        if _SCORE not in result or FINAL in result:
            raise RewardError(
                f"{where} returned {sorted(map(str, result))}; its final reward is named {_SCORE!r} there, and no "
                f"other may be named {FINAL!r}"
            )
        further = {str(name): value for name, value in result.items() if name != _SCORE and number(value) is not None}
        rewards = {FINAL: result[_SCORE], **further}
        return {name: finite(value, f"{where}: the reward {name!r}") for name, value in rewards.items()}

    def _called(self) -> str:
        return f"{self.file}:{self.name}"

    @contextlib.contextmanager
    def _named(self, rollout: FinishedRollout) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"raised by the reward function {self._called()} on rollout {rollout.rollout_id}")
            raise


def task_arguments(rollout: FinishedRollout) -> dict[str, Any]:
    """What a reward function is told of a rollout's task: `data_source`, `ground_truth`, `extra_info`.

    Raises:
        RewardError: the task has no `reward_model.ground_truth`.
    """
    task = rollout.task
    held = task.get("reward_model") if isinstance(task, Mapping) else None
    if not isinstance(task, Mapping) or not isinstance(held, Mapping) or "ground_truth" not in held:
        keys = f"has the keys {sorted(map(str, task))}" if isinstance(task, Mapping) else f"is {type(task).__name__}"
        raise RewardError(
            f"rollout {rollout.rollout_id}: its task {keys}, so there is no ground truth for the reward function; "
            'make each task a dict with {"reward_model": {"ground_truth": ...}}, or score in the agent'
        )
    arguments = {"data_source": task.get("data_source"), "extra_info": task.get("extra_info")}
    return arguments | {"ground_truth": held["ground_truth"]}


def _function(file: Path, name: str) -> Callable[..., Any]:
    if not file.is_file():
        raise RewardFunctionError(f"reward function {file}:{name}: there is no such file; name a Python file")
    module = made_of(file) or _load(file, name)
    function = vars(module).get(name)
    if function is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RewardFunctionError(f"reward function {file}:{name}: the file defines no {name!r}{hint}")
    if not callable(function):
        raise RewardFunctionError(
            f"reward function {file}:{name} is of type {type(function).__name__}; name a function"
        )
    return function  # type: ignore[no-any-return]


def _load(file: Path, name: str) -> ModuleType:
    find_neighbours(file)
    with explained(f"reward function {file}:{name}", RewardFunctionError):
        module = run_apart(file, "reward_function")
    if module is None:
        raise RewardFunctionError(f"reward function {file}:{name}: the file is no Python module; its name ends in .py")
    return module


def _check_arguments(function: Callable[..., Any], called: str, reward_kwargs: Mapping[str, Any]) -> None:
    if reserved := sorted(set(ARGUMENTS) & set(reward_kwargs)):
        raise RewardFunctionError(
            f"reward function {called}: reward_kwargs hold {reserved[0]!r}, which each rollout fills; name it otherwise"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions in C nobody can tell
        return
    try:
        signature.bind(**dict.fromkeys((*ARGUMENTS, *reward_kwargs)))
    except TypeError as error:
        more = f" and the reward_kwargs {sorted(reward_kwargs)}" if reward_kwargs else ""
        raise RewardFunctionError(
            f"reward function {called}{signature} cannot be called: {error}; it is given {', '.join(ARGUMENTS)}{more}, "
            "by name"
        ) from error
