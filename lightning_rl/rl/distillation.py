"""Losses of a student q against a teacher p: one number per sampled token, from log probabilities in nats.

An estimate needs both log probabilities of the token that was sampled (`rl.kl`). A divergence over the teacher's most
likely tokens needs both of each of them. `..._tail` compares distributions of C + 1 classes: these C tokens, and all
others as one class. It is never negative and never above the divergence over the whole vocabulary. `forward_kl_topk` is
verl's sum over the C tokens alone, which is negative where the student puts more mass on them than the teacher.

K are the trained tokens, flat; C the teacher's most likely tokens of each; sg the stop of the gradient.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.rl.kl import KINDS, kl_penalty
from lightning_rl.rl.losses import LossInputs, LossOptions, PolicyLoss, vanilla

DIVERGENCES = ("forward_kl_topk", "forward_kl_tail", "reverse_kl_tail", "jsd_tail")
_LEAST_TAIL = 1e-7  # of float32: what is left of 1 when nothing is


@dataclass(frozen=True, kw_only=True)
class DistillationOptions:
    """verl's keys of `distillation.distillation_loss`, of the same names.

    `loss_mode` is one of `rl.kl.KINDS` or of `DIVERGENCES`. `loss_max_clamp` bounds a token's loss on both sides,
    `log_prob_min_clamp` the log probabilities of `forward_kl_topk` from below. With `use_policy_gradient` the negative
    loss is the token's advantage in a clipped policy loss; without, it is minimised as it is. With a `gate` g a token's
    loss counts sg(sigmoid(g (log p - log q))) times (arXiv 2605.15155). `control_variate`, with the policy gradient,
    adds the reverse divergence of the token's distributions, as `reverse_kl_tail` has it: the gradient keeps its mean.
    Without `use_task_rewards` rewards, entropy and reference count nothing, and the coefficient is 1.
    """

    loss_mode: str = "k3"
    topk: int = 32
    use_task_rewards: bool = True
    distillation_loss_coef: float = 1.0
    distillation_loss_coef_end: float | None = None
    loss_max_clamp: float | None = None
    log_prob_min_clamp: float | None = None
    use_policy_gradient: bool = False
    gate: float | None = None
    control_variate: bool = False
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2

    @property
    def top(self) -> int:
        """How many of the teacher's most likely tokens are compared; 0: none."""
        return self.topk if self.loss_mode in DIVERGENCES or self.control_variate else 0

    def coef(self, progress: float) -> float:
        """What the loss counts beside the policy's. It goes linearly from `distillation_loss_coef` at `progress` 0, the
        run's first update, to `distillation_loss_coef_end` at 1, its last; where that is None it stays."""
        if not self.use_task_rewards:
            return 1.0
        begin, end = self.distillation_loss_coef, self.distillation_loss_coef_end
        return begin if end is None else begin + (end - begin) * progress


class Taught(NamedTuple):
    """What student and teacher say of K sampled tokens; the gradient flows through `student` and `student_top` alone.

    Float [K]: `student` and `teacher`, the log probabilities of the sampled token; where `teacher` is NaN the token has
    no teacher. Float [K, C], where the teacher's most likely tokens are compared: `student_top` and `teacher_top`.
    """

    student: Tensor
    teacher: Tensor
    student_top: Tensor | None = None
    teacher_top: Tensor | None = None

    @property
    def has_teacher(self) -> Tensor:
        """Bool [K]."""
        return self.teacher.isfinite()


def check(options: DistillationOptions) -> None:
    """Raises ValueError for a loss mode that there is not, and for options that do not go together."""
    mode, base = options.loss_mode, options.loss_mode.removesuffix("+")
    if base not in KINDS and mode not in DIVERGENCES:
        raise ValueError(f"loss_mode={mode} is unknown; there are {', '.join((*KINDS, *DIVERGENCES))}")
    if mode in ("k1", "kl") and not options.use_policy_gradient:
        raise ValueError(
            f"loss_mode={mode} as a loss has a gradient that does not depend on the teacher: set "
            "use_policy_gradient=true, or take k2, forward_kl_tail or reverse_kl_tail"
        )
    if options.control_variate and not options.use_policy_gradient:
        raise ValueError("control_variate lowers the variance of a policy gradient: set use_policy_gradient=true")
    if options.control_variate and options.gate is not None:
        raise ValueError("control_variate keeps the mean of a gradient that has no gate: leave one of the two out")
    if options.control_variate and mode not in ("k1", "kl"):
        raise ValueError(f"control_variate is that of loss_mode=k1, not of {mode}")


