"""Prompt optimization: prompts that agents take by name are improved by `gepa`, with rollouts of the same agent as its
evidence. No weight is changed.

Invariant: a search is a function of its seed, of what rollouts were rewarded with, and of what the reflection model
answered. Both are kept (the store, `reflections.jsonl`), so a search that was stopped is made again from its beginning,
asks nobody twice, and goes on where it stood.
"""

import hashlib
import importlib.util
import json
import logging
import math
import re
import string
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from lightning_rl.agents.resources import PromptTemplate
from lightning_rl.algorithms.base import Dataset
from lightning_rl.algorithms.baseline import Baseline
from lightning_rl.config import ConfigError
from lightning_rl.errors import Explained
from lightning_rl.files import write_whole
from lightning_rl.rewards import GroupReward
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.trajectories.conversation import spoken_calls, transcript
from lightning_rl.trajectories.trajectory import trajectory_of
from lightning_rl_adapters.call import calls_of

Reflection = Callable[[str], str]
Task = tuple[str, int]  # the data set and the index of a task in it
Prompts = dict[str, str]  # their texts by their names

PROMPTS = "prompts.json"
REFLECTIONS = "reflections.jsonl"
_PLACES = re.compile(r"\{\{\s*([A-Za-z_]\w*)")  # of Jinja
_log = logging.getLogger(__name__)


class NothingMeasured(Explained, RuntimeError):
    """Infrastructure ended every rollout that prompts were to be judged by."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that the search tried on all of the validation tasks: their texts by name, the candidates that they come
    from (by their place in the list), and their mean reward there."""

    prompts: Prompts
    parents: list[int]
    reward: float


