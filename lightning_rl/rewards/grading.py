"""From the finished rollouts of a step to the rewards that training gives them.

Invariant: every rollout of every group has rewards, one of them named `reward` and each a finite number, or there is
an error that names the group.
"""

import hashlib
import inspect
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from urllib.parse import urlsplit

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Judge, RewardSection
from lightning_rl.processes.event_loop import AsyncAgents
from lightning_rl.processes.service_keys import is_loopback
from lightning_rl.rewards import FinishedRollout, GroupReward, GroupRewards
from lightning_rl.rewards.checked import RewardError, named_rewards
from lightning_rl.rewards.functions import RewardFunction
from lightning_rl.rewards.judge import RankingJudge
from lightning_rl.rewards.reward_model import RewardModel
from lightning_rl.store.contract import AttemptTrace, Reward
from lightning_rl.store.rewards import rewards_by_name

Graded = list[dict[str, float]]  # the rewards of a group's rollouts, by name

_GRADED = "graded-"  # begins the ids of the rewards that are given here
_NO_KEY = "none"  # for services that ask for no key
_log = logging.getLogger(__name__)
_async_rewards = AsyncAgents()  # one for all: clients that a function keeps belong to their loop


def grade(reward: GroupReward, groups: Sequence[Sequence[FinishedRollout]], *, concurrency: int) -> list[Graded]:
    """The rewards of all groups, in their order; see `as_graded`."""
    graded = dict(as_graded(reward, groups, concurrency=concurrency))
    return [graded[place] for place in range(len(groups))]


def as_graded(
    reward: GroupReward, groups: Sequence[Sequence[FinishedRollout]], *, concurrency: int
) -> Iterator[tuple[int, Graded]]:
    """The place of each group among `groups` with its rewards, as soon as it is graded; at most `concurrency` groups at
    once, each in a thread.

    With a concurrency of 1 all is done in the caller's thread. The first error ends it, after those that are graded by
    then: no further group is begun.

    Raises:
        RewardError: naming the group or the rollout, for a result of another length or what is no reward.
    """
    with reward.placed() if isinstance(reward, RewardModel) else nullcontext():
        if concurrency == 1:
            for place, group in enumerate(groups):
                yield place, _graded(reward, group)
        else:
            yield from _in_threads(reward, groups, concurrency)


def _in_threads(
    reward: GroupReward, groups: Sequence[Sequence[FinishedRollout]], concurrency: int
) -> Iterator[tuple[int, Graded]]:
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="rewards")
    try:
        places = {threads.submit(_graded, reward, group): place for place, group in enumerate(groups)}
        open_futures, failed = set(places), list[Future[Graded]]()
        while open_futures and not failed:
            done, open_futures = wait(open_futures, return_when=FIRST_COMPLETED)
            failed = [future for future in done if future.exception() is not None]
            yield from ((places[future], future.result()) for future in done if future not in failed)
        for future in failed:
            future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _graded(reward: GroupReward, group: Sequence[FinishedRollout]) -> Graded:
    if not group:
        return []
    try:
        rewards = reward(group)
        if inspect.isawaitable(rewards):
            rewards = _async_rewards.submit(rewards).result()
        return _checked(rewards, group)
    except Exception as error:
        error.add_note(f"while group {group[0].group_id} was graded ({len(group)} rollouts)")
        raise


def _checked(rewards: GroupRewards, group: Sequence[FinishedRollout]) -> Graded:
    if not isinstance(rewards, Sequence) or isinstance(rewards, str) or len(rewards) != len(group):
        many = f"{len(rewards)} rewards" if isinstance(rewards, Sequence) else type(rewards).__name__
        raise RewardError(
            f"group {group[0].group_id}: the reward function returned {many} for {len(group)} rollouts; return a list "
            "with one for each, in their order"
        )
    return [named_rewards(one, f"rollout {rollout.rollout_id}") for one, rollout in zip(rewards, group, strict=True)]


def from_config(reward: RewardSection) -> GroupReward | None:
    """What the config's `reward` section names: a function in a file, a judge, a reward model, or nothing; a command
    gives its rewards with the agent, where that ran.

    Raises:
        ConfigError: two are named, the judge's key is not there, or the reward model is none.
        RewardFunctionError: the function is not there, or does not take the arguments.
    """
    function, judge, scorer = reward.custom_reward_function, reward.judge, reward.reward_model
    named = {
        "reward.command": reward.command is not None,
        "reward.custom_reward_function.path": function.path is not None,
        "reward.judge.model": judge.model is not None,
        "reward.reward_model.enable": scorer.enable,
    }
    if len(several := [key for key, is_set in named.items() if is_set]) > 1:
        raise ConfigError(f"{' and '.join(several)} are set, and each gives the final reward: leave one")
    if function.path is not None:
        return RewardFunction(function.path, function.name, function.reward_kwargs)
    if scorer.enable:
        if scorer.model_path is None:
            raise ConfigError("reward.reward_model.enable is true: name the model, reward.reward_model.model_path")
        return RewardModel(scorer.model_path, dtype=scorer.dtype, device=scorer.device)
    return None if judge.model is None else _judge(judge.model, judge)


def _judge(model: str, section: Judge) -> RankingJudge:
    key = os.environ.get(section.api_key_env)
    if not key and section.base_url is None:
        raise ConfigError(
            f"reward.judge: the environment variable {section.api_key_env} is not set, and it is to hold the key of "
            f"the judge {model}: set it, name another by reward.judge.api_key_env, or a service without keys by "
            "reward.judge.base_url"
        )
    if not key and not is_loopback(urlsplit(section.base_url or "").hostname or ""):
        _log.warning(
            "reward.judge: the environment variable %s is not set, so %s is asked without a key",
            section.api_key_env,
            section.base_url,
        )
    return RankingJudge(
        model,
        base_url=section.base_url,
        # Never None: the SDK would send OPENAI_API_KEY to a service that it is not meant for.
        api_key=key or _NO_KEY,
        rubric=section.rubric,
        timeout_seconds=section.timeout_seconds,
        concurrency=section.concurrency,
    )


def late_rewards(named: Mapping[str, float]) -> list[Reward]:
    """Rewards by name, as they are given to an attempt that has ended: each has the id `graded-NAME` (a digest where
    an id cannot hold the name), so that they are given once."""
    return [Reward(value=value, name=name, reward_id=_reward_id(name)) for name, value in named.items()]


def graded_before(rewards: Iterable[Reward]) -> dict[str, float]:
    """Those of an attempt's rewards that `late_rewards` made, by name; {} where it was not graded yet."""
    return {reward.name: reward.value for reward in rewards if (reward.reward_id or "").startswith(_GRADED)}


def before_grading(trace: AttemptTrace) -> dict[str, float]:
    """The rewards of an attempt by name as they were before `late_rewards` were added, where that is known."""
    if trace.returned is None or not graded_before(trace.rewards):
        return trace.attempt.rewards
    own = (reward for reward in trace.rewards if not (reward.reward_id or "").startswith(_GRADED))
    return rewards_by_name(own, trace.returned)


def _reward_id(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        return _GRADED + name
    return f"{_GRADED}~{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
