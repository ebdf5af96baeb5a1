"""The critic: of every sampled token the value of the state that it was sampled from, and the update of these values.

That state is the hidden state of the token before it, so a value never sees the token that it is the baseline of. The
loss is a sum of weighted token losses as the actor's is: rows, their order and micro-batches change nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from lightning_rl.inference.load import ONE_AT_A_TIME, aligned, attention_of
from lightning_rl.inference.weights.four_bit import plain_copy
from lightning_rl.rl.losses import value_loss
from lightning_rl.training import shards
from lightning_rl.training.batch import MiniBatch, TrainingSequence, by_sequence
from lightning_rl.training.forward import Forward
from lightning_rl.training.learner import Learner, LearnerConfig, add_up, means
from lightning_rl.training.offload import Offload
from lightning_rl.training.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class CriticConfig(LearnerConfig):
    """verl's `critic`, resolved; `cliprange_value` is how far values may go from the old ones in one training step."""

    cliprange_value: float


_ADVICE = "the critic's values or the returns are no numbers; lower critic.optim.lr, or look at the last checkpoint"


class ValueModel(nn.Module):
    """A transformer without its language head, and a linear head to one number, whose first values are 0."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = value_head(trunk)

    @staticmethod
    def load(
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str | None = None,
    ) -> "ValueModel":
        """With the weights of the causal LM at `path` (a folder or a model id)."""
        implementation = attention_of(AutoConfig.from_pretrained(path), attention)
        with ONE_AT_A_TIME:
            trunk: Any = AutoModel.from_pretrained(path, dtype=dtype, attn_implementation=implementation)
        return ValueModel(aligned(trunk.to(device))).eval()

    @staticmethod
    def like(policy: Any, dtype: torch.dtype | None = None) -> "ValueModel":
        """With a copy of the weights that a causal LM of transformers has now, held as `dtype` (None: as there)."""
        trunk = plain_copy(policy.base_model)
        return ValueModel(trunk.to(dtype).requires_grad_()).eval()


def value_head(model: Any) -> nn.Linear:
    """A head that makes values of the hidden states of `model`, 0 at first; at least in float32."""
    weight = next(model.parameters())
    head = nn.Linear(
        model.config.get_text_config().hidden_size,
        1,
        dtype=torch.promote_types(weight.dtype, torch.float32),
        device="cpu" if weight.is_meta else weight.device,
    )
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def values_of(states: Tensor, head: nn.Linear) -> Tensor:
    """The values of hidden states, [K, D] -> [K], in the head's precision."""
    values: Tensor = head(states.to(head.weight.dtype))
    return values.squeeze(-1)


class Critic(Learner):
    """A value model with its optimizer.

    Args:
        model: on the device that it is used on.
        pad_id: what fills rows up.
        forward: how its trunk is run; by default as it is.
    """

    def __init__(self, model: ValueModel, config: CriticConfig, pad_id: int, forward: Forward | None = None) -> None:
        self.model = model
        self.config: CriticConfig = config
        self.forward = forward or Forward(model.trunk, pad_id)
        self.optimizer = Optimizer(model.parameters(), config.optim)
        self._place = Offload(model, enabled=config.param_offload)

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint needs: weights, optimizer, schedule. Of what is shared it has this process's part."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        own = self.model.state_dict()
        if odd := sorted(own.keys() ^ state["model"].keys()):
            raise ValueError(
                f"the saved critic is another model: {', '.join(odd[:3])} of {len(odd)} names are not in both"
            )
        shards.put(state["model"], own)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.config.optimizer_offload:
            self.optimizer.offload()

    def values(self, sequences: list[TrainingSequence]) -> list[NDArray[np.float32]]:
        """Per sequence the values of its trained tokens, float32 [K]."""
        with self._place.in_use(), self.forward.without_gradient():
            return self.forward.gathered(sequences, by_sequence(self._micro_batches(sequences), self._values))

    def update(self, plan: list[MiniBatch]) -> dict[str, float]:
        """One update over mini-batches whose `values` and `returns` are set; verl's `critic/...` metrics."""
        if not plan:
            return {}
        with self._place.in_use():
            self.optimizer.onload()
            self.model.train()
            metrics = [self._optimizer_step(mini) for _ in range(self.config.ppo_epochs) for mini in plan]
            self.model.eval()
            self.optimizer.schedule_step()
            if self.config.optimizer_offload:
                self.optimizer.offload()
        return means(metrics)

    def accumulate(self, mini: MiniBatch) -> dict[str, float]:
        """Add the gradient of one mini-batch's loss to the parameters' `.grad`; its metrics."""
        sums: dict[str, float] = {}
        for micro in self._micro_batches(mini.sequences):
            loss, shares = weighted_value_loss(self._values(micro), micro, mini, clip=self.config.cliprange_value)
            loss.backward()  # type: ignore[no-untyped-call]
            add_up(sums, shares, micro, advice=_ADVICE)
        return self.forward.total(sums)

    def _optimizer_step(self, mini: MiniBatch) -> dict[str, float]:
        self.optimizer.zero_grad()
        metrics = self.accumulate(mini)
        return metrics | {f"critic/{name}": value for name, value in self.optimizer.step().items()}

    def _values(self, micro: Sequence[TrainingSequence]) -> Tensor:
        return values_of(self.forward.hidden(micro), self.model.head)


def weighted_value_loss(
    values: Tensor, micro: Sequence[TrainingSequence], mini: MiniBatch, *, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The share of `micro` in the value loss of `mini`, and in its metrics: over the parts of a mini-batch both add up.

    Args:
        values: those of the K trained tokens of `micro`, in its order, float [K].
        micro: sequences whose `values` (the old ones) and `returns` are set.
        clip: verl's `critic.cliprange_value`.
    """
    old, returns, weights = (
        torch.from_numpy(np.concatenate(parts)).to(values.device)
        for parts in (
            [_set(s, "values") for s in micro],
            [_set(s, "returns") for s in micro],
            [np.full(len(s.trained), mini.weights[s.rollout]) for s in micro],
        )
    )
    trained = sum(len(s.trained) for s in mini.sequences)
    of_tokens = value_loss(values, old, returns, clip=clip)
    loss = (weights * of_tokens.loss).sum()
    return loss, {
        "critic/vf_loss": loss.detach(),
        "critic/vf_clipfrac": of_tokens.clipped.sum() / trained,
        "critic/vpred_mean": values.detach().sum() / trained,
    }


def _set(sequence: TrainingSequence, name: str) -> NDArray[np.float32]:
    numbers: NDArray[np.float32] | None = getattr(sequence, name)
    if numbers is None:
        raise ValueError(f"rollout {sequence.rollout} of the batch has no {name}: compute them before the update")
    return numbers
