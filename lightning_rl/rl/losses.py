"""Losses, one number per trained token; weighting and summing is `aggregation`'s.

A token's loss depends on that token and on constants alone. What a loss must know of a whole rollout or mini-batch (a
mean ratio, which tokens have the largest covariance) a second function, `prepare`, turns into one constant per token
beforehand. So loss and gradient are the same whatever micro-batches or workers the tokens are computed in.

K are the trained tokens, flat; a *sequence* of the papers is a rollout. rho = exp(clamp(log_probs - old_log_probs, -20,
20)), A the advantage, sg the stop of the gradient. Each loss names verl's `loss_mode` and the keys that it reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.rl.correction import importance_weights, weight_bounds
from lightning_rl.rl.kl import absolute

_TIED = 1e-5  # covariances closer than this are one: rounding must not choose between equal tokens


class LossInputs(NamedTuple):
    """K trained tokens; the gradient flows through `log_probs` alone.

    Float [K]: `log_probs`, `old_log_probs`, `advantages`, and `constants`, what the loss's `prepare` made of the whole
    mini-batch; int64 [K]: `sequence`, the index of the rollout.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    sequence: Tensor
    constants: Tensor | None = None

    def take(self, which: Tensor) -> "LossInputs":
        """The tokens at `which`, int64 [n]."""
        return LossInputs(*(None if part is None else part[which] for part in self))  # type: ignore[arg-type]


class PolicyLoss(NamedTuple):
    """Per token, [K]: the loss, and for the metrics, bool, where a clip was active and where the lower one was."""

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What losses are told, under the names of verl's keys; each loss says which of them it reads."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None
    rollout_is: str | None = None
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False


Prepare = Callable[[LossInputs, LossOptions, torch.Generator], Tensor]


class Loss(NamedTuple):
    """A policy loss: `token_loss`, and where it needs to know more than its token, `prepare`.

    `prepare` sees all tokens of a mini-batch, in an order that depends on the rollouts alone, and gives [K] constants;
    it costs one forward pass without gradient. Its generator is seeded by the optimizer step. `needs` names options
    without which it cannot be.
    """

    token_loss: Callable[[LossInputs, LossOptions], PolicyLoss]
    prepare: Prepare | None = None
    needs: tuple[str, ...] = ()


def vanilla(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with dual clip (arXiv 1912.09729); verl's `vanilla`.

    L1 = max(-A rho, -A clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high)); where A < 0: min(-A clip_ratio_c, L1).

    Keys: clip_ratio_low, clip_ratio_high, clip_ratio_c.
    """
    surrogate, clipped = _clipped_surrogate(tokens, options)
    bound = -tokens.advantages * options.clip_ratio_c
    negative = tokens.advantages < 0
    loss = torch.where(negative, torch.minimum(bound, surrogate), surrogate)
    return PolicyLoss(loss, clipped, negative & (bound < surrogate))


def dppo_tv(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """Divergence PPO by the total variation of {this token, any other} (arXiv 2602.04879); verl's `dppo_tv`.

    -A sg(min(rho, clip_ratio_c)) log_prob, for the tokens that have not moved too far in the direction of A: p - p_old
    <= clip_ratio_high where A > 0, p - p_old >= -clip_ratio_low else. Others lose their gradient. The paper wants a
    large clip_ratio_c, 20.

    Keys: clip_ratio_low, clip_ratio_high, clip_ratio_c.
    """
    moved = tokens.log_probs.detach().exp() - tokens.old_log_probs.exp()
    near = torch.where(tokens.advantages > 0, moved <= options.clip_ratio_high, moved >= -options.clip_ratio_low)
    return _truncated(tokens, options, near)


def dppo_kl(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """As `dppo_tv`, by KL(p_old | p) of {this token, any other} (arXiv 2602.04879); verl's `dppo_kl`.

    A token keeps its gradient where the divergence is at most clip_ratio_high (A > 0) or clip_ratio_low, or where the
    update leads it back: A > 0 and p <= p_old, or the opposite.

    Keys: clip_ratio_low, clip_ratio_high, clip_ratio_c.
    """
    new, old = tokens.log_probs.detach(), tokens.old_log_probs
    divergence = old.exp() * (old - new) - old.expm1() * (_log_of_others(old) - _log_of_others(new))
    near = torch.where(
        tokens.advantages > 0,
        (divergence <= options.clip_ratio_high) | (new <= old),
        (divergence <= options.clip_ratio_low) | (new >= old),
    )
    return _truncated(tokens, options, near)


def gspo(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """Group sequence policy optimisation in its token form (GSPO-token, arXiv 2507.18071); verl's `gspo`.

    With s = exp(mean over the rollout of log_probs - old_log_probs), at most e^10, and s_t = sg(s) exp(log_prob -
    sg(log_prob)): max(-A s_t, -A clip(s_t)). With one advantage per rollout the gradient is that of the rollout's
    loss. The paper's aggregation is seq-mean-token-mean, its clips are about 3e-4.

    Keys: clip_ratio_low, clip_ratio_high.
    """
    log_ratio = tokens.log_probs - tokens.log_probs.detach() + _constants(tokens)
    return _no_lower(*_clip(log_ratio.clamp(max=10.0).exp(), tokens.advantages, options))


def mean_log_ratios(tokens: LossInputs, options: LossOptions, generator: torch.Generator) -> Tensor:
    """`gspo`'s constants: of each token the mean log ratio of its rollout."""
    return _rollout_means(tokens.log_probs - tokens.old_log_probs, tokens.sequence)


