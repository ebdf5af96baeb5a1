"""The base of every algorithm: it is opened with a run folder, given a store, and run on datasets."""

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lightning_rl.algorithms.asked_before import as_asked_before
from lightning_rl.algorithms.watchdog import Watchdog
from lightning_rl.data.dataset import check_task
from lightning_rl.store.contract import Rollout, RolloutRequest, RolloutTrace
from lightning_rl.store.errors import Conflict
from lightning_rl.store.run_store import TRACES_AT_ONCE, RunStore

if TYPE_CHECKING:
    from lightning_rl.agents.agent import ConfiguredAgent
    from lightning_rl.config.schema import RayActors
    from lightning_rl.runner.payload import Isolation

Dataset = Sequence[Any]  # of tasks, JSON values
T = TypeVar("T")

# Sampling from the policy as it is: what an agent asks for beside its temperature would make its tokens another's.
NEUTRAL: dict[str, float | int] = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}  # fmt: skip
_WAIT_SECONDS = 2.0  # between two looks at the processes of the run
_GATHER_SECONDS = 0.1  # rollouts are read some together: each request to the server costs the agents beside it


class Endpoint(msgspec.Struct, kw_only=True):
    """The policy as the server needs to know it: its name, how its chat format is rendered, and its engines.

    `unknown_model`: whether the policy answers for a name that nothing serves, or the call is refused.
    `history`: whether the reasoning of earlier turns is kept, or dropped where the chat format does (`template`).
    `chat_template_kwargs`: what that format is told besides the messages.
    `special_tokens_in_text`: what a special token is where a message spells it: its letters, or the token.
    `otlp_endpoint`: where every recorded span is sent, too.
    `allowed_media_domains`: the hosts from which images are fetched.
    `housekeeping`: by program, texts of its requests that are no part of the task.
    `served_as`: the name by which it is asked for, where that is not `model`, by which its chat format is known.
    `more_models`: the names of the run's other policies.
    `engines`: as `POST /api/v1/engines` takes them: `model`; `kind` (`vllm`, `sglang`, `openai`, `litellm`); `url`; and
    `api_key`, where there is one.
    Without `tokenizer` (a folder) every model is a chat backend.
    """

    model: str
    tokenizer: str | None
    renderer: str
    engines: list[dict[str, Any]]
    history: str = "keep"
    chat_template_kwargs: dict[str, Any] = {}
    special_tokens_in_text: str = "text"
    unknown_model: str = "policy"
    otlp_endpoint: str | None = None
    allowed_media_domains: list[str] = []
    housekeeping: dict[str, list[str]] = {}
    served_as: str | None = None
    more_models: list[str] = []