class PromptOptimization(Baseline):
    """Improves prompts that the agent takes by name (`prompt_template`, or a parameter annotated `PromptTemplate`).

    Each round runs the agent on a few training tasks, shows a reflection model what was said, what it was rewarded with
    and the prompt, and tries the prompt that it answers with: where the same tasks are rewarded more, on all validation
    tasks (GEPA, arXiv:2507.19457, by the library `gepa`: extra `prompts`).

    Args:
        prompts: the prompts to begin with, by their names as the agent takes them.
        reflection: what writes new prompts: a function from a text to an answer, or the name of a model as `litellm`
            has it (`openai/gpt-5-mini`).
        budget: how many evaluations the search may make, each of a prompt on a task; the last round may go beyond it.
        batch_size: the training tasks of a round.
        seed: of the search.
        perfect_reward: a round whose tasks are all rewarded so much asks for no new prompt.
        model, base_url, api_key, chat_backend, n, sampling_parameters, renderer, reward, resume: the agent's model, and
            how it is asked, as for `Baseline`; `n` rollouts of a task are an evaluation, their mean reward its result.

    After `Trainer.fit(optimization, tasks, validation_tasks)`, `best` has the prompts with the highest mean reward on
    the validation tasks (by default the training tasks), `candidates` all that were tried there, the first one those to
    begin with, and `evaluations` how sure both means are; `prompts.json` in the run folder has the same. The best of
    many was chosen by these very tasks: measure it on others.
    """

    def __init__(
        self,
        prompts: Mapping[str, PromptTemplate | str],
        reflection: Reflection | str,
        *,
        budget: int,
        batch_size: int = 3,
        seed: int = 0,
        perfect_reward: float = 1.0,
        model: str | Path | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        chat_backend: Literal["litellm"] | None = None,
        n: int = 1,
        sampling_parameters: Mapping[str, Any] | None = None,
        renderer: str = "auto",
        reward: GroupReward | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__(
            model,
            base_url=base_url,
            api_key=api_key,
            chat_backend=chat_backend,
            n=n,
            sampling_parameters=sampling_parameters,
            renderer=renderer,
            reward=reward,
            resume=resume,
        )
        if not isinstance(prompts, Mapping):
            raise TypeError(
                "prompts are a dict by the names of the agent's parameters, as {'prompt_template': ...}, "
                f"got {prompts!r:.80}"
            )
        if not prompts:
            raise ValueError(
                "there is no prompt to improve: PromptOptimization({'prompt_template': 'Answer: {question}'}, ...)"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; a round takes at least one task")
        self.prompts = {
            name: one if isinstance(one, PromptTemplate) else PromptTemplate(one) for name, one in prompts.items()
        }
        self._places = {name: places(one) for name, one in self.prompts.items()}
        self.reflection = reflection
        self.budget = budget
        self.batch_size = batch_size
        self.seed = seed
        self.perfect_reward = perfect_reward
        self.best: dict[str, PromptTemplate] = {}
        self.candidates: list[Candidate] = []
        self.resources = ("main_llm", *self.prompts)

    def answer_for(self, names: Sequence[str]) -> None:
        """See `Baseline`."""
        super().answer_for(names)
        self.resources = ("main_llm", *self._names, *self.prompts)

    def prepare(self, train_dataset: Dataset | None, val_dataset: Dataset | None) -> tuple[Dataset, Dataset]:
        """See `Algorithm`. Raises ConfigError where there is no training task, too small a budget for one round, or no
        `gepa`."""
        if importlib.util.find_spec("gepa") is None:
            raise ConfigError("prompts are optimized by `gepa`: pip install 'lightning-rl[prompts]'")
        if not train_dataset:
            raise ConfigError("there are no training tasks, of which prompts are to be improved")
        validation = val_dataset or train_dataset
        if self.budget < (least := len(validation) + 2 * self.batch_size):
            raise ConfigError(
                f"a budget of {self.budget} evaluations is used up before a prompt was tried: {len(validation)} "
                f"validation tasks and a round of {self.batch_size} tasks, before and after, take {least}; a search "
                "takes several times as many"
            )
        return train_dataset, validation

    def run(self, train_dataset: Dataset, val_dataset: Dataset) -> None:
        """Search, and say what was found."""
        from gepa.api import optimize

        self._tasks = {"train": train_dataset, "val": val_dataset}
        of_validation = "train" if val_dataset is train_dataset else "val"
        validation = [(of_validation, index) for index in range(len(val_dataset))]
        search = _Search(self, _Reflections(self.reflection, self.run_dir / REFLECTIONS))
        as_gepa_has_it: Any = search  # its protocols are generic in what it does not look at
        result: Any = optimize(
            {name: one.template for name, one in self.prompts.items()},
            [("train", index) for index in range(len(train_dataset))],
            validation,
            adapter=as_gepa_has_it,
            reflection_lm=search.reflect,
            reflection_prompt_template={name: self._instruction(name) for name in self.prompts},
            reflection_minibatch_size=self.batch_size,
            perfect_score=self.perfect_reward,
            max_metric_calls=self.budget,
            stop_callbacks=lambda _: search.failure is not None,
            seed=self.seed,
            logger=search,
            callbacks=[as_gepa_has_it],
            track_best_outputs=False,
        )
        if search.failure is not None:
            raise search.failure  # gepa goes on after some errors, and says them in its log alone
        self.candidates = [
            Candidate(prompts=prompts, parents=[one for one in parents if one is not None], reward=reward)
            for prompts, parents, reward in zip(
                result.candidates, result.parents, result.val_aggregate_scores, strict=True
            )
        ]
        chosen = result.candidates[result.best_idx]
        self.best = {name: PromptTemplate(chosen[name], one.engine) for name, one in self.prompts.items()}
        self.evaluations = [
            self._evaluation(name, self.tried(validation, prompts))
            for name, prompts in (
                (f"{of_validation}, the first prompts", result.candidates[0]),
                (f"{of_validation}, the best", chosen),
            )
        ]
        outcome = {"best": chosen, "candidates": self.candidates, "evaluations": self.evaluations}
        write_whole(self.run_dir / PROMPTS, msgspec.json.format(msgspec.json.encode(outcome)) + b"\n")
        for evaluation in self.evaluations:
            print(evaluation)
        tried = "1 candidate" if len(self.candidates) == 1 else f"{len(self.candidates)} candidates"
        print(f"{tried} and the best are in {self.run_dir / PROMPTS}")

    def tried(self, tasks: Sequence[Task], prompts: Prompts) -> list[RolloutTrace]:
        """The `n` finished rollouts of each task of a data set with these prompts, task by task. Those that the store
        has are not run again."""
        version = _digest(self._digest(), sorted(prompts.items()))
        [name] = {name for name, _ in tasks}
        indexes = list(dict.fromkeys(index for _, index in tasks))  # a batch may have one twice
        published = {key: PromptTemplate(text, self.prompts[key].engine).published() for key, text in prompts.items()}
        traces = self._rolled_out(
            f"prompts-{version}",
            f"{name}-{version}",
            [(index, self._tasks[name][index]) for index in indexes],
            published,
        )
        groups = {index: traces[at * self.n : (at + 1) * self.n] for at, index in enumerate(indexes)}
        return [trace for _, index in tasks for trace in groups[index]]

    @property
    def place_names(self) -> set[str]:
        """Of all prompts."""
        return set().union(*self._places.values())

    def unfit(self, name: str, text: str) -> str | None:
        """Why a text cannot stand for a prompt, None where it can: the agent fills the places of the first one."""
        try:
            new_places = places(PromptTemplate(text, self.prompts[name].engine))
        except ValueError as error:
            return f"its places cannot be read ({error})"
        missing, unknown = sorted(self._places[name] - new_places), sorted(new_places - self._places[name])
        return (
            f"it lacks the places {', '.join(missing)}" if missing
            else f"nothing fills its places {', '.join(unknown)}" if unknown
            else None
        )  # fmt: skip

    def _instruction(self, name: str) -> str:
        """What the reflection model is asked; gepa puts the prompt and the examples in."""
        written = "{{{{ {} }}}}" if self.prompts[name].engine == "jinja" else "{{{}}}"
        place_list = ", ".join(written.format(one) for one in sorted(self._places[name]))
        rule = (
            f"\nThe new prompt must hold each of these places exactly once, as they are written: {place_list}. "
            if place_list
            else ""
        )
        braces = "" if self.prompts[name].engine == "jinja" else "Other braces must be doubled. "
        return (
            "An agent is given this prompt:\n```\n<curr_param>\n```\n\nThis is what came of it on some tasks: what the "
            "agent and its model said, and how it was rewarded (higher is better).\n<side_info>\n\nWrite a better "
            "prompt. Say what the task is, what distinguishes answers that were rewarded from those that were not, and "
            "any fact about the domain that the examples show and that the model would not know. Do not repeat single "
            f"examples.\n{rule}{braces}Answer with the new prompt alone, between two lines of ```."
        )


class _Reflections:
    """The reflection model. What it answered is kept in a file, and heard again in a search that is made again."""

    def __init__(self, model: Reflection | str, file: Path) -> None:
        if isinstance(model, str):
            from gepa.lm import LM

            model = LM(model)
        self._ask = model
        self._file = file
        self._lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self._earlier: dict[str, list[str]] = defaultdict(list)  # by the prompt, in order
        for reflection in map(json.loads, self._lines):
            self._earlier[reflection["prompt"]].append(reflection["answer"])

    def __call__(self, prompt: str) -> str:
        if earlier := self._earlier[prompt]:
            return earlier.pop(0)
        answer = self._ask(prompt)
        if not isinstance(answer, str):
            raise TypeError(f"the reflection function gave a {type(answer).__name__}; it must give the answer's text")
        self._lines.append(json.dumps({"prompt": prompt, "answer": answer}))
        write_whole(self._file, "\n".join([*self._lines, ""]).encode())
        return answer


class _Search:
    """What gepa asks of us: it evaluates prompts, shows what came of them, and hears the reflection model."""

    propose_new_texts = None  # gepa's own way, by `reflect`

    def __init__(self, optimization: PromptOptimization, reflections: _Reflections) -> None:
        self._optimization = optimization
        self._reflections = reflections
        self.failure: Exception | None = None

    def evaluate(self, batch: list[Task], candidate: Prompts, capture_traces: bool = False) -> Any:
        """The mean rewards of tasks; prompts that the agent could not fill are rewarded nothing, and not tried."""
        from gepa.core.adapter import EvaluationBatch

        unfit = [f"{name}: {why}" for name, text in candidate.items() if (why := self._optimization.unfit(name, text))]
        if unfit:
            _log.warning("a new prompt is left out: %s", "; ".join(unfit))
            nothing: list[list[RolloutTrace]] = [[] for _ in batch]
            return EvaluationBatch(outputs=nothing, scores=[-math.inf] * len(batch), trajectories=nothing)
        with self._noted():
            traces = self._optimization.tried(batch, candidate)
        n = self._optimization.n
        groups = [traces[at : at + n] for at in range(0, len(traces), n)]
        with self._noted():
            scores = [_reward(group) for group in groups]
        return EvaluationBatch(
            outputs=groups,
            scores=scores,
            trajectories=groups if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: Prompts, eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """What the reflection model sees of the rollouts."""
        with self._noted():
            records = [_example(one) for group in eval_batch.trajectories for one in group]
        return dict.fromkeys(components_to_update, records)

    def reflect(self, prompt: Any) -> str:
        """A new prompt, of the model, as gepa takes it: what is between the first ``` and the last."""
        with self._noted():
            return _fenced(self._reflections(prompt), self._optimization.place_names)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note what goes wrong: gepa would log it, and go on."""
        try:
            yield
        except Exception as error:
            self.failure = error
            raise

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """Tell of a candidate, as gepa calls it."""
        parents = ", ".join(str(one) for one in event["parent_ids"] if one is not None)
        made_of = f" (from {parents})" if parents else ""
        print(f"candidate {event['candidate_idx']}{made_of}: mean reward {event['average_score']:.3f}", flush=True)

    def log(self, message: str) -> None:
        """gepa's own lines."""
        _log.debug(message)


def places(prompt: PromptTemplate) -> frozenset[str]:
    """The names that a prompt's places have. Raises ValueError for braces that do not match, and places without a
    name."""
    if prompt.engine == "jinja":
        return frozenset(_PLACES.findall(prompt.template))
    names = [
        re.split(r"[.\[]", name)[0] for _, name, *_ in string.Formatter().parse(prompt.template) if name is not None
    ]
    if unnamed := [name for name in names if not name.isidentifier()]:
        raise ValueError(f"{unnamed[0]!r} is no name; double the braces that are none of a place")
    return frozenset(names)


def _fenced(answer: str, names: Collection[str]) -> str:
    """The answer with the prompt between lines of ```, of which gepa takes what is between the first and the last.

    A prompt may show code between such lines itself. It does where a place, one of these `names`, stands outside of
    them and not between; or on both sides, and something follows.
    """
    first, last = answer.find("```"), answer.rfind("```")
    if first == last:
        return answer
    outside, between = answer[:first] + answer[last + 3 :], answer[first:last]
    around, within = ({name for name in names if re.search(rf"\{{\s*{name}\b", text)} for text in (outside, between))
    shows_code = bool(around) and (not around <= within or bool(answer[last + 3 :].strip()))
    return f"```\n{answer}\n```" if shows_code else answer


def _reward(group: Sequence[RolloutTrace]) -> float:
    """The mean reward of a task's rollouts; a failure of the agent is 0. Raises NothingMeasured where infrastructure
    ended all of them."""
    trajectories = [trajectory_of(trace, agent_failure=0.0) for trace in group]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    if rewards:
        if len(rewards) < len(group):
            _log.warning(
                "%d of %d rollouts of group %s have no reward, and are left out of its mean",
                len(group) - len(rewards),
                len(group),
                group[0].rollout.group_id,
            )
        return fmean(rewards)
    error = trajectories[0].error
    reason = "they were cancelled" if error is None else f"{error.type}: {error.message:.300}"
    raise NothingMeasured(
        f"infrastructure ended all {len(group)} rollouts of group {group[0].rollout.group_id} ({reason}): no "
        "prompt can be judged by them. A search that goes on runs them again"
    )


def _example(trace: RolloutTrace) -> dict[str, Any]:
    """A rollout as an example: the task, what was said, and how it was rewarded."""
    rollout = trace.rollout
    spans = (trace.counting or trace.attempts[-1]).spans
    feedback = f"rewards: {json.dumps(rollout.rewards)}" if rollout.rewards else "no reward"
    if rollout.error is not None:
        feedback += f"; the agent failed: {rollout.error.type}: {rollout.error.message}"
    return {
        "Task": json.dumps(rollout.task, ensure_ascii=False),
        "What was said": transcript(list(spoken_calls(spans, calls_of(spans)).values())),
        "Reward": feedback,
    }


def _digest(*values: Any) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()
