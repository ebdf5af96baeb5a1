"""What a config's estimator needs beside rewards: a critic, a reference, a coefficient that may move."""

from typing import Any

import pytest

from lightning_rl.config import ConfigError, compose
from lightning_rl.config.schema import Config
from lightning_rl.ppo.estimators import (
    estimator_of,
    gdpo_weights,
    kl_controller_of,
    needs_critic,
    needs_reference,
)
from lightning_rl.ppo_algorithm import PPO
from lightning_rl.rl.advantages import ESTIMATORS, OfTokens
from lightning_rl.rl.kl import AdaptiveKL, FixedKL


def config(actor: dict[str, Any] | None = None, critic: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    return compose({"actor_rollout_ref": {"actor": actor or {}}, "critic": critic or {}, "algorithm": algorithm})


@pytest.mark.parametrize(("name", "needs"), [("gae", True), ("grpo", False), ("reinforce_plus_plus", False)])
def test_a_critic_is_trained_where_the_estimator_needs_one(name: str, needs: bool) -> None:
    plain = config(adv_estimator=name)
    estimator = estimator_of(plain, None, None)
    assert estimator is ESTIMATORS[name]
    assert needs_critic(plain, estimator) is needs
    assert needs_critic(config(critic={"enable": needs}, adv_estimator=name), estimator) is needs
    message = "gae needs a critic" if needs else f"critic.enable=true has no effect under .*={name}, which asks no"
    with pytest.raises(ConfigError, match=message):
        needs_critic(config(critic={"enable": not needs}, adv_estimator=name), estimator)


def test_an_estimator_of_ones_own_may_need_a_critic() -> None:
    own = OfTokens(lambda *_: [], needs_values=True)
    assert needs_critic(config(), own)


def test_a_critic_gives_credit_itself() -> None:
    with pytest.raises(ConfigError, match="gae spreads rewards over tokens itself"):
        estimator_of(config(adv_estimator="gae", credit={"strategy": "last_call"}), None, None)


def test_a_reference_is_held_where_rewards_or_the_loss_ask_for_it() -> None:
    assert not needs_reference(config())
    assert needs_reference(config(use_kl_in_reward=True))
    assert needs_reference(config({"use_kl_loss": True}))


def test_the_coefficient_is_what_the_keys_say() -> None:
    assert kl_controller_of(config()) is None
    assert kl_controller_of(config({"use_kl_loss": True})) is None
    assert kl_controller_of(config(use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.2})) == FixedKL(0.2)
    adaptive = {"type": "adaptive", "kl_coef": 0.2, "target_kl": 6.0, "horizon": 77}
    found = kl_controller_of(config(use_kl_in_reward=True, kl_ctrl=adaptive))
    assert found == AdaptiveKL(0.2, target=6.0, horizon=77)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(use_kl_in_reward=True, kl_penalty="k4"), r"algorithm\.kl_penalty: the penalty 'k4' is unknown"),
        (config({"use_kl_loss": True, "kl_loss_type": "full"}), r"actor\.kl_loss_type: the exact divergence `full`"),
    ],
)
def test_a_kind_of_distance_that_there_is_not_is_refused(given: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kl_controller_of(given)


def test_named_rewards_are_compared_with_the_distance_by_its_name() -> None:
    gdpo = {"adv_estimator": "gdpo", "use_kl_in_reward": True}
    with pytest.raises(ConfigError, match="put kl_penalty into algorithm"):
        gdpo_weights(config(**gdpo, gdpo_reward_keys=["a"]))
    assert gdpo_weights(config(**gdpo, gdpo_reward_keys=["a", "kl_penalty"])) == {"a": 1.0, "kl_penalty": 1.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"estimator": lambda outcomes: None},
            r"PPO\(estimator=...\) takes \(outcomes\); it must be a function of \(ou",
        ),
        ({"estimator": "grpo"}, r"PPO\(estimator=...\) is 'grpo'; it must be a function of \(outcomes, settings\)"),
        ({"select": lambda: True}, r"PPO\(select=...\) takes \(\); it must be a function of \(call\)"),
        ({"credit": 3}, r"PPO\(credit=...\) is 3; it must be a function of \(forest, rewards\)"),
        ({"reward": lambda task, answer: 1.0}, r"PPO\(reward=...\) takes \(task, answer\); it must be .* \(rollouts\)"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_named_before_the_run(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPO({}, **given)


def test_functions_of_any_make_are_taken() -> None:
    PPO({}, estimator=ESTIMATORS["rloo"], reward=lambda *rollouts: [1.0], select=bool)
