"""Agent-lightning's way to a batch for a trainer of your own: verl's columns in, verl's tensors out.

A sample becomes rollouts of the agent, an ended rollout the rows of its forest, a row one line of the batch. What a
line trains are sampled tokens with their log probabilities, whatever its prompt was cut to; what of the sampled tokens
does not get there is counted by reason. Reading the batch changes nothing, so it may be read again.
"""

import contextlib
import logging
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_rl.algorithms.base import NEUTRAL
from lightning_rl.data.dataset import check_task
from lightning_rl.errors import Explained
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutConfig, RolloutRequest
from lightning_rl.store.errors import NotFound
from lightning_rl.training.padding import (
    get_left_padded_ids_and_attention_mask,
    get_right_padded_ids_and_attention_mask,
)
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_adapters.rows import Row

Column = NDArray[np.object_]

_WAIT_SECONDS = 2.0  # between two looks at the processes of a run
_OWN_COLUMNS = ("uid", "rollout_id", "row_index", "group_rewards")
_TENSORS = (
    "prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rollout_log_probs",
    "token_level_scores", "is_drop_mask",
)  # fmt: skip
_ADVICE = {
    "no_logprob": "take an engine that tells the log probabilities that it sampled with, or train at temperature 1",
    "overlong_prompt": "raise max_prompt_length",
    "truncated": "raise max_response_length",
}
_log = logging.getLogger(__name__)


class DaemonOrder(Explained, RuntimeError):
    """A method of the daemon was called before the one that it needs, or for data of the other kind."""


@dataclass
class _Data:
    """The samples that are rolled out now: their tasks, what is asked for, and what has ended, by rollout id."""

    is_train: bool
    tasks: list[dict[str, Any]]
    columns: list[str]
    sample_of: dict[str, int]  # by rollout id, in the order of the batch
    ended: dict[str, Trajectory] = field(default_factory=dict)

    @property
    def waiting(self) -> list[str]:
        return [rollout_id for rollout_id in self.sample_of if rollout_id not in self.ended]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [self.ended[rollout_id] for rollout_id in self.sample_of]


