"""Some training steps on made-up rows, told by one process or by each of a team: what they come to must be the same."""

import copy
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from lightning_rl.config import compose
from lightning_rl.inference.load import load_model
from lightning_rl.ppo.local_workers import LocalWorkers, by_slices, roles_of, trained
from lightning_rl.training import shards
from lightning_rl.training import state as states
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.distributed.process_group import ProcessGroup
from lightning_rl.training.layers import output_layer
from lightning_rl.training.teacher import ask_teachers
from lightning_rl.vision import PlacedImage, vision_of
from tests.seeing import PAD, picture

CHECKPOINT = Path(__file__).parents[4] / "examples" / "sql_agent" / "checkpoint"


SHOWN = {picture(1, 16, 24): 6, picture(2, 40, 16): 10}  # images, and the tokens that stand for each


def rows_with_images(seed: int, rollouts: int = 4) -> list[TrainingSequence]:
    """Rollouts of one row, of which about half show one or two images; of an odd seed, the first two are text alone."""
    rng = np.random.default_rng(seed)
    found = []
    for rollout in range(rollouts):
        token_ids, images = list(rng.integers(10, 250, 4)), []
        for data in sorted(SHOWN)[: rng.integers(0, 3) if rollout > 1 or seed % 2 == 0 else 0]:
            images.append(PlacedImage(len(token_ids), SHOWN[data], sha256(data).hexdigest(), data))
            token_ids += [PAD] * SHOWN[data] + [7]
        trained = np.arange(len(token_ids), len(token_ids) + rng.integers(2, 20))
        token_ids += list(rng.integers(10, 250, len(trained)))
        some = np.ones(len(trained), np.float32)
        found.append(
            TrainingSequence(
                rollout=rollout,
                token_ids=np.array(token_ids),
                trained=trained,
                rollout_log_probs=-3 * some,
                advantages=rng.normal(size=len(trained)).astype(np.float32),
                temperature=some,
                returns=rng.normal(size=len(trained)).astype(np.float32),
                calls={f"{rollout}": int(trained[0])},
                images=tuple(images),
            )
        )
    return found


def rows(seed: int, rollouts: int = 4) -> list[TrainingSequence]:
    """Rollouts of one to three rows that begin alike, of very different lengths."""
    rng = np.random.default_rng(seed)
    found = []
    for rollout in range(rollouts):
        begins = rng.integers(10, 900, 6)
        for _ in range(rng.integers(1, 4)):
            token_ids = np.concatenate([begins, rng.integers(10, 900, rng.integers(2, 30))])
            trained = np.arange(6, len(token_ids))
            some = np.ones(len(trained), np.float32)
            found.append(
                TrainingSequence(
                    rollout=rollout,
                    token_ids=token_ids,
                    trained=trained,
                    rollout_log_probs=-3 * some,
                    advantages=rng.normal(size=len(trained)).astype(np.float32),
                    temperature=some,
                    returns=rng.normal(size=len(trained)).astype(np.float32),
                    calls={f"{rollout}-{len(found)}": 6},
                )
            )
    return found


@dataclass
class Story:
    """What happens: `changes` are keys of the config, beside small sizes; each of `seeds` is a step."""

    changes: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    with_critic: bool = False
    dtype: torch.dtype = torch.float32
    rollouts: int = 4
    begin: dict[str, Any] | None = None  # `Told.end` of another
    begin_at: Path | None = None  # or what another has left there
    sliced: bool = False  # each worker reads its part alone
    leave_at: Path | None = None  # where its end is written too, by the worker that has each part
    seeing: Path | None = None  # a model whose rows show images
    logits_at_once: int = output_layer.ROWS_CHUNK


@dataclass
class Told:
    """What came of it."""

    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    end: dict[str, Any]
    numbers: list[Any]


class Teller:
    """One of a team, or alone."""

    def __init__(self, team: ProcessGroup | None) -> None:
        self._team = team

    def tell(self, story: Story) -> Told:
        with patch.object(output_layer, "ROWS_CHUNK", story.logits_at_once):
            return self._tell(story)

    def _tell(self, story: Story) -> Told:
        keys = {
            "actor_rollout_ref.rollout.n": 1,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 48,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "critic.optim.lr": 1e-3,
            **story.changes,
        }
        for section in ("actor_rollout_ref.actor", "critic"):
            if f"{section}.optim.optimizer" not in keys:  # else Adam makes whole steps of what rounding leaves
                keys[f"{section}.optim.override_optimizer_config"] = "{eps: 1e-4}"
        config = compose(command_line=[f"{key}={value}" for key, value in keys.items()])
        folder = story.seeing or CHECKPOINT
        if story.sliced:
            model, files = by_slices(folder, story.dtype, None)
        else:
            model, files = load_model(folder, story.dtype), None
        roles = roles_of(config, with_critic=story.with_critic)
        made = LocalWorkers(config, model, roles, vision_of(folder, model), files)
        made.train(folder, 10, self._team)
        if story.begin is not None:
            begin = copy.deepcopy(story.begin)  # an optimizer trains on in the state that it is given
            shards.put(begin["weights"], trained(made.model))
            made.load_state_dict(begin["state"])
        if story.begin_at is not None:
            found = states.opened(story.begin_at)
            shards.put(found["weights"], trained(made.model))
            made.load_state_dict(found["state"])
        metrics, numbers = [], []
        for seed in story.seeds:
            batch = (rows if story.seeing is None else rows_with_images)(seed, story.rollouts)
            found, asked = self._step(made, batch)
            metrics.append(found)
            numbers.append(asked)
        weights = made.weights()
        if story.leave_at is not None:
            own = {"weights": trained(made.model), "state": made.state_dict()}
            states.write(story.leave_at, own, None if self._team is None else self._team.talk)
        return Told(metrics, weights, {"weights": weights, "state": shards.whole(made.state_dict())}, numbers)

    def _step(self, made: LocalWorkers, batch: list[TrainingSequence]) -> tuple[dict[str, float], Any]:
        assert made.actor is not None
        metrics: dict[str, float] = {}
        asked: dict[str, Any] = {"log probs": made.actor.log_probs(batch)}
        if made.reference is not None:
            asked["reference"] = made.reference.log_probs(batch)
        if made.critic is not None:
            asked["values"] = made.critic.values(batch)
        elif "value head" in made.roles:
            asked["values"] = made.actor.values(batch)
        for name in made.teachers:
            ask_teachers(batch, {name: made.teachers[name]}, lambda *_, name=name: name, 4)
            asked[f"teacher {name}"] = [sequence.teacher_log_probs for sequence in batch]
        for number, sequence in enumerate(batch):
            sequence.old_log_probs = asked["log probs"][number]
            sequence.reference_log_probs = asked["reference"][number] if "reference" in asked else None
            sequence.values = asked["values"][number] if "values" in asked else None
        rollouts = max(s.rollout for s in batch) + 1
        if made.critic is not None:
            metrics |= made.critic.update(made.critic.plan(batch, rollouts))
        plan = made.actor.plan(batch, rollouts)
        if len(plan) == 1 and not made.actor.prepare(batch):
            for sequence in batch:
                sequence.old_log_probs = None  # the update finds them
        metrics |= made.actor.update(plan)
        asked["old log probs"] = [sequence.old_log_probs for sequence in batch]
        made.average_teachers()
        asked["entropies"] = [s.entropies.float().numpy() for s in batch if s.entropies is not None]
        assert len(asked["entropies"]) == len(batch)
        return metrics, asked
