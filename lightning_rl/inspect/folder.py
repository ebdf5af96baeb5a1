"""What lies in a run's folder beside its store: its config, its step records, its model's tokenizer.

Invariant: nothing is fetched from a network and nothing is written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import msgspec

from lightning_rl import tutorial
from lightning_rl.config import read_back
from lightning_rl.config.schema import TrainConfig
from lightning_rl.files import TOKENIZER_FOLDER
from lightning_rl.inspect.recorded import NotRecorded
from lightning_rl.inspect.trained import TrainedBy, TrainingRecord
from lightning_rl.store.contract import Rollout, RolloutTrace
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.call_filter import selection
from lightning_rl.trajectories.step_record import StepRecord
from lightning_rl_adapters.conventions import spans_with_otel
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer

CONFIG = "config.yaml"
_TOKENIZER = "tokenizer.json"


def config_of(run_dir: Path) -> TrainConfig | None:
    """The run's keys; None where it was no training."""
    return read_back(run_dir / CONFIG, TrainConfig) if (run_dir / CONFIG).is_file() else None


@dataclass(frozen=True)
class FolderContext:
    """What a run's folder says of one rollout: the run's keys, the `record` of the step that trained it, or why
    it is `not_recorded` (both None where the run is no training)."""

    config: TrainConfig | None
    record: TrainingRecord | None
    not_recorded: str | None


def beside(run_dir: Path, rollout: Rollout) -> FolderContext:
    """Everything in the folder that explains a rollout."""
    config = config_of(run_dir)
    return FolderContext(config, *_record_of(run_dir, config, rollout))


def trained_by(
    config: TrainConfig | None, record: TrainingRecord | None = None, not_recorded: str | None = None
) -> TrainedBy:
    """What the run's own keys say of its rows, and the record of a rollout's step.

    A function that a script gave (`PPO(select=...)`) is not recorded, but what it left out is in the step's record.
    """
    if config is None:
        return TrainedBy(record=record, not_recorded=not_recorded)
    return TrainedBy(
        max_tokens=config.data.max_tokens if config.data.overlong.startswith("drop") else None,
        select=selection(config.algorithm.train_agents, None),
        record=record,
        not_recorded=not_recorded,
        sampler_is_old=config.algorithm.rollout_correction.bypass_mode,
    )


def with_trained_calls(config: TrainConfig | None, trace: RolloutTrace) -> RolloutTrace:
    """The trace with every call that the run trains on: those of agents' own spans too, where it trusts these."""
    if config is None or not config.algorithm.train_spans:
        return trace
    attempts = [msgspec.structs.replace(each, spans=spans_with_otel(each.spans)) for each in trace.attempts]
    return msgspec.structs.replace(trace, attempts=attempts)


def steps(run_dir: Path, newest: int, policy: str | None = None, *, until: int | None = None) -> list[StepRecord]:
    """The run's newest step records, in order, of all policies or of one (`step_record.read_all`). Raises NotRecorded
    where one cannot be read."""
    try:
        return list(step_record.read_all(run_dir, newest=newest, until=until, policy=policy))
    except step_record.UnreadableRecord as error:
        raise NotRecorded(str(error)) from error


def decoder(run_dir: Path, config: TrainConfig | None) -> Callable[[list[int]], str] | None:
    """What makes text of token ids: the tokenizer of the run's model, None where it is not on this machine."""
    folder = tokenizer_folder(run_dir, config)
    return None if folder is None else FastTokenizer(folder).decode


def tokenizer_folder(run_dir: Path, config: TrainConfig | None) -> Path | None:
    """The folder of the tokenizer of the run's model; None where it is not on this machine, or not known."""
    if (run_dir / TOKENIZER_FOLDER / _TOKENIZER).is_file():  # of a baseline, which makes no checkpoints
        return run_dir / TOKENIZER_FOLDER
    checkpoints = run_dir / "checkpoints"
    written = [file.parent for file in checkpoints.glob(f"step-*/{_TOKENIZER}")]
    written = written or [file.parent for file in checkpoints.glob(f"step-*/*/{_TOKENIZER}")]  # of several policies
    if written:
        return written[0]  # training changes no tokenizer
    if config is None:
        return None
    path = config.actor_rollout_ref.model.path
    folder = tutorial.checkpoint() if path is None else Path(path)
    if folder.is_dir():
        return folder if (folder / _TOKENIZER).is_file() else None
    if path is None or path.count("/") != 1 or path.startswith((".", "/")):
        return None
    cached = huggingface_hub.try_to_load_from_cache(path, _TOKENIZER)
    return Path(cached).parent if isinstance(cached, str) else None


def _record_of(run_dir: Path, config: TrainConfig | None, rollout: Rollout) -> tuple[TrainingRecord | None, str | None]:
    try:
        step, ahead = rollout.metadata.get("step", 0), bool(rollout.metadata.get("ahead"))
        record = step_record.find(run_dir, rollout.rollout_id, step, ahead=ahead)
    except step_record.UnreadableRecord as error:
        raise NotRecorded(str(error)) from error
    if record is not None or config is None or rollout.mode != "train":
        return record, None
    if not any((run_dir / step_record.FOLDER).glob("*.msgpack")):
        return None, "there are no step records: the run is from before they were kept, or its first step is not done"
    return None, "no step of the run has trained on it, or not yet"