class Algorithm:
    """Subclass it: `prepare` checks the datasets, `open` starts the engines and says what the gateway serves, and `run`
    does the work.

    The Trainer sets `run_id` before `open`: the ids of the run's rollouts end with a dot and it. Between `open` and
    `run` it sets `store`, `began_ns` (when this session of the run began, by the server's clock) and `check`, which
    raises when one of the run's processes has died: call it while waiting, or wait with `finished`, which does.
    """

    run_id = ""
    needs_one_server = False  # whether it asks of a store more than a training run does (`RunStore`)
    shares_server = False  # whether other runs may be on the same server
    began_ns = 0

    store: RunStore
    check: Callable[[], None]
    n_runners: int | None = None  # at most so many rollouts at once, where the Trainer is not told; None: it decides
    asks_for: int | None = None  # so many rollouts are asked for at a time, of which it decides then; None: any number
    isolation: "Isolation" = "thread"  # of a rollout, where the Trainer is not told
    ray: "RayActors | None" = None  # where runners are Ray's actors
    configured_agents: "Sequence[ConfiguredAgent]" = ()  # what the configuration names as the agent
    resources: Collection[str] | None = ("main_llm",)  # the names of the models of its rollouts; None: found as it runs
    takes_parts = False  # whether it takes these two, which a script gives to the Trainer for its own algorithm
    adapter: Any = None
    initial_resources: Mapping[str, Any] | None = None
    named_run_dir: Path | None = None  # see `run_folder`
    resume = False  # whether to go on with a run folder that holds a run
    resumed_by = "trainer.resume_mode=auto (`--resume` on the command line)"  # how a user says so
    watchdog_seconds: float | None = 600.0  # without an end of any rollout, until a warning says who waits for whom
    max_restarts = 0  # how often the run is opened anew, to go on, when a process that trains has died

    def default_run_dir(self) -> Path:
        """The run folder, where nobody names one."""
        return Path("runs") / time.strftime("%Y%m%d-%H%M%S")

    def run_folder(self, folder: Path | None = None) -> Path:
        """Where the run is kept: the folder that is given, or that the configuration names, else a new one."""
        if (named := folder or self.named_run_dir) is not None:
            return named.expanduser().resolve()
        new = self.default_run_dir().resolve()
        names = (new if number == 1 else new.with_name(f"{new.name}-{number}") for number in itertools.count(1))
        return next(name for name in names if not name.exists())

    def prepare(self, train_dataset: Dataset | None, val_dataset: Dataset | None) -> tuple[Dataset, Dataset]:
        """The datasets that `run` will get, checked before anything is started. Raises for those it cannot use."""
        return train_dataset or [], val_dataset or []

    def train_only(self, agents: str) -> None:
        """Train the calls of agents whose whole name the regular expression matches. Raises TypeError where nothing is
        trained."""
        raise TypeError(f"{type(self).__name__} trains no agents, so there is no agent_match={agents!r} to make")

    def answer_for(self, names: Sequence[str]) -> None:
        """The agent asks models of these names beside `main_llm`; an algorithm with one model may let it answer."""

    def is_done(self, run_dir: Path) -> bool:
        """Whether the run in the folder, which is to be gone on with, has come to its end; who reads along is told."""
        return False

    def open(self, run_dir: Path) -> Endpoint:
        """Start what must run before the server; the policy's endpoint."""
        raise NotImplementedError(f"{type(self).__name__} defines no open(run_dir)")

    def run(self, train_dataset: Dataset, val_dataset: Dataset) -> None:
        """Do the work; returns when it is done."""
        raise NotImplementedError(f"{type(self).__name__} defines no run(train_dataset, val_dataset)")

    def served_name(self, model: str) -> str:
        """The name by which a model of this run is asked for: on a shared server, one that no other run has."""
        return f"{model}-{self.run_id}" if self.shares_server else model

    def watch(self) -> None:
        """Raise where something that `open` started has died. Part of `check`."""

    def close(self) -> None:
        """Stop what `open` started. Called also after an error."""

    def finished(self, requests: Sequence[RolloutRequest], read: Callable[[RolloutTrace], T]) -> list[T]:
        """Ask for rollouts and wait; what `read` makes of each, in that order.

        `read` is called as they end, while others still run.
        """
        ids = [rollout.rollout_id for rollout in self.ask(requests)]
        waiting = set(ids)
        watchdog = Watchdog(self.store, self.watchdog_seconds)
        ended: dict[str, T] = {}
        while waiting:
            gather = _GATHER_SECONDS * len(waiting) / len(ids)
            finished = [one.rollout_id for one in self.ended(sorted(waiting), watchdog, gather_seconds=gather)]
            for start in range(0, len(finished), TRACES_AT_ONCE):
                traces = self.store.traces(finished[start : start + TRACES_AT_ONCE])
                ended |= {rollout_id: read(trace) for rollout_id, trace in traces.items()}
            waiting.difference_update(finished)
        return [ended[rollout_id] for rollout_id in ids]

    def ask(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Ask for rollouts; those that were asked for before are as they were then. Raises TaskError for a task that is
        no JSON value, and OtherTask."""
        for request in {id(request.task): request for request in requests}.values():  # a group has one task
            check_task(request.task, f"the task of rollout {request.rollout_id}")
        try:
            return self.store.enqueue(requests)
        except Conflict:  # of a run that was cut off, and is resumed with other keys
            return self.store.enqueue(as_asked_before(requests, self.store))

    def ended(
        self,
        waiting: Sequence[str],
        watchdog: Watchdog,
        wait_seconds: float = _WAIT_SECONDS,
        gather_seconds: float = 0.01,
    ) -> list[Rollout]:
        """One turn of a wait: those of the rollouts `waiting` that have ended, as soon as any has; [] when the time is
        up (see `RunStore.wait`). Raises where a process of the run has died."""
        self.check()
        finished = self.store.wait(waiting, wait_seconds, gather_seconds)
        watchdog.look(waiting, any_ended=bool(finished))
        return finished