def distillation_loss(tokens: Taught, options: DistillationOptions) -> Tensor:
    """The loss of each token, float [K]; 0, without gradient, where it has no teacher."""
    there = tokens.has_teacher
    if options.loss_mode in DIVERGENCES:
        assert tokens.student_top is not None
        assert tokens.teacher_top is not None
        student = torch.where(there[:, None], tokens.student_top, -1.0)
        teacher = torch.where(there[:, None], tokens.teacher_top, -1.0)
        loss = _divergence(student, teacher, options)
    else:
        teacher = torch.where(there, tokens.teacher, tokens.student.detach())
        loss = kl_penalty(tokens.student, teacher, options.loss_mode)
    if options.gate is not None:
        ahead = torch.where(there, tokens.teacher - tokens.student, 0.0).detach()
        loss = torch.sigmoid(options.gate * ahead) * loss
    if options.loss_max_clamp is not None:
        loss = loss.clamp(-options.loss_max_clamp, options.loss_max_clamp)
    return torch.where(there, loss, 0.0)


def policy_gradient(tokens: Taught, loss: Tensor, inputs: LossInputs, options: DistillationOptions) -> PolicyLoss:
    """PPO's clipped loss (`rl.losses.vanilla`) with the advantage -sg(`loss`) of each token, [K].

    With a control variate (arXiv 2605.07865) the advantage is -sg(d) + sg(KL(q | p)), d = log q - log p: the divergence
    does not depend on the token that was sampled, so the gradient keeps its mean.
    """
    advantages = -loss.detach()
    if options.control_variate:
        assert tokens.student_top is not None
        assert tokens.teacher_top is not None
        expected = reverse_kl(*(_with_tail(part.detach()) for part in (tokens.student_top, tokens.teacher_top)))
        advantages = torch.where(tokens.has_teacher, advantages + expected, 0.0)
    clip = LossOptions(clip_ratio_low=options.clip_ratio_low, clip_ratio_high=options.clip_ratio_high)
    return vanilla(inputs._replace(advantages=advantages), clip)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """sum p (log p - log q) of log probabilities [..., C] -> [...]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """sum q (log q - log p) of log probabilities [..., C] -> [...]."""
    return (student.exp() * (student - teacher)).sum(-1)


def jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
    """(KL(p | m) + KL(q | m)) / 2 with m = (p + q) / 2, of log probabilities [..., C] -> [...]."""
    middle = torch.logaddexp(student, teacher) - torch.log(torch.tensor(2.0, dtype=student.dtype))
    return 0.5 * (forward_kl(middle, teacher) + forward_kl(middle, student))


def _divergence(student: Tensor, teacher: Tensor, options: DistillationOptions) -> Tensor:
    if options.loss_mode == "forward_kl_topk":
        if options.log_prob_min_clamp is not None:
            student, teacher = (part.clamp(min=options.log_prob_min_clamp) for part in (student, teacher))
        return forward_kl(student, teacher).clamp(min=0.0)
    of_classes = {"forward_kl_tail": forward_kl, "reverse_kl_tail": reverse_kl, "jsd_tail": jensen_shannon}
    return of_classes[options.loss_mode](_with_tail(student), _with_tail(teacher))


def _with_tail(log_probs: Tensor) -> Tensor:
    """Log probabilities [K, C] of some tokens, and of all others as one class: [K, C + 1]."""
    mass = log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, (1 - mass).clamp(min=_LEAST_TAIL).log()], dim=-1)