def sapo(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """Soft adaptive policy optimisation (arXiv 2511.20347): a sigmoid in place of the clip; verl's `sapo`.

    -A sigmoid(tau (rho - 1)) 4 / tau, tau = tau_pos where A > 0, tau_neg else. The paper's aggregation is
    seq-mean-token-mean.

    Keys: tau_pos, tau_neg.
    """
    ratio = _ratio(tokens)
    tau = torch.full_like(ratio, options.tau_neg).masked_fill(tokens.advantages > 0, options.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return _unclipped(-tokens.advantages * gate)


def gpg(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """Group policy gradient (arXiv 2504.02546): -A log_prob, no ratio and no clip; verl's `gpg`. Keys: none."""
    return _unclipped(-tokens.advantages * tokens.log_probs)


def clip_cov(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, without the tokens that drain entropy; verl's `clip_cov`.

    Of the tokens with clip_cov_lb < (A - mean A)(log_prob - mean log_prob) < clip_cov_ub, means over the mini-batch,
    that the clip leaves alone, clip_cov_ratio of all tokens, but at least one, lose their loss, by chance.

    Keys: clip_cov_ratio, clip_cov_lb, clip_cov_ub, clip_ratio_low, clip_ratio_high.
    """
    surrogate, _ = _clipped_surrogate(tokens, options)
    dropped = _constants(tokens) > 0
    return _no_lower(torch.where(dropped, torch.zeros_like(surrogate), surrogate), dropped)


def dropped_by_covariance(tokens: LossInputs, options: LossOptions, generator: torch.Generator) -> Tensor:
    """`clip_cov`'s constants: 1 for the tokens that lose their loss, 0 for the others."""
    _, clipped = _clipped_surrogate(tokens, options)
    covariance = _covariances(tokens)
    open_to = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub) & ~clipped
    count = min(max(int(options.clip_cov_ratio * len(open_to)), 1), int(open_to.sum()))
    # A draw for every token, so that one candidate more does not change what the others drew.
    draws = torch.rand(len(open_to), generator=generator, dtype=torch.float64).to(open_to.device)
    chosen = torch.where(open_to, draws, torch.full_like(draws, 2.0)).argsort()[:count]
    return torch.zeros_like(tokens.log_probs).index_fill(0, chosen, 1.0)


def kl_cov(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """KL-Cov (arXiv 2505.22617): -A rho, and a KL penalty for the tokens of largest covariance; verl's `kl_cov`.

    kl_cov_ratio of the mini-batch's tokens, but at least one, those with the largest (A - mean A)(log_prob - mean
    log_prob), get + ppo_kl_coef |log_prob - old_log_prob|. Of equal ones all do.

    Keys: kl_cov_ratio, ppo_kl_coef.
    """
    loss = -tokens.advantages * _ratio(tokens)
    penalty = options.ppo_kl_coef * absolute(tokens.log_probs - tokens.old_log_probs)
    chosen = _constants(tokens) > 0
    return _no_lower(torch.where(chosen, loss + penalty, loss), chosen)


def largest_covariances(tokens: LossInputs, options: LossOptions, generator: torch.Generator) -> Tensor:
    """`kl_cov`'s constants: 1 for the tokens that are penalised, 0 for the others."""
    covariance = _covariances(tokens)
    if not len(covariance):
        return torch.zeros_like(tokens.log_probs)
    least = covariance.topk(max(1, int(len(covariance) * options.kl_cov_ratio))).values[-1]
    return (covariance >= least - _TIED * (1 + least.abs())).to(tokens.log_probs.dtype)


def geo_mean(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """Geometric-mean policy optimisation (GMPO, arXiv 2507.20673); verl's `geo_mean`.

    -A exp(m), m the mean over the rollout of c_t, its log ratios clipped to [-clip_ratio_low, clip_ratio_high] on the
    side that A pushes to. A token's loss is -A sg(exp(m)) (1 + c_t - sg(c_t)): the same value for each, and summed over
    a rollout exactly the gradient of its loss, under any aggregation.

    Keys: clip_ratio_low, clip_ratio_high (of the log ratio; the paper takes 0.4).
    """
    log_ratio, bounded = _one_sided(tokens, options)
    moving = 1 + log_ratio - log_ratio.detach()
    advantages = tokens.advantages
    return PolicyLoss(-advantages * _constants(tokens) * moving, bounded & (advantages > 0), bounded & (advantages < 0))


def geometric_means(tokens: LossInputs, options: LossOptions, generator: torch.Generator) -> Tensor:
    """`geo_mean`'s constants: of each token the geometric mean of its rollout's clipped ratios."""
    log_ratio, _ = _one_sided(tokens, options)
    return _rollout_means(log_ratio, tokens.sequence).exp()


def dro(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """Direct reward optimisation (arXiv 2405.19107): -(A log_prob - dro_beta / 2 (log_prob - old_log_prob)^2).

    The policy's half of the paper's quadratic loss, with the advantage for reward minus value; verl's `dro`. Key:
    dro_beta, which must be given.
    """
    if not options.dro_beta or options.dro_beta < 0:
        raise ValueError(f"the loss dro needs actor.policy_loss.dro_beta above 0; it is {options.dro_beta}")
    log_ratio = tokens.log_probs - tokens.old_log_probs
    return _unclipped(-tokens.advantages * tokens.log_probs + 0.5 * options.dro_beta * log_ratio.square())


def cispo(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """Clipped importance weights (CISPO, arXiv 2506.13585): -sg(clip(rho)) A log_prob; verl's `cispo`.

    The weight is clipped, the gradient of no token is lost. Keys: clip_ratio_low, clip_ratio_high.
    """
    ratio = _ratio(tokens).detach()
    weight = ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    return _no_lower(-weight * tokens.advantages * tokens.log_probs, weight != ratio)


def reinforce(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """REINFORCE (Williams 1992) off its policy: -A sg(w) log_prob; verl's `bypass_mode` with loss_type reinforce.

    w is the truncated importance weight (`correction.importance_weights`) of the policy as it is now, not as it was
    when the step began, to the old one, which in bypass mode is the sampler. Without `rollout_is` w = 1, as in `gpg`.
    With rollout_is_batch_normalize they are divided by their mean over the mini-batch (verl: over the micro-batch).

    Keys: rollout_is, rollout_is_threshold, rollout_is_batch_normalize.
    """
    return _unclipped(-tokens.advantages * _constants(tokens) * tokens.log_probs)


def truncated_weights(tokens: LossInputs, options: LossOptions, generator: torch.Generator) -> Tensor:
    """`reinforce`'s constants: the importance weight of each token."""
    log_ratio = tokens.log_probs.detach() - tokens.old_log_probs
    if options.rollout_is is None:
        return torch.ones_like(log_ratio)
    weights, _ = importance_weights(
        log_ratio.double().cpu().numpy(),
        tokens.sequence.cpu().numpy(),
        level=options.rollout_is,
        bounds=weight_bounds(options.rollout_is_threshold),
        batch_normalize=options.rollout_is_batch_normalize,
    )
    return torch.from_numpy(weights).to(log_ratio)


LOSSES: dict[str, Loss] = {
    "vanilla": Loss(vanilla),
    "dppo_tv": Loss(dppo_tv),
    "dppo_kl": Loss(dppo_kl),
    "gspo": Loss(gspo, mean_log_ratios),
    "sapo": Loss(sapo),
    "gpg": Loss(gpg),
    "clip_cov": Loss(clip_cov, dropped_by_covariance),
    "kl_cov": Loss(kl_cov, largest_covariances),
    "geo_mean": Loss(geo_mean, geometric_means),
    "dro": Loss(dro, needs=("dro_beta",)),
    "cispo": Loss(cispo),
    "reinforce": Loss(reinforce, truncated_weights),
    "ppo_clip": Loss(vanilla),  # bypass_mode's other one: the ratio to the sampler is clipped, no weight beside it
}
"""By verl's `loss_mode`; one of your own is `LOSSES["mine"] = Loss(my_token_loss)`."""


def loss_named(name: str) -> Loss:
    """The loss of a `loss_mode`. Raises ValueError naming those there are, and for what is in `LOSSES` and is none."""
    if name not in LOSSES:
        raise ValueError(f"loss_mode {name!r} is unknown; there are {', '.join(LOSSES)}, bypass_mode")
    if not isinstance(LOSSES[name], Loss):
        raise ValueError(f"LOSSES[{name!r}] is {LOSSES[name]!r}; give Loss(function)")
    return LOSSES[name]


def token_loss_of(name: str, loss: Loss, tokens: LossInputs, options: LossOptions) -> PolicyLoss:
    """The loss of each token. Raises TypeError where a loss of the user's gives anything else."""
    policy_loss = loss.token_loss(tokens, options)
    if not isinstance(policy_loss, PolicyLoss):
        raise TypeError(
            f"loss_mode {name!r} gave a {type(policy_loss).__name__}; it must give PolicyLoss(loss, clipped, ...)"
        )
    for field, value in zip(PolicyLoss._fields, policy_loss, strict=True):
        if value.shape != tokens.log_probs.shape:
            raise TypeError(
                f"loss_mode {name!r} gave a {field} of {list(value.shape)}; it must be {list(tokens.log_probs.shape)}, "
                "one of each token: loss_agg_mode weights and adds them up"
            )
    return policy_loss


def check_options(name: str, options: LossOptions) -> None:
    """Raises ValueError for a `loss_mode` that there is not, and for options that lack what it needs."""
    for needed in loss_named(name).needs:
        if getattr(options, needed) is None:
            raise ValueError(f"loss_mode {name!r} needs {needed}, and it is null")


class ValueLoss(NamedTuple):
    """Per token, [K]: the loss, and bool, where the clip was active."""

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    """PPO's clipped value loss, as in its first implementation: max((v - R)^2, (clamp(v, v_old +- clip) - R)^2) / 2.

    Args:
        values, old_values, returns: float [K]; the gradient flows through `values` alone.
        clip: verl's `critic.cliprange_value`.
    """
    free = (values - returns).square()
    bound = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(free, bound), bound > free)


def entropy(logits: Tensor) -> Tensor:
    """The entropy (nats) of softmax(logits), [N, V] -> [N]; a logit of -inf counts nothing."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def _ratio(tokens: LossInputs) -> Tensor:
    return (tokens.log_probs - tokens.old_log_probs).clamp(-20.0, 20.0).exp()


def _clip(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic choice of -A ratio and -A clip(ratio), and where it is the second."""
    free = -advantages * ratio
    bound = -advantages * ratio.clamp(1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high)
    return torch.maximum(free, bound), bound > free


def _clipped_surrogate(tokens: LossInputs, options: LossOptions) -> tuple[Tensor, Tensor]:
    return _clip(_ratio(tokens), tokens.advantages, options)


def _truncated(tokens: LossInputs, options: LossOptions, near: Tensor) -> PolicyLoss:
    """The losses of dppo: a truncated weight, and no gradient where the token is not `near`."""
    ratio = _ratio(tokens).detach()
    loss = -tokens.advantages * ratio.clamp(max=options.clip_ratio_c) * tokens.log_probs
    return PolicyLoss(torch.where(near, loss, torch.zeros_like(loss)), ~near, near & (ratio > options.clip_ratio_c))


def _one_sided(tokens: LossInputs, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The log ratio, clipped where that lessens the surrogate (0 where A = 0), and where it is outside of the range."""
    log_ratio = (tokens.log_probs - tokens.old_log_probs).clamp(-20.0, 20.0)
    clipped = log_ratio.clamp(-options.clip_ratio_low, options.clip_ratio_high)
    sign = tokens.advantages.sign()
    return sign * torch.minimum(sign * log_ratio, sign * clipped), log_ratio != clipped


def _covariances(tokens: LossInputs) -> Tensor:
    """Of each token (A - mean A)(log_prob - mean log_prob), float64 [K]."""
    advantages, log_probs = tokens.advantages.double(), tokens.log_probs.detach().double()
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def _rollout_means(values: Tensor, sequence: Tensor) -> Tensor:
    """Of each token the mean of `values` [K] over its rollout; summed in float64."""
    rollouts, index, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(rollouts), dtype=torch.float64, device=values.device)
    means: Tensor = sums.index_add(0, index, values.detach().double()) / counts
    return means[index].to(values.dtype)


def _log_of_others(log_probs: Tensor) -> Tensor:
    """log(1 - p); of a certain token, log(1e-8)."""
    return (-log_probs.expm1()).clamp(min=1e-8).log()


def _constants(tokens: LossInputs) -> Tensor:
    if tokens.constants is None:
        raise ValueError("the loss needs what its `prepare` says of the whole mini-batch; set Tokens.constants")
    return tokens.constants


def _unclipped(loss: Tensor) -> PolicyLoss:
    never = torch.zeros_like(loss, dtype=torch.bool)
    return PolicyLoss(loss, never, never)


def _no_lower(loss: Tensor, clipped: Tensor) -> PolicyLoss:
    return PolicyLoss(loss, clipped, torch.zeros_like(clipped))
