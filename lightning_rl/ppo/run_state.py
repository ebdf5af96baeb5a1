"""What a run's checkpoint holds beside the weights: counters, token accounts, tuning record, random numbers.

Invariant: a run that resumes from a checkpoint continues as if it had never stopped. What is in no checkpoint (the
session's id, its first version) is read anew when a run is opened.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from lightning_rl.config import ConfigError, keys
from lightning_rl.config.schema import Config
from lightning_rl.rl.kl import AdaptiveKL, FixedKL
from lightning_rl.telemetry import made_with
from lightning_rl.training import checkpoint
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.token_account import TokenAccount

_OF_UPDATES = ("actor_rollout_ref.actor.", "algorithm.", "critic.")  # keys that say what one makes of rollouts
_OF_MEMORY = ("_offload", "_per_gpu", "use_torch_compile", "enable_gradient_checkpointing")  # ends of keys
_log = logging.getLogger(__name__)


class TuningRecord:
    """The best step so far, and when to stop looking for a better one: what the rewards on a tuning set say of a run.

    They go by the tuning set alone: a validation set that a choice was made by would no longer be one.

    Args:
        patience: end after so many measurements in a row without a rise that counts; None: never early.
        min_delta: a rise counts where it is more than this, above the last one that counted.
    """

    def __init__(self, patience: int | None = None, min_delta: float = 0.0) -> None:
        self.patience = patience
        self.min_delta = min_delta
        self.best_step: int | None = None
        self.best_reward = -math.inf
        self._reference = -math.inf  # the last reward that counted as a rise
        self._without_rise = 0
        self._last = -math.inf

    def measured(self, step: int, reward: float | None) -> bool:
        """Enter the mean reward on the tuning tasks after `step`; whether it is the best so far (the first of equals).

        However little it is better by, the best is the best; `min_delta` is a matter of patience alone. None, where no
        rollout had a reward, says nothing.
        """
        if reward is None:
            return False
        best = reward > self.best_reward
        if best:
            self.best_step, self.best_reward = step, reward
        if reward > self._reference + self.min_delta:
            self._reference, self._without_rise = reward, 0
        else:
            self._without_rise += 1
        self._last = reward
        return best

    @property
    def stop(self) -> str | None:
        """Why the run ends here, in a sentence; None where it goes on."""
        if self.patience is None or self._without_rise < self.patience:
            return None
        least = f" by more than {self.min_delta:g}" if self.min_delta else ""
        times = "measurement" if self._without_rise == 1 else f"{self._without_rise} measurements"
        best = "" if self.best_step is None else f"; the best is {self.best_reward:.4g}, of step {self.best_step}"
        return f"the reward on the tuning tasks, now {self._last:.4g}, has not risen{least} in the last {times}{best}"

    def state_dict(self) -> dict[str, Any]:
        """What was measured, for a checkpoint; patience and min_delta are the config's."""
        return {
            "best_step": self.best_step,
            "best_reward": self.best_reward,
            "reference": self._reference,
            "without_rise": self._without_rise,
            "last": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.best_step, self.best_reward = state["best_step"], state["best_reward"]
        self._reference, self._without_rise = state["reference"], state["without_rise"]
        self._last = state["last"]


def changes_to_warn_of(config: Config, run_dir: Path, step: int) -> Iterator[str]:
    """What is said where a run goes on with another `model.path` than it had, since its weights are its checkpoint's,
    with keys that put the tasks into another order, with keys that make other weights in the steps that are done anew
    than sampled what the store has of these, and with other versions, threads or GPUs."""
    if not (file := run_dir / "config.yaml").is_file():
        return
    had, model = yaml.safe_load(file.read_text(encoding="utf-8")), config.actor_rollout_ref.model
    if other := ", ".join(made_with.changes(run_dir)):
        yield f"the run goes on with {other}: the last bits of its numbers may be other than without a stop"
    began_with = had["actor_rollout_ref"]["model"]["path"]
    if began_with != model.path and not model.lora_rank:  # the weights below an adapter are in no checkpoint
        yield (
            f"actor_rollout_ref.model.path={model.path} changes no weights of a run that goes on, which has those of "
            f"its checkpoint (it began with {began_with}): to train another model begin a new run"
        )
    for name in ("train_batch_size", "shuffle", "seed"):
        if (now := getattr(config.data, name)) != had["data"][name]:
            yield (
                f"data.{name}={now} (it was {had['data'][name]}) puts the tasks into another order: of the epoch in "
                "which this run goes on some are trained twice, and some not at all"
            )
    before = OmegaConf.create(had)
    of_updates = [key.name for key in keys(type(config)) if key.name.startswith(_OF_UPDATES)]
    now = {name: attrgetter(name)(config) for name in of_updates if not name.endswith(_OF_MEMORY)}
    # None is chosen by the model, as it was before.
    changed = [
        name
        for name, value in now.items()
        if value is not None and OmegaConf.select(before, name, default=value) != value
    ]
    done_before = step_record.furthest(run_dir)
    if changed and done_before > step:
        yield (
            f"{', '.join(changed)}: changed, and steps {step + 1} to {done_before} were done before with other values. "
            "Rollouts of these steps that the store has are trained on as they are, though from the second step on "
            "other weights sampled them. To sample all anew begin a new run from the checkpoint "
            "(trainer.resume_mode=resume_path, trainer.resume_from_path)"
        )


def begin_from(source: Path, run_dir: Path) -> Path:
    """Copy the checkpoint of another run into the folder of one that begins with it; returns the copy.

    The new run has tokens of its own to account for, and none of the other's checkpoints; all else goes on.
    Raises CheckpointError where it cannot be written.
    """
    state = checkpoint.load_state(source)
    for of_policy in state["policies"].values() if "policies" in state else (state,):
        of_policy["account"] = TokenAccount("").state_dict()
    if state["tuning"]["best_step"] != state["step"]:
        state["tuning"] = TuningRecord().state_dict()
    folder = run_dir / "checkpoints" / f"step-{state['step']}"
    return checkpoint.save(folder, export=partial(checkpoint.copy_model, source), state=state)


class PolicyState:
    """The state of one policy of a run; `policy_version` is the number of its weight updates.

    Args:
        kl_controller: what says how much of the distance from the reference is taken off the rewards; None: nothing.
        model: the name of the model that its engines sample.
    """

    def __init__(self, kl_controller: FixedKL | AdaptiveKL | None, model: str) -> None:
        self.kl_controller = kl_controller
        self.account = TokenAccount(model)
        self.policy_version = 0

    @property
    def kl_coef(self) -> float:
        """How much of the distance from the reference is taken off the rewards."""
        return 0.0 if self.kl_controller is None else self.kl_controller.value

    def update_kl_coef(self, kl: float | None, rollouts: int) -> None:
        """Adapt `kl_coef` to the distance `kl` of a step with so many rollouts; None: it was not measured."""
        if self.kl_controller is not None and kl is not None:
            self.kl_controller.update(kl, rollouts)

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        return {
            "policy_version": self.policy_version,
            "account": self.account.state_dict(),
            "kl_coef": self.kl_coef if isinstance(self.kl_controller, AdaptiveKL) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.policy_version = state["policy_version"]
        self.account.load_state_dict(state["account"])
        # What is adapted goes on; what is fixed is the configuration's. Earlier releases wrote 0 for no controller.
        if isinstance(self.kl_controller, AdaptiveKL) and state["kl_coef"]:
            self.kl_controller.value = state["kl_coef"]


class RunState:
    """The state of one run, from the moment it is opened.

    Args:
        config: the run's.
        run_dir: its folder.
        resumed_from: the checkpoint that the run continues from; None: it starts fresh.

    `step` is the current step, `updates` the number of steps that updated any policy, `batches_taken` the number of
    training batches whose tasks were used. `in_flight` has the groups that the resumed run had in flight. `run_id` ends
    the ids of the run's rollouts; `began_ns` says when this session began.
    """

    def __init__(self, config: Config, run_dir: Path = Path(), resumed_from: Path | None = None) -> None:
        stopping = config.trainer.early_stopping
        self.run_dir = run_dir
        self.tuning = TuningRecord(patience=stopping.patience, min_delta=stopping.min_delta)
        self.step = 0
        self.updates = 0
        self.batches_taken = 0
        self._tasks: int | None = None
        self.in_flight: dict[str, Any] | None = None
        self.run_id = ""
        self.began_ns = 0
        self.resumed = resumed_from is not None
        self._keep = config.trainer.max_actor_ckpt_to_keep
        self._saved = None if resumed_from is None else checkpoint.open_state(resumed_from)
        if self._saved is not None and "batches_taken" not in self._saved:
            raise ConfigError(
                f"{resumed_from} is a checkpoint of SFT: go on with it by `lightning-rl sft --resume {run_dir}`, or "
                f"train what it has learned, in another run folder, by actor_rollout_ref.model.path={resumed_from}"
            )
        for warning in () if self._saved is None else changes_to_warn_of(config, run_dir, self._saved["step"]):
            _log.warning("%s", warning)

    def saved_version(self, policy: str) -> int:
        """The policy version of the checkpoint that the run continues from; 0 for a fresh run."""
        return 0 if self._saved is None else int(_of_policies(self._saved)[policy]["policy_version"])

    def check_policies(self, names: Sequence[str]) -> None:
        """Raises ConfigError where the checkpoint that the run continues from is of other policies; an only one has no
        name."""
        if self._saved is None or (there := sorted(_of_policies(self._saved))) == sorted(names):
            return
        has, asks = (
            "one policy, which has no name" if each == [""] else f"the policies {', '.join(each)}"
            for each in (there, sorted(names))
        )
        raise ConfigError(
            f"the checkpoint has {has}, and the config {asks}: resume with the config.yaml of the run's folder"
        )

    def restore(self, load: Mapping[str, Callable[[Mapping[str, Any]], None]], *, synchronous: bool) -> None:
        """Load the checkpoint into this state, and what it has of each policy by `load`; a fresh run has none.

        Raises ConfigError where a `synchronous` schedule would drop rollouts in flight, or the models differ.
        """
        if (saved := self._saved) is None:
            return
        self._saved = None
        self.step = saved["step"]
        self.updates = saved["updates"] if "updates" in saved else saved["policy_version"]  # of earlier releases
        self.batches_taken = saved["batches_taken"]
        self._tasks = saved.get("tasks")
        self.in_flight = saved.get("in_flight")
        if synchronous and self.in_flight is not None and self.in_flight["groups"]:
            raise ConfigError(
                "the checkpoint has rollouts in flight, and trainer.schedule=sync would drop them: resume with the "
                "config.yaml of the run's folder"
            )
        self.tuning.load_state_dict(saved["tuning"])
        for policy, of_policy in _of_policies(saved).items():
            load[policy](of_policy)
        checkpoint.set_rng_state(saved["rng"])

    def begin_session(self, run_id: str, began_ns: int) -> None:
        """Note the run's id, and when this session of it began, by the server's clock; steps behind the one that it
        goes on from are to be made anew."""
        self.run_id = run_id
        if not self.step and (before := step_record.furthest(self.run_dir)):
            _log.warning(
                "the run in %s has no whole checkpoint, so it begins with step 1 again; it had got to step %d "
                "(trainer.save_freq=N saves one every N steps)",
                self.run_dir,
                before,
            )
        step_record.set_aside(self.run_dir, after=self.step)
        self.began_ns = began_ns  # calls before it are of earlier sessions

    def note_tasks(self, tasks: int, *, shuffled: bool) -> None:
        """Note how many tasks the training set has, and warn where it had others when the run was saved, and they are
        shuffled."""
        if shuffled and self._tasks not in (None, tasks):
            _log.warning(
                "the training set has %d tasks (it had %d), so they are in another order: of the epoch in which this "
                "run goes on some are trained twice, and some not at all",
                tasks,
                self._tasks,
            )
        self._tasks = tasks

    def save(
        self,
        export: Callable[[Path], None],
        of_policies: Mapping[str, dict[str, Any]],
        in_flight: dict[str, Any] | None,
    ) -> Path:
        """Write a checkpoint that `transformers` loads and that a run resumes from; returns its folder.

        `export` writes the models, `of_policies` are the states of policies; that of an only one has no name. Prunes
        older ones, but never the best step's.
        """
        folder = self.folder(self.step)
        folder.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "updates": self.updates,
            "batches_taken": self.batches_taken,
            "tasks": self._tasks,
            "in_flight": in_flight,
            "tuning": self.tuning.state_dict(),
            "rng": checkpoint.rng_state(),
        } | (of_policies[""] if "" in of_policies else {"policies": dict(of_policies)})
        saved = checkpoint.save(folder, export=export, state=state)
        best = () if self.tuning.best_step is None else (self.folder(self.tuning.best_step),)
        checkpoint.prune(folder.parent, self._keep, protect=best)
        return saved

    def export_final_model(self) -> None:
        """Make the run folder's `model` from the best step's checkpoint, else from the last one."""
        best = self.tuning.best_step
        checkpoint.final_model(self.run_dir, self.folder(self.step if best is None else best))

    def folder(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.run_dir / "checkpoints" / f"step-{step}"


def _of_policies(saved: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """What a checkpoint has of each policy; "" is an only one."""
    return saved.get("policies") or {"": saved}
