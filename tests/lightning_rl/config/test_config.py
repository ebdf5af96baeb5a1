"""Config: packaged defaults, overrides, and errors that name the key."""

import pytest

from lightning_rl.config import ConfigError, compose

MODEL = {"actor_rollout_ref": {"model": {"path": "some/model"}}}


def test_overrides_are_merged_into_the_defaults() -> None:
    config = compose(MODEL | {"data": {"train_batch_size": 4}})
    assert config.data.train_batch_size == 4
    assert config.actor_rollout_ref.actor.clip_ratio == 0.2


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ({"data": {"train_batchsize": 4}}, "data.train_batch_size"),
        ({"trainer": {"lr": 1}}, "actor_rollout_ref.actor.optim.lr"),
        ({"algorithms": {"adv_estimator": "grpo"}}, "algorithm"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(override: dict[str, object], nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{nearest}'"):
        compose(MODEL | override)


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path"):
        compose({})
