"""The policy under training: log probabilities of rows, and the PPO update.

Everything is computed at the trained tokens alone. Loss and gradient are sums of weighted token losses, so
micro-batches only say how much is computed at once. A loss that must know the whole mini-batch is told so beforehand
(`prepare`), by a pass without gradient.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.rl.distillation import DistillationOptions, Taught, distillation_loss, policy_gradient
from lightning_rl.rl.kl import kl_penalty
from lightning_rl.rl.losses import LossInputs, LossOptions, loss_named, token_loss_of
from lightning_rl.training.batch import MiniBatch, TrainingSequence, by_sequence, canonical_order, sequences_of
from lightning_rl.training.critic import values_of, weighted_value_loss
from lightning_rl.training.forward import Forward, Outputs, Sizes
from lightning_rl.training.learner import Learner, LearnerConfig, add_up, means
from lightning_rl.training.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class ActorConfig(LearnerConfig, LossOptions):
    """verl's `actor_rollout_ref.actor`, resolved; `loss_mode` names one of `rl.losses.LOSSES`, with its options.

    `log_prob_rows` are computed at once by `log_probs` (None: as many as in an update). With `kl_loss_coef`, sequences
    need `reference_log_probs`. With `shuffle`, mini-batches come in another order in every pass. With a value head (a
    shared trunk) values are trained in the same update, the value loss counts `value_coef` times, and sequences need
    `values` and `returns`; `cliprange_value` bounds them. With `param_offload` the weights wait from `offload` on. With
    `distillation` sequences need what its teacher says of their tokens.
    """

    entropy_coeff: float
    log_prob_rows: int | None = None
    loss_mode: str = "vanilla"
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    shuffle: bool = False
    value_coef: float = 0.0
    cliprange_value: float = 0.5
    distillation: DistillationOptions | None = None


_OF_TAUGHT = ("distillation/teacher_mass", "distillation/student_mass")
_ADVICE = "the model's logits or their advantages are no numbers; lower actor.optim.lr, or look at the last checkpoint"


class Actor(Learner):
    """A causal LM with its optimizer, which trains those of its parameters that require a gradient.

    Args:
        model: a causal LM of transformers, or one with an adapter (`training.lora`).
        pad_id: what fills rows up.
        forward: how `model` is run; by default as it is.
        value_head: reads values from the model's last hidden states and is trained with it (a shared trunk).
    """

    def __init__(
        self,
        model: nn.Module,
        config: ActorConfig,
        pad_id: int,
        forward: Forward | None = None,
        value_head: nn.Linear | None = None,
    ) -> None:
        self.model = model
        self.value_head = value_head
        self.config: ActorConfig = config
        self.forward = forward or Forward(model, pad_id)
        of_values = [] if value_head is None else list(value_head.parameters())
        self.optimizer = Optimizer([*model.parameters(), *of_values], config.optim)
        self._loss = loss_named(config.loss_mode)
        self._device = self.forward.device

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights: optimizer, schedule, count of optimizer steps."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; the model's weights must be those of the same moment."""
        self.optimizer.load_state_dict(state)
        if self.config.optimizer_offload:
            self.optimizer.offload()

    def offload(self) -> None:
        """With `param_offload`, let the weights wait in main memory; on a CPU they are there anyway."""
        if self.config.param_offload:
            self.model.to("cpu")

    def onload(self) -> None:
        """Bring the weights back to their device; `log_probs` and `update` do so by themselves."""
        if self.config.param_offload:
            self.model.to(self._device)

    def values(self, sequences: list[TrainingSequence]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Per sequence the values of its trained tokens, float32 [K], by the value head."""
        self.onload()
        with self.forward.without_gradient():
            by_id = by_sequence(self._micro_batches(sequences), lambda micro: self._valued(self.forward.hidden(micro)))
            return self.forward.gathered(sequences, by_id)

    def log_probs(self, sequences: list[TrainingSequence]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Per sequence the log probabilities (nats) of its trained tokens, float32 [K], at their own temperature."""
        self.onload()  # not in inference mode: no gradient could be taken of weights that were copied in it
        rows = self.config.log_prob_rows
        with self.forward.without_gradient():
            micro = self._micro_batches(sequences)
            cut = micro if rows is None else self.forward.micro_batches(sequences, rows=rows, tokens=None)
            return [values.float().cpu().numpy() for values in self._log_probs(sequences, cut)]

    def update(self, plan: list[MiniBatch], *, values_alone: bool = False) -> dict[str, float]:
        """One PPO update; verl's `actor/...` metrics, and `actor/first_k3_kl`: the distance from the old log
        probabilities before anything was changed.

        A plan of one mini-batch needs no `old_log_probs`: those that its first pass finds are the old ones, and its
        sequences are given them. With `values_alone` the value head learns, and the policy stays with its schedules
        (critic warm-up of a shared trunk).
        """
        if not plan:
            return {}
        if len(plan) > 1 and not values_alone and any(s.old_log_probs is None for s in sequences_of(plan)):
            raise ValueError(
                "old_log_probs are not set, and only of one mini-batch the update finds them itself: compute them"
            )
        step = self._value_step if values_alone else self._optimizer_step
        metrics: list[dict[str, float]] = []
        self.onload()
        self.optimizer.onload()
        self.model.train()
        for _ in range(self.config.ppo_epochs):
            for mini in self._order(plan):
                metrics.append(step(mini))
        self.model.eval()
        if not values_alone:
            self.optimizer.schedule_step()
        if self.config.optimizer_offload:
            self.optimizer.offload()
        first = {} if values_alone else {"actor/first_k3_kl": metrics[0]["actor/ppo_k3_kl"]}
        mean_metrics = means(metrics)
        if share := mean_metrics.get("distillation/taught_share", 0.0):
            # What is told of tokens that have a teacher is a mean over these.
            mean_metrics |= {name: mean_metrics[name] / share for name in _OF_TAUGHT if name in mean_metrics}
        return mean_metrics | first

    @torch.no_grad()
    def prepare(self, sequences: list[TrainingSequence]) -> dict[int, Tensor]:
        """What the loss must know of a whole mini-batch: by a sequence's `id` the constants [K] of its trained tokens.

        Nothing, and no forward pass, for a loss that needs nothing.
        """
        if self._loss.prepare is None:
            return {}
        parts = self._log_probs(sequences, self._micro_batches(sequences))
        tokens = self._tokens(sequences, torch.cat(parts).to(self._device))
        order = torch.from_numpy(canonical_order(sequences)).to(self._device)
        generator = torch.Generator().manual_seed(self.optimizer.steps)
        constants = torch.empty_like(tokens.log_probs)
        constants[order] = self._loss.prepare(tokens.take(order), self.config, generator)
        return {id(s): own for s, own in zip(sequences, torch.split(constants, [len(p) for p in parts]), strict=True)}

    def accumulate(self, mini: MiniBatch, constants: Mapping[int, Tensor] | None = None) -> dict[str, float]:
        """Add the gradient of one mini-batch's loss to the parameters' `.grad`; its metrics. In the first pass each of
        its sequences is given its `entropies`, and where none has any its `old_log_probs`.

        `constants` are `prepare`'s of the whole mini-batch, where `mini` holds a part of its sequences alone.
        """
        constants = self.prepare(mini.sequences) if constants is None else constants
        trained = sum(len(s.trained) for s in mini.sequences)
        first_pass, entropies_of = any(s.entropies is None for s in mini.sequences), dict[int, Tensor]()
        finds_old, old_of = all(s.old_log_probs is None for s in mini.sequences), dict[int, Tensor]()
        sums = dict.fromkeys(Sizes._fields, 0.0)
        for micro in self._micro_batches(mini.sequences):
            sums |= {name: sums[name] + size for name, size in self.forward.sizes(micro)._asdict().items()}
            out = self.forward.outputs(
                micro, candidates=self._teachers_choice(micro), with_hidden=self.value_head is not None
            )
            log_probs, entropies = out.log_probs, out.entropies
            if first_pass:
                entropies_of |= _by_id(micro, entropies.detach())
            if finds_old:
                old_of |= _by_id(micro, log_probs.detach())
            tokens = self._tokens(micro, log_probs, constants, log_probs.detach() if finds_old else None)
            weights = self._gather(np.full(len(s.trained), mini.weights[s.rollout]) for s in micro)
            policy = token_loss_of(self.config.loss_mode, self._loss, tokens, self.config)
            pg_loss = (weights * self._importance(micro) * policy.loss).sum()
            loss = pg_loss
            if self.config.entropy_coeff:
                loss = loss - self.config.entropy_coeff * (weights * entropies).sum()
            shares = {"actor/pg_loss": pg_loss}
            if self.config.kl_loss_coef:
                reference = self._gather(_finite_values(s, "reference_log_probs") for s in micro)
                penalty = kl_penalty(log_probs, reference, self.config.kl_loss_type)
                shares["actor/kl_loss"] = (weights * penalty).sum()
                loss = loss + self.config.kl_loss_coef * shares["actor/kl_loss"]
            if self.config.distillation is not None:
                distilled, of_teacher = self._distillation_loss(self.config.distillation, micro, weights, out, tokens)
                loss = distilled + (loss if self.config.distillation.use_task_rewards else 0.0)
                shares |= {name: value / trained for name, value in of_teacher.items()}
                shares["distillation/loss"] = distilled.detach()
            if out.hidden is not None:
                value_loss, of_values = self._value_loss(out.hidden, micro, mini)
                loss = loss + self.config.value_coef * value_loss
                shares |= of_values
            loss.backward()  # type: ignore[no-untyped-call]
            shares["actor/pg_clipfrac"] = policy.clipped.sum() / trained
            shares["actor/pg_clipfrac_lower"] = policy.clipped_lower.sum() / trained
            gap = log_probs.detach() - tokens.old_log_probs
            shares["actor/ppo_kl"] = -gap.sum() / trained
            shares["actor/ppo_k3_kl"] = (gap.clamp(max=20).expm1() - gap).sum() / trained
            shares["actor/entropy"] = entropies.sum() / trained
            add_up(sums, shares, micro, advice=_ADVICE)
        if first_pass:
            for sequence, own in zip(mini.sequences, self.forward.gathered(mini.sequences, entropies_of), strict=True):
                sequence.entropies = own  # not brought over from its device yet: that would wait for it
        if finds_old:
            for sequence, own in zip(mini.sequences, self.forward.gathered(mini.sequences, old_of), strict=True):
                sequence.old_log_probs = own.float().cpu().numpy()
        sums = self.forward.total(sums)
        in_rows, distinct, computed = (sums.pop(name) for name in Sizes._fields)
        sums["perf/padding_share"] = 1 - distinct / computed
        sums["perf/shared_share"] = 1 - distinct / in_rows
        return sums

    def _teachers_choice(self, micro: Sequence[TrainingSequence]) -> Tensor | None:
        """The tokens [K, C] that the teacher finds most likely, where the loss compares them."""
        options = self.config.distillation
        if options is None or not options.top:
            return None
        return self._gather(_of_teacher(s, "teacher_top_ids") for s in micro)

    def _distillation_loss(
        self,
        options: DistillationOptions,
        micro: Sequence[TrainingSequence],
        weights: Tensor,
        out: Outputs,
        tokens: LossInputs,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss against the teacher, weighted as the policy's and times its coefficient; and what verl's metrics are
        means of, as sums over tokens."""
        teacher = self._gather(_of_teacher(s, "teacher_log_probs") for s in micro)
        top = self._gather(_of_teacher(s, "teacher_top_log_probs") for s in micro) if options.top else None
        taught = Taught(out.log_probs, teacher, out.candidates, top)
        each = distillation_loss(taught, options)
        totals = {"distillation/abs_loss": each.abs().sum(), "distillation/taught_share": taught.has_teacher.sum()}
        if options.use_policy_gradient:
            policy = policy_gradient(taught, each, tokens, options)
            summed = (weights * self._importance(micro) * policy.loss).sum()
            totals["distillation/pg_clipfrac"] = policy.clipped.sum()
        else:
            summed = (weights * each).sum()
        if top is not None and out.candidates is not None:
            totals["distillation/teacher_mass"] = torch.nan_to_num(top.exp()).sum()
            totals["distillation/student_mass"] = (out.candidates.exp() * taught.has_teacher[:, None]).sum()
        coefficient = options.coef(self.optimizer.progress)
        totals["distillation/coef"] = torch.full_like(each.detach(), coefficient).sum()
        return coefficient * summed, totals

    def _value_loss(
        self, states: Tensor, micro: Sequence[TrainingSequence], mini: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return weighted_value_loss(self._valued(states), micro, mini, clip=self.config.cliprange_value)

    def _valued(self, states: Tensor) -> Tensor:
        assert self.value_head is not None
        return values_of(states, self.value_head)

    def _value_step(self, mini: MiniBatch) -> dict[str, float]:
        """An optimizer step of the value head alone: no gradient reaches the trunk."""
        self.optimizer.zero_grad()
        sums: dict[str, float] = {}
        for micro in self._micro_batches(mini.sequences):
            with torch.no_grad():
                states = self.forward.hidden(micro)
            loss, shares = self._value_loss(states, micro, mini)
            (self.config.value_coef * loss).backward()  # type: ignore[no-untyped-call]
            add_up(sums, shares, micro, advice=_ADVICE)
        return self.forward.total(sums) | {f"critic/{name}": value for name, value in self.optimizer.step().items()}

    def _order(self, plan: list[MiniBatch]) -> list[MiniBatch]:
        """One pass; with `shuffle` the count of optimizer steps decides the order: a resumed run has the same."""
        if not self.config.shuffle:
            return plan
        return [plan[i] for i in np.random.default_rng(self.optimizer.steps).permutation(len(plan))]

    def _optimizer_step(self, mini: MiniBatch) -> dict[str, float]:
        self.optimizer.zero_grad()
        metrics = self.accumulate(mini)
        return metrics | {f"actor/{name}": value for name, value in self.optimizer.step().items()}

    def _log_probs(self, sequences: Sequence[TrainingSequence], cut: Iterable[list[TrainingSequence]]) -> list[Tensor]:
        """Log probabilities [K] of the trained tokens of each sequence, computed in the parts `cut`; on the CPU where
        others computed some of them."""
        by_id: dict[int, Tensor] = {}
        for micro in cut:
            by_id |= _by_id(micro, self.forward.log_probs(micro)[0])
        return self.forward.gathered(sequences, by_id)

    def _tokens(
        self,
        sequences: Sequence[TrainingSequence],
        log_probs: Tensor,
        constants: Mapping[int, Tensor] | None = None,
        old: Tensor | None = None,
    ) -> LossInputs:
        """`old` where the sequences do not have theirs yet."""
        return LossInputs(
            log_probs=log_probs,
            old_log_probs=self._gather(_finite_values(s, "old_log_probs") for s in sequences) if old is None else old,
            advantages=self._gather(s.advantages for s in sequences),
            sequence=self._gather(np.full(len(s.trained), s.rollout) for s in sequences),
            constants=self._constants(sequences, constants) if constants else None,
        )

    def _constants(self, sequences: Sequence[TrainingSequence], constants: Mapping[int, Tensor]) -> Tensor:
        """`constants` of the trained tokens of `sequences`, joined [K]; a row that trains nothing has none."""
        parts = [self.forward.of_part(s, constants) for s in sequences if len(s.trained)]
        return torch.cat(parts) if parts else torch.empty(0, device=self._device)

    def _importance(self, micro: Sequence[TrainingSequence]) -> Tensor | float:
        """The weights of rollout correction [K], where any sequence has them."""
        if all(s.weights is None for s in micro):
            return 1.0
        return self._gather(np.ones(len(s.trained), np.float32) if s.weights is None else s.weights for s in micro)

    def _gather(self, parts: Iterable[np.ndarray[Any, np.dtype[Any]]]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(self._device)


def _of_teacher(sequence: TrainingSequence, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """What the teacher said of a sequence, which must be set; NaN where a token has no teacher."""
    values: np.ndarray[Any, np.dtype[Any]] | None = getattr(sequence, name)
    if values is None:
        raise ValueError(f"{name} are not set; ask the teacher before the update")
    return values


def _by_id(sequences: Sequence[TrainingSequence], values: Tensor) -> dict[int, Tensor]:
    """Values of the trained tokens of `sequences`, joined in their order, by a sequence's `id`."""
    parts = torch.split(values, [len(sequence.trained) for sequence in sequences])
    return {id(sequence): own for sequence, own in zip(sequences, parts, strict=True)}


def _finite_values(sequence: TrainingSequence, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """`old_log_probs` or `reference_log_probs`, which must be set, and be numbers."""
    values: np.ndarray[Any, np.dtype[np.float32]] | None = getattr(sequence, name)
    if values is None:
        raise ValueError(f"{name} are not set; compute them before the update")
    if not np.isfinite(values).all():
        wrong = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(
            f"{name} of rollout {sequence.rollout} are {values[wrong]} at position {sequence.trained[wrong]}: "
            "leave such tokens out (TrainingSequence.keep), or compute them"
        )
    return values
