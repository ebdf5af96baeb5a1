"""Baseline: how good the agent is with a model, before anything is trained. It only evaluates."""

import hashlib
import os
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lightning_rl.algorithms.asked_before import again
from lightning_rl.algorithms.base import Algorithm, Dataset, Endpoint
from lightning_rl.algorithms.evaluation import EVALUATIONS, Evaluation, evaluate
from lightning_rl.config import ConfigError
from lightning_rl.files import TOKENIZER_FOLDER, write_whole
from lightning_rl.rewards import GroupReward
from lightning_rl.rewards.training_rewards import Grader
from lightning_rl.store.contract import RolloutRequest, RolloutTrace
from lightning_rl.trajectories.run_warnings import Problems
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_proxy.rendering.load import FILES

if TYPE_CHECKING:
    from lightning_rl.inference.embedded import EmbeddedPolicy

_GROUPS_AT_ONCE = 8  # that are graded
_TELLING = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # one tokenizer from another
_STORE = "store.db"


class Baseline(Algorithm):
    """The agent's accuracy (or mean reward) on datasets, with a 95 % confidence interval, under any model.

    Args:
        model: a folder or an id of the hub, sampled by the embedded engine (None: the tutorial's small model); with
            `base_url` the name of a model there; with `chat_backend` a name that `litellm` knows.
        base_url: an OpenAI-compatible service (`https://.../v1`).
        api_key: its key; by default OPENAI_API_KEY. `litellm` finds keys in the environment by itself.
        chat_backend: "litellm", for `model` names such as `anthropic/claude-sonnet-4-5` (extra `litellm`).
        n: rollouts per task.
        sampling_parameters: temperature, top_p, top_k, max_tokens that replace the agent's; by default the agent's.
        renderer: the chat format of an embedded model.
        reward: what gives the rollouts of a task their rewards (`lightning_rl.rewards`), instead of the agent.
        resume: go on with a run folder that holds an evaluation: what it has of this model is not run again, but for
            what infrastructure ended.

    After `Trainer.fit(baseline, tasks)`, `evaluations` has one `Evaluation` per dataset; they are also printed, and
    written to `evaluations.json` in the run folder.
    """

    resumed_by = "resume=True"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        chat_backend: Literal["litellm"] | None = None,
        n: int = 1,
        sampling_parameters: Mapping[str, Any] | None = None,
        renderer: str = "auto",
        reward: GroupReward | None = None,
        resume: bool = False,
    ) -> None:
        if (base_url or chat_backend) and model is None:
            raise ValueError("name the model that the service is asked for: Baseline('gpt-4o-mini', base_url=...)")
        if base_url and chat_backend:
            raise ValueError("give base_url or chat_backend, not both")
        if n < 1:
            raise ValueError(f"n is {n}; it takes at least one rollout per task")
        self.model = model
        self.base_url = base_url
        self.api_key = api_key
        self.chat_backend = chat_backend
        self.n = n
        self.sampling_parameters = dict(sampling_parameters or {})
        self.renderer = renderer
        self._grader = None if reward is None else Grader(reward, concurrency=_GROUPS_AT_ONCE)
        self.resume = resume
        self.evaluations: list[Evaluation] = []
        self.policy: EmbeddedPolicy | None = None
        self._names: list[str] = []

    def answer_for(self, names: Sequence[str]) -> None:
        """See `Algorithm`: the model plays every part of an agent that asks several."""
        self._names = list(names)
        self.resources = ("main_llm", *self._names)

    def default_run_dir(self) -> Path:
        """See `Algorithm`."""
        folder = super().default_run_dir()
        return folder.with_name(f"{type(self).__name__.lower()}-{folder.name}")

    def open(self, run_dir: Path) -> Endpoint:
        """Start the embedded engine, or name the service."""
        self.run_dir = run_dir
        if self.base_url or self.chat_backend:
            name = str(self.model)
            engine = {"model": name, "kind": self.chat_backend or "openai", "url": self.base_url}
            key = self.api_key or (os.environ.get("OPENAI_API_KEY") if self.base_url else None)
            return Endpoint(
                model=name, tokenizer=None, renderer=self.renderer, engines=[engine | ({"api_key": key} if key else {})]
            )
        from lightning_rl.inference.embedded import EmbeddedPolicy  # loads torch, which a service does without
        from lightning_rl.inference.load import ModelSource

        self.policy = EmbeddedPolicy(ModelSource(self.model))
        rendered_as, self.policy.name = self.policy.name, self.served_name(self.policy.name)
        self.policy.start()
        _keep_tokenizer(self.policy.folder, run_dir, first=not self.resume or not (run_dir / _STORE).exists())
        return Endpoint(
            model=rendered_as,
            served_as=self.policy.name,
            tokenizer=str(self.policy.folder),
            renderer=self.renderer,
            engines=self.policy.registrations(),
        )

    def watch(self) -> None:
        """Raise what ended the engine, when something has."""
        if self.policy is not None:
            self.policy.check()

    def close(self) -> None:
        """Stop the engine."""
        if self.policy is not None:
            self.policy.close()

    def prepare(self, train_dataset: Dataset | None, val_dataset: Dataset | None) -> tuple[Dataset, Dataset]:
        """See `Algorithm`. Raises ConfigError where there is no task."""
        if not train_dataset and not val_dataset:
            raise ConfigError(f"the dataset is empty; {type(self).__name__} needs tasks to run the agent on")
        return train_dataset or [], val_dataset or []

    def run(self, train_dataset: Dataset, val_dataset: Dataset) -> None:
        """Evaluate on each dataset that is given."""
        self.evaluations = []
        (self.run_dir / EVALUATIONS).unlink(missing_ok=True)  # of a run that is gone on with
        for name, tasks in {"train": train_dataset, "val": val_dataset}.items():
            if tasks:
                self.evaluations.append(self.evaluate(name, tasks))
                print(self.evaluations[-1])
        print(f"to look at its rollouts: lightning-rl dashboard {shlex.quote(str(self.run_dir))}")
        write_whole(self.run_dir / EVALUATIONS, msgspec.json.encode(self.evaluations) + b"\n")

    def evaluate(self, name: str, tasks: Dataset) -> Evaluation:
        """Run the agent `n` times on each task."""
        return self._evaluation(name, self.roll_out(f"{name}-{self._digest()}", tasks))

    def _evaluation(self, name: str, traces: Sequence[RolloutTrace]) -> Evaluation:
        """What finished rollouts were rewarded with; what went wrong in them is told."""
        trajectories = [trajectory_of(trace, agent_failure=0.0) for trace in traces]
        Problems(self.run_dir).report(name, trajectories)
        rewards: dict[str, list[float]] = defaultdict(list)
        for trajectory in trajectories:
            if trajectory.reward is not None:
                rewards[trajectory.group_id].append(trajectory.reward)
        return evaluate(
            name,
            rewards,
            failed=sum(t.agent_failed for t in trajectories),
            left_out=sum(t.reward is None for t in trajectories),
            without_calls=sum(_without_calls(t) for t in trajectories),
        )

    def roll_out(self, prefix: str, tasks: Dataset) -> list[RolloutTrace]:
        """The finished rollouts of a dataset, task by task; their ids begin with `prefix`."""
        return self._rolled_out(f"baseline-{self._digest()}", prefix, list(enumerate(tasks)), {})

    def _rolled_out(
        self, version: str, prefix: str, tasks: Sequence[tuple[int, Any]], prompts: Mapping[str, Any]
    ) -> list[RolloutTrace]:
        """The finished rollouts of tasks, each with its index in its dataset. `version` names what they are given: the
        models, and `prompts` as published."""
        model = self.policy.name if self.policy is not None else str(self.model)
        main_llm = {"type": "proxy_llm", "model": model, "val_sampling_parameters": self.sampling_parameters}
        named = {name: main_llm | {"agents": re.escape(name)} for name in self._names}
        resources_id = f"{version}.{self.run_id}"  # the same when the run is resumed
        self.store.publish({"main_llm": main_llm, **named, **prompts}, resources_id)
        requests = [
            RolloutRequest(
                task=task,
                mode="val",
                rollout_id=f"{prefix}-{index}-{k}.{self.run_id}",
                group_id=f"{prefix}-{index}.{self.run_id}",
                resources_id=resources_id,
                metadata={"task_index": f"{index}-{k}"},
            )
            for index, task in tasks
            for k in range(self.n)
        ]
        traces = self._measured(requests)
        return traces if self._grader is None else self._grader.graded(traces, self.store, model)

    def _measured(self, requests: Sequence[RolloutRequest]) -> list[RolloutTrace]:
        """The finished rollouts. Of one that infrastructure ended or somebody cancelled before this session another is
        asked for."""
        traces: list[RolloutTrace] = self.finished(requests, lambda trace: trace)
        lost = [
            at
            for at, trace in enumerate(traces)
            if trace.rollout.status in ("failed", "cancelled")
            and trace.counting is None
            and trace.rollout.created_at * 1e9 < self.began_ns
        ]
        anew = [again(requests[at]) for at in lost]
        for at, trace in zip(lost, self._measured(anew) if anew else [], strict=True):
            traces[at] = trace
        return traces

    def _digest(self) -> str:
        """Tells the rollouts of one model and sampling from those of another in the same folder."""
        settings = [str(self.model), self.base_url, self.chat_backend, sorted(self.sampling_parameters.items())]
        return hashlib.blake2b(repr(settings).encode(), digest_size=4).hexdigest()


def _keep_tokenizer(model: Path, run_dir: Path, *, first: bool) -> None:
    """The run's ids are known by its tokenizer, and its calls rendered again, whatever becomes of the model. A folder
    whose models (the `first` and those of later evaluations) have several keeps none."""
    kept = run_dir / TOKENIZER_FOLDER
    if first:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for file in FILES:
            if (model / file).is_file():
                shutil.copyfile(model / file, kept / file)
    elif any(_content(model / file) != _content(kept / file) for file in _TELLING):
        shutil.rmtree(kept, ignore_errors=True)


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _without_calls(trajectory: Trajectory) -> bool:
    return trajectory.calls == 0 and trajectory.reward is not None