class AgentModeDaemon:
    """Rolls out the samples of a batch and reads them back as tensors, with the agents at a running server's runners.

    `start`, then for each batch `set_up_data_and_server`, `run_until_all_finished`, `get_train_data_batch` or
    `get_test_metrics`, and `clear_data_and_server`; a method out of this order raises DaemonOrder.

    Args:
        store: a client with the admin key; an algorithm's is `self.store`.
        train_rollout_n: rollouts per sample in training; validation has one.
        train_information: `model`, the policy's name at the gateway, and `temperature`; what else is there
            (`top_p`, `top_k`, `max_tokens`, ...) are sampling parameters of training too.
        pad_token_id: what fills prompts and responses up; `tokenizer.pad_token_id`.
        reward_fillna_value: the reward of a rollout whose agent failed or gave none.
        llm_timeout_seconds: the deadline of one attempt of a rollout.
        val_sampling_parameters: those of validation; greedy by default, whatever training samples with.
        check: raises when a process of the run has died; called while waiting. An algorithm's is `self.check`.
    """

    def __init__(
        self,
        store: HttpStore,
        *,
        train_rollout_n: int,
        train_information: Mapping[str, Any],
        pad_token_id: int,
        reward_fillna_value: float = 0.0,
        llm_timeout_seconds: float = 1200.0,
        val_sampling_parameters: Mapping[str, float | int] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if train_rollout_n < 1:
            raise ValueError(f"train_rollout_n is {train_rollout_n}; it takes at least one rollout of a sample")
        if missing := [name for name in ("model", "temperature") if name not in train_information]:
            raise ValueError(f"train_information has no {missing[0]!r}; it names the policy's model and temperature")
        if pad_token_id is None:
            raise ValueError("pad_token_id is None; where the tokenizer has none, give its eos_token_id")
        if not math.isfinite(reward_fillna_value):
            raise ValueError(f"reward_fillna_value is {reward_fillna_value}; it must be finite")
        self.train_rollout_n = train_rollout_n
        self.train_information = dict(train_information)
        self.pad_token_id = pad_token_id
        self.reward_fillna_value = reward_fillna_value
        self.val_sampling_parameters = {"temperature": 0.0, **(val_sampling_parameters or {})}
        self._config = RolloutConfig(timeout_seconds=llm_timeout_seconds)
        self._store = store
        self._check = check
        self._started = False
        self._data: _Data | None = None

    @property
    def model(self) -> str:
        """The policy's name at the gateway."""
        return str(self.train_information["model"])

    def start(self) -> None:
        """Make sure that the server is there and takes the key. Raises the store's errors where not."""
        self._store.state()
        self._started = True

    def set_up_data_and_server(
        self, data: Mapping[str, Any], server_addresses: Sequence[str] | None, is_train: bool = True
    ) -> None:
        """Register the engines, publish the policy as `main_llm`, and ask for the rollouts of all samples.

        Args:
            data: columns of equal length (lists, arrays, tensors); sample i is a task of all their i-th values.
            server_addresses: engines that sample the policy, as `host:port` or URL. Those that the server knows are
                left as they are; none (None, []): it knows them all.
            is_train: `train_rollout_n` rollouts of each sample under training's sampling, or one under validation's.

        Raises TaskError for a value that is no JSON, ValueError for columns or addresses that are no such.
        """
        if not self._started:
            raise DaemonOrder("data cannot be set up yet: call start() first")
        if self._data is not None:
            raise DaemonOrder("there are data already: call clear_data_and_server() before the next")
        tasks = _tasks(data)
        self._register_engines([_engine_url(address) for address in server_addresses or ()])
        requests = self._requests(tasks, is_train, self._publish())
        # Before they are asked for: what is asked for in part can then be cleared.
        self._data = _Data(
            is_train=is_train,
            tasks=tasks,
            columns=list(data),
            sample_of={str(request.rollout_id): i for i, per_task in enumerate(requests) for request in per_task},
        )
        self._store.enqueue([request for per_task in requests for request in per_task])

    def run_until_all_finished(self, verbose: bool = True) -> None:
        """Wait until every rollout has ended. Lost runners and overdue attempts are ended by the server.

        With `verbose` it prints how many have.
        """
        data = self._data_to("wait for")
        while waiting := data.waiting:
            self._check()
            ended = [rollout.rollout_id for rollout in self._store.wait(waiting, _WAIT_SECONDS)]
            for rollout_id, trace in self._store.traces(ended).items():
                data.ended[rollout_id] = trajectory_of(trace, agent_failure=self.reward_fillna_value, model=self.model)
            if ended and verbose:
                failed = sum(_failed(trajectory) for trajectory in data.ended.values())
                print(f"{len(data.ended)} of {len(data.sample_of)} rollouts have ended ({failed} failed)")
        errors = Counter(f"{one.error.type}: {one.error.message}" for one in data.ended.values() if one.error)
        for error, count in errors.most_common(1):
            total = errors.total()
            _log.warning("%d of %d rollouts failed, most often (%d) by %.500s", total, len(data.ended), count, error)

    def get_train_data_batch(
        self, max_prompt_length: int, max_response_length: int, device: torch.device | str
    ) -> tuple[dict[str, Tensor | Column], dict[str, float]]:
        """The batch of B rows, and its metrics. P is `max_prompt_length`, R `max_response_length`.

        The prompt of a row is what stands before its first trained token; too long, it keeps its last P tokens and the
        row is marked to be dropped, once advantages are known. A response keeps its first R tokens.

        Returns: tensors on `device`, int64 where nothing else is said:
            prompts [B, P] and responses [B, R]; input_ids, attention_mask, position_ids [B, P + R];
            response_mask [B, R]: 1 on sampled tokens that have a log probability;
            rollout_log_probs float32 [B, R]: nats, 0 where that mask is 0;
            token_level_scores float32 [B, R]: the rollout's final reward at the last sampled token of each of its rows;
            is_drop_mask bool [B].
        Arrays of objects [B]: uid (the sample), rollout_id, row_index (within the rollout), group_rewards (of all
        rollouts of the sample that have a reward, once each: a rollout of many rows is one of its group, not many), and
        the columns of the data.
        """
        for name, length in (("max_prompt_length", max_prompt_length), ("max_response_length", max_response_length)):
            if length < 1:
                raise ValueError(f"{name} is {length}; a batch needs at least one column of each")
        data = self._finished(is_train=True, what="a training batch")
        excluded: Counter[str] = Counter()
        lines: list[_Line] = []
        for trajectory in data.trajectories:
            lines += _lines(trajectory, max_prompt_length, max_response_length, excluded)
        tensors = _tensors(lines, max_prompt_length, max_response_length, self.pad_token_id, torch.device(device))
        metrics = _train_metrics(lines, data.trajectories, excluded)
        _tell_of_nothing(metrics, excluded)
        return {**tensors, **_columns(lines, data)}, metrics

    def get_test_metrics(self) -> dict[str, float]:
        """`val/...` of the validation: rewards over the rollouts that the infrastructure let end, counts over all."""
        trajectories = self._finished(is_train=False, what="test metrics").trajectories
        called = [trajectory for trajectory in trajectories if trajectory.calls]
        return _rollout_metrics("val", trajectories) | {
            "val/turn_count": _mean([t.calls for t in called]),
            "val/turn_count_max": float(max((t.calls for t in called), default=0)),
            "val/sum_response_length": _mean([t.sampled_tokens for t in called]),
            "val/mean_response_length": _mean([t.sampled_tokens / t.calls for t in called]),
        }

    def clear_data_and_server(self) -> None:
        """Forget the data, and cancel those of its rollouts that have not ended. Engines stay registered."""
        for rollout_id in [] if self._data is None else self._data.waiting:
            with contextlib.suppress(NotFound):  # where the data were set up in part
                self._store.cancel(rollout_id)
        self._data = None

    def _data_to(self, action: str) -> _Data:
        if self._data is None:
            raise DaemonOrder(
                f"there are no data to {action}: call set_up_data_and_server(data, server_addresses) first"
            )
        return self._data

    def _finished(self, *, is_train: bool, what: str) -> _Data:
        data = self._data_to(f"make {what} of")
        if data.is_train != is_train:
            kind = "training" if data.is_train else "validation"
            raise DaemonOrder(f"the data were set up for {kind}: there is no {what} of them; see is_train")
        if waiting := data.waiting:
            raise DaemonOrder(
                f"{len(waiting)} of {len(data.sample_of)} rollouts have not ended: call run_until_all_finished() first"
            )
        return data

    def _requests(
        self, tasks: Sequence[Mapping[str, Any]], is_train: bool, resources_id: str
    ) -> list[list[RolloutRequest]]:
        """What is asked for, by sample."""
        prefix = f"{'train' if is_train else 'val'}-{secrets.token_hex(6)}"
        return [
            [
                RolloutRequest(
                    task=task,
                    mode="train" if is_train else "val",
                    rollout_id=f"{prefix}-{index}-{k}",
                    group_id=f"{prefix}-{index}",
                    resources_id=resources_id,
                    config=self._config,
                    metadata={"task_index": f"{index}-{k}"},
                )
                for k in range(self.train_rollout_n if is_train else 1)
            ]
            for index, task in enumerate(tasks)
        ]

    def _publish(self) -> str:
        training = {name: value for name, value in self.train_information.items() if name != "model"}
        main_llm = {
            "type": "proxy_llm",
            "model": self.model,
            "sampling_parameters": NEUTRAL | training,
            "val_sampling_parameters": NEUTRAL | self.val_sampling_parameters,
        }
        return self._store.publish({"main_llm": main_llm}).resources_id

    def _register_engines(self, urls: Sequence[str]) -> None:
        """Tell the gateway of those that it does not know, under the policy version of those that it does."""
        known_urls = {str(e["url"]).rstrip("/") for e in self._store.engines() if e["model"] == self.model}
        for url in dict.fromkeys(urls):
            if url not in known_urls:
                version = int(self._store.state()["models"].get(self.model, {}).get("policy_version", 0))
                self._store.register_engine(self.model, "vllm", url, version)


@dataclass(frozen=True)
class _Line:
    """One row of the batch, unpadded; the response begins with the first token that is trained."""

    trajectory: Trajectory
    row_index: int
    prompt: list[int]
    response: list[int]
    mask: list[int]
    log_probs: list[float]
    is_drop: bool


def _lines(
    trajectory: Trajectory, max_prompt_length: int, max_response_length: int, excluded: Counter[str]
) -> list[_Line]:
    """The lines of a rollout; its sampled tokens that none of them trains are added to `excluded`."""
    excluded.update(trajectory.excluded)
    excluded.update(trajectory.left_out)
    lines: list[_Line] = []
    for row in trajectory.rows:
        if row.excluded is not None:
            excluded[row.excluded] += sum(row.loss_mask)
            continue
        if row.media:
            raise ValueError(
                f"rollout {trajectory.rollout_id} shows images, and a trainer of one's own is handed token ids alone: "
                "train it with `PPO`, or leave images out"
            )
        mask = _trained(row)
        excluded["no_logprob"] += sum(row.loss_mask) - sum(mask)
        if not any(mask):
            continue
        start = mask.index(1)
        end = min(len(mask), start + max_response_length)
        is_drop = start > max_prompt_length
        excluded["truncated"] += sum(mask[end:])
        excluded["overlong_prompt"] += sum(mask[start:end]) if is_drop else 0
        lines.append(
            _Line(
                trajectory=trajectory,
                row_index=len(lines),
                prompt=row.token_ids[:start],
                response=row.token_ids[start:end],
                mask=mask[start:end],
                log_probs=[(row.logprobs[i] or 0.0) if mask[i] else 0.0 for i in range(start, end)],
                is_drop=is_drop,
            )
        )
    return lines


def _trained(row: Row) -> list[int]:
    """1 where a token was sampled and its log probability is known. Raises ValueError where the first token is."""
    if row.loss_mask and row.loss_mask[0]:
        raise ValueError("a row's first token is marked as sampled; a call must have a prompt")
    return [int(sampled and logprob is not None) for sampled, logprob in zip(row.loss_mask, row.logprobs, strict=True)]


def _tensors(
    lines: Sequence[_Line], max_prompt_length: int, max_response_length: int, pad_id: int, device: torch.device
) -> dict[str, Tensor]:
    prompts = [get_left_padded_ids_and_attention_mask(line.prompt, max_prompt_length, pad_id) for line in lines]
    responses = [get_right_padded_ids_and_attention_mask(line.response, max_response_length, pad_id) for line in lines]
    size, end = len(lines), max_response_length

    def integers(rows: list[list[int]], length: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=device).reshape(size, length)

    prompt_ids = integers([ids for ids, _ in prompts], max_prompt_length)
    response_ids = integers([ids for ids, _ in responses], end)
    attention = torch.cat(
        [integers([mask for _, mask in prompts], max_prompt_length), integers([mask for _, mask in responses], end)], 1
    )
    log_probs = torch.zeros(size, end, dtype=torch.float32)
    scores = torch.zeros(size, end, dtype=torch.float32)
    for i, line in enumerate(lines):
        log_probs[i, : len(line.log_probs)] = torch.tensor(line.log_probs, dtype=torch.float32)
        scores[i, _last_trained(line)] = line.trajectory.reward or 0.0
    return {
        "prompts": prompt_ids,
        "responses": response_ids,
        "response_mask": integers([line.mask + [0] * (end - len(line.mask)) for line in lines], end),
        "input_ids": torch.cat([prompt_ids, response_ids], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "rollout_log_probs": log_probs.to(device),
        "token_level_scores": scores.to(device),
        "is_drop_mask": torch.tensor([line.is_drop for line in lines], dtype=torch.bool, device=device),
    }


def _last_trained(line: _Line) -> int:
    return len(line.mask) - 1 - line.mask[::-1].index(1)


def _columns(lines: Sequence[_Line], data: _Data) -> dict[str, Column]:
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in data.trajectories:
        if trajectory.reward is not None:
            rewards[trajectory.group_id].append(trajectory.reward)
    tasks = [data.tasks[data.sample_of[line.trajectory.rollout_id]] for line in lines]
    values: dict[str, list[Any]] = {
        "uid": [line.trajectory.group_id for line in lines],
        "rollout_id": [line.trajectory.rollout_id for line in lines],
        "row_index": [line.row_index for line in lines],
        "group_rewards": [list(rewards[line.trajectory.group_id]) for line in lines],
    }
    values |= {name: [task[name] for task in tasks] for name in data.columns}
    return {name: _objects(column) for name, column in values.items()}


def _objects(values: Sequence[Any]) -> Column:
    """One object per row, lists too, which NumPy would make dimensions of."""
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    return column


def _train_metrics(
    lines: Sequence[_Line], trajectories: Sequence[Trajectory], excluded: Counter[str]
) -> dict[str, float]:
    """Counts of rollouts, rows, and of every token that was sampled for them: trained, or excluded by reason."""
    in_batch = {line.trajectory.rollout_id for line in lines}
    sampled = sum(t.sampled_tokens + sum(t.excluded.values()) for t in trajectories)
    counts = {
        "n_rollouts_wo_rows": len(trajectories) - len(in_batch),
        "n_rows": len(lines),
        "n_truncated_prompts": sum(line.is_drop for line in lines),
        "tokens/sampled": sampled,
        "tokens/trained": sum(sum(line.mask) for line in lines if not line.is_drop),
    } | {f"tokens/excluded/{reason}": n for reason, n in sorted(excluded.items()) if n}
    return _rollout_metrics("training", trajectories) | {f"training/{name}": float(n) for name, n in counts.items()}


def _tell_of_nothing(metrics: Mapping[str, float], excluded: Counter[str]) -> None:
    if metrics["training/tokens/sampled"] and not metrics["training/tokens/trained"]:
        _log.warning(
            "none of %d sampled tokens can be trained (%s)%s",
            metrics["training/tokens/sampled"],
            ", ".join(f"{reason} {tokens}" for reason, tokens in sorted(excluded.items()) if tokens),
            "".join(f"; for `{reason}` {advice}" for reason, advice in _ADVICE.items() if excluded[reason]),
        )


def _rollout_metrics(kind: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What training and validation have in common. Every share is one of all rollouts that were asked for."""
    failed = sum(_failed(trajectory) for trajectory in trajectories)
    return {
        f"{kind}/reward": _mean([t.reward for t in trajectories if t.reward is not None]),
        f"{kind}/n_rollouts": float(len(trajectories)),
        f"{kind}/n_rollouts_w_trace": float(sum(t.calls > 0 for t in trajectories)),
        f"{kind}/n_rollouts_w_reward": float(len(trajectories) - failed),
        f"{kind}/n_rollouts_left_out": float(sum(t.reward is None for t in trajectories)),
        f"{kind}/failed_share": failed / max(len(trajectories), 1),
    }


def _failed(trajectory: Trajectory) -> bool:
    """Whether it has no reward of its own: its agent failed or gave none, or the infrastructure failed."""
    return trajectory.agent_failed or trajectory.reward is None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _tasks(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The samples of a batch of columns, as JSON values."""
    if reserved := [name for name in data if name in _OWN_COLUMNS or name in _TENSORS]:
        raise ValueError(f"the batch has columns of its own named {', '.join(reserved)}: rename those of the data")
    if not data:
        raise ValueError("the data have no column, so no sample: give lists or arrays by name")
    columns = {name: _native(column) for name, column in data.items()}
    for name, column in columns.items():
        if not isinstance(column, list):
            raise ValueError(f"column {name!r} is a {type(column).__name__}; give a list or an array of one per sample")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of the data differ in length ({lengths}); they must hold one value per sample")
    tasks = [{name: column[i] for name, column in columns.items()} for i in range(max(lengths.values(), default=0))]
    for i, task in enumerate(tasks):
        for name, value in task.items():
            check_task(value, f"column {name!r} of sample {i}")
    return tasks


def _native(value: Any) -> Any:
    """The same without NumPy and torch."""
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return _native(value.tolist())
    if isinstance(value, Mapping):
        return {name: _native(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_native(item) for item in value]
    return value


def _engine_url(address: str) -> str:
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"server address {address!r} is none; write host:port, or http://host:port")
    return url
