"""The policy under training: log probabilities of rows, and the PPO update.

Everything is computed at the trained tokens alone. Loss and gradient are sums of weighted token losses, so
micro-batches only say how much is computed at once.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.rl.losses import entropy, ppo_clip
from lightning_rl.training.batch import MicroBatch, MiniBatch, TrainingSequence, collate, micro_batches, mini_batches


@dataclass(frozen=True)
class ActorConfig:
    """verl's `actor_rollout_ref.actor`, resolved.

    `mini_batch_rollouts` is ppo_mini_batch_size x rollout.n; `training_steps` is the length of the run in updates;
    `log_prob_rows` are computed at once by `log_probs` (None: as many as in an update).
    """

    mini_batch_rollouts: int
    micro_batch_rows: int | None
    micro_batch_tokens: int | None
    ppo_epochs: int
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    loss_agg_mode: str
    loss_scale_factor: float | None
    entropy_coeff: float
    grad_clip: float
    lr: float
    lr_warmup_steps: int
    lr_scheduler_type: str
    min_lr_ratio: float
    training_steps: int
    betas: tuple[float, float]
    weight_decay: float
    log_prob_rows: int | None = None


class Actor:
    """A causal LM with its optimizer."""

    def __init__(self, model: nn.Module, config: ActorConfig, pad_id: int) -> None:
        self.model = model
        self.config = config
        self.optimizer_steps = 0
        self._pad_id = pad_id
        self._device = next(model.parameters()).device
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: lr_factor(step, config))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights: optimizer, schedule, count of optimizer steps."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; the model's weights must be those of the same moment."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.optimizer_steps = state["optimizer_steps"]

    @torch.inference_mode()
    def log_probs(self, sequences: list[TrainingSequence]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Per sequence the log probabilities (nats) of its trained tokens, float32 [K], at their own temperature."""
        found: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}
        rows = self.config.log_prob_rows
        for micro in (
            self._micro_batches(sequences) if rows is None else micro_batches(sequences, rows=rows, tokens=None)
        ):
            batch = collate(micro, self._pad_id, self._device)
            values, _ = self._forward(batch)
            parts = np.split(values.float().cpu().numpy(), np.cumsum([len(s.trained) for s in micro])[:-1])
            found.update({id(s): part for s, part in zip(micro, parts, strict=True)})
        return [found[id(s)] for s in sequences]

    def plan(self, sequences: list[TrainingSequence], rollouts: int) -> list[MiniBatch]:
        """The mini-batches of a step that asked for `rollouts` rollouts."""
        return mini_batches(
            sequences,
            rollouts=rollouts,
            rollouts_each=self.config.mini_batch_rollouts,
            mode=self.config.loss_agg_mode,
            scale_factor=self.config.loss_scale_factor,
        )

    def update(self, plan: list[MiniBatch]) -> dict[str, float]:
        """One PPO update over mini-batches whose `old_log_probs` are set; verl's `actor/...` metrics."""
        if not plan:
            return {}
        metrics: list[dict[str, float]] = []
        self.model.train()
        for _ in range(self.config.ppo_epochs):
            for mini in plan:
                metrics.append(self._optimizer_step(mini))
        self.model.eval()
        self._schedule.step()
        return {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}

    def accumulate(self, mini: MiniBatch) -> dict[str, float]:
        """Add the gradient of one mini-batch's loss to the parameters' `.grad`; its metrics."""
        trained = sum(len(s.trained) for s in mini.sequences)
        computed = 0  # tokens, with padding
        sums: dict[str, float] = dict.fromkeys(
            ("actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/entropy"), 0.0
        )
        for micro in self._micro_batches(mini.sequences):
            batch = collate(micro, self._pad_id, self._device)
            computed += batch.token_ids.numel()
            log_probs, entropies = self._forward(batch, with_entropy=True)
            old = self._gather(_old_log_probs(s) for s in micro)
            weights = self._gather(np.full(len(s.trained), mini.weights[s.rollout], np.float32) for s in micro)
            policy = ppo_clip(
                log_probs,
                old,
                self._gather(s.advantages for s in micro),
                clip_low=self.config.clip_ratio_low,
                clip_high=self.config.clip_ratio_high,
                clip_c=self.config.clip_ratio_c,
            )
            pg_loss = (weights * policy.loss).sum()
            loss = pg_loss
            if self.config.entropy_coeff:
                loss = loss - self.config.entropy_coeff * (weights * entropies).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                sums["actor/pg_loss"] += pg_loss.item()
                sums["actor/pg_clipfrac"] += policy.clipped.sum().item() / trained
                sums["actor/pg_clipfrac_lower"] += policy.clipped_lower.sum().item() / trained
                sums["actor/ppo_kl"] += (old - log_probs).sum().item() / trained
                sums["actor/entropy"] += entropies.sum().item() / trained
        sums["perf/padding_share"] = 1 - sum(map(len, mini.sequences)) / computed
        return sums

    def _optimizer_step(self, mini: MiniBatch) -> dict[str, float]:
        self._optimizer.zero_grad(set_to_none=True)
        metrics = self.accumulate(mini)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm.item()} after {self.optimizer_steps} optimizer steps; lower actor.optim.lr"
            )
        metrics["actor/grad_norm"] = norm.item()
        metrics["actor/lr"] = float(self._schedule.get_last_lr()[0])
        self._optimizer.step()
        self.optimizer_steps += 1
        return metrics

    def _forward(self, batch: MicroBatch, *, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Log probabilities [K] of the trained tokens, and the entropies [K] of their distributions (if asked for)."""
        logits = self.model(input_ids=batch.token_ids, use_cache=False).logits
        at = logits[batch.row, batch.position - 1].float() / batch.temperature[:, None]
        target = batch.token_ids[batch.row, batch.position]
        log_probs = torch.log_softmax(at, dim=-1).gather(-1, target[:, None]).squeeze(-1)
        if not with_entropy:
            return log_probs, log_probs
        if self.config.entropy_coeff:
            return log_probs, entropy(at)
        with torch.no_grad():
            return log_probs, entropy(at)

    def _micro_batches(self, sequences: list[TrainingSequence]) -> Iterable[list[TrainingSequence]]:
        return micro_batches(sequences, rows=self.config.micro_batch_rows, tokens=self.config.micro_batch_tokens)

    def _gather(self, parts: Iterable[np.ndarray[Any, np.dtype[np.float32]]]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(self._device)


def lr_factor(step: int, config: ActorConfig) -> float:
    """The learning rate of update `step` (from 0) as a share of `lr`: linear warm-up, then constant or cosine."""
    if step < config.lr_warmup_steps:
        return (step + 1) / (config.lr_warmup_steps + 1)
    if config.lr_scheduler_type == "constant":
        return 1.0
    if config.lr_scheduler_type != "cosine":
        raise ValueError(f"optim.lr_scheduler_type {config.lr_scheduler_type!r} is unknown; there are constant, cosine")
    done = min(1.0, (step - config.lr_warmup_steps) / max(config.training_steps - config.lr_warmup_steps, 1))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def _old_log_probs(sequence: TrainingSequence) -> np.ndarray[Any, np.dtype[np.float32]]:
    if sequence.old_log_probs is None:
        raise ValueError("old_log_probs are not set; compute them before the update")
    return sequence.old_log_probs
