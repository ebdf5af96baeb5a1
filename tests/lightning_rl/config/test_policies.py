"""The policies that a config means: what each has of its own, what is the run's, and when each learns."""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import lightning_rl as lrl
from lightning_rl.config import ConfigError, compose
from lightning_rl.config.policies import RunPolicy, engine_of_adapters, policies_of, samples_adapter
from lightning_rl.ppo import cards


def given(policies: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"policies": policies, **more}


def test_without_the_key_there_is_one_without_a_name() -> None:
    config = compose({"actor_rollout_ref": {"rollout": {"n": 3}}})
    [only] = policies_of(config)
    assert (only.name, only.config, only.reward) == ("", config, None)


def test_each_has_the_runs_keys_with_its_own_over_them() -> None:
    common = {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-5}}, "rollout": {"n": 3, "temperature": 0.5}}}
    first, second = policies_of(
        compose(
            given(
                {
                    "planner": {"actor_rollout_ref": {"rollout": {"temperature": 0.9}}, "agents": "plan_.*"},
                    "executor": {"algorithm": {"adv_estimator": "rloo"}, "reward": "speed"},
                },
                **common,
            )
        )
    )
    assert [one.config.actor_rollout_ref.rollout.temperature for one in (first, second)] == [0.9, 0.5]
    assert [one.config.algorithm.adv_estimator for one in (first, second)] == ["grpo", "rloo"]
    assert {one.config.actor_rollout_ref.rollout.n for one in (first, second)} == {3}
    assert {one.config.actor_rollout_ref.actor.optim.lr for one in (first, second)} == {1e-5}
    assert (first.agents, second.agents) == ("plan_.*|planner", "executor")
    assert (first.reward, second.reward) == ("planner", "speed")


def test_a_policy_without_a_critic_waits_for_none() -> None:
    of_planner = {"planner": {"algorithm": {"adv_estimator": "gae"}}, "executor": {}}
    algorithm = lrl.PPO(given(of_planner, trainer={"critic_warmup": 3}))
    assert [policy.config.trainer.critic_warmup for policy in policies_of(algorithm.config)] == [3, 0]
    with pytest.raises(ConfigError, match="critic_warmup has no critic to warm up"):
        lrl.PPO(given({"planner": {}, "executor": {}}, trainer={"critic_warmup": 3}))


def test_agents_may_begin_with_flags() -> None:
    first, _ = policies_of(compose(given({"planner": {"agents": "(?i)PLAN_.*"}, "executor": {}})))
    assert [bool(re.fullmatch(first.agents, tag)) for tag in ("plan_it", "planner", "executor")] == [True, True, False]


def test_the_argument_is_the_key() -> None:
    by_argument = lrl.PPO(policies={"planner": {"train_every": 2}, "executor": {}})
    by_key = lrl.PPO(given({"planner": {"train_every": 2}, "executor": {}}))
    assert by_argument.config == by_key.config
    by_command_line = compose(command_line=["policies.planner.train_every=2", "policies.executor.train_every=1"])
    assert by_command_line == by_key.config
    assert by_key.resources == ("main_llm", "planner", "executor")


@pytest.mark.parametrize(
    ("every", "start", "learns"),
    [(1, 1, [1, 2, 3, 4, 5, 6, 7]), (2, 1, [1, 3, 5, 7]), (3, 2, [2, 5]), (1, 6, [6, 7]), (0, 1, []), (1, 9, [])],
)
def test_a_policy_learns_in_the_steps_that_its_keys_say(every: int, start: int, learns: list[int]) -> None:
    policy = RunPolicy(config=compose(), train_every=every, train_from=start)
    assert [step for step in range(1, 8) if policy.learns_in(step)] == learns
    assert policy.updates(7) == len(learns)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (given({"llm": {}}), "policies.llm: something else has this name"),
        (given({"training_state": {}}), "policies.training_state: something else has this name"),
        (given({"my-planner": {}}), r"^a name in policies of \['my-planner'\]: expected `str` matching regex '\^\[A-Z"),
        (given({"planner": {"train_every": -2}}), r"policies.planner.train_every is -2: expected `int` >= 0$"),
        (given({"a": {"agents": "("}}), r"policies.a.agents '\(' is no regular expression"),
        (given({"a-b": {}}), "policies"),
        (given({"a": {"actor_rollout_ref": {"actr": {}}}}), "policies.a: config key .*actr' is unknown"),
        (given({"a": {"trainer": {}}}), "config key 'policies.a.trainer' is unknown"),
        (
            given({"a": {"actor_rollout_ref": {"rollout": {"n": 5}}}}),
            "policies.a.actor_rollout_ref.rollout.n cannot be a policy's own: it is the run's, set actor_rollout_ref",
        ),
        (given({"a": {"actor_rollout_ref": {"actor": {"clip_ratio": "x"}}}}), "policies.a: .*clip_ratio is 'x'"),
        (given({"a": {"train_every": 0}}), "none of them learns"),
        (given({"a": {"checkpoints_of": "b"}, "b": {"checkpoints_of": "a"}}), "none of them learns"),
        (given({"a": {}, "b": {"checkpoints_of": "c"}}), "checkpoints_of=c is no policy that learns; there are a"),
        (
            given({"a": {}, "b": {"checkpoints_of": "a", "actor_rollout_ref": {"model": {"lora_rank": 4}}}}),
            "and policy b is an adapter: set policies.b.actor_rollout_ref.model.lora_rank=0",
        ),
        (given({"a": {}, "b": {"checkpoints_of": "a"}}, trainer={"save_freq": -1}), "set trainer.save_freq"),
        (
            given(
                {
                    "a": {"actor_rollout_ref": {"model": {"lora_rank": 4, "lora_export": "adapter"}}},
                    "b": {"checkpoints_of": "a"},
                }
            ),
            "checkpoints of policy a hold its adapter alone: set policies.a.actor_rollout_ref.model.lora_export=merged",
        ),
        (
            given({"a": {}, "b": {"checkpoints_of": "a", "actor_rollout_ref": {"model": {"path": "other"}}}}),
            "policies.b.actor_rollout_ref.model: it takes the weights of policy a, so it must be the same model",
        ),
        (given({"a": {}}, algorithm={"train_spans": True}), "train_spans=true trains calls of which no URL"),
        (
            given({"judge": {}}, gateway={"backends": {"judge": {"kind": "openai", "url": "http://127.0.0.1:1/v1"}}}),
            "policies.judge: something else has this name",
        ),
        (given({"a": {"algorithm": {"adv_estimator": "gae"}, "critic": {"enable": False}}}), "gae needs a critic"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_name(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        lrl.PPO(keys)


def test_a_reward_for_a_policy_is_one_of_its_name() -> None:
    with pytest.raises(ValueError, match="policy='a' is the reward's name, and name='b' too"):
        lrl.emit_reward(1.0, name="b", policy="a")
    lrl.emit_reward(1.0, policy="a")  # outside of a rollout: nothing


def test_on_gpus_of_one_machine_each_policy_needs_some_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "device_of", lambda _: torch.device("cuda"))
    workers = compose(given({"a": {}, "b": {}}, trainer={"n_gpus_per_node": 2}))
    with pytest.raises(ConfigError, match="n_gpus_per_node=2 are asked for by each of 2 policies: start a Ray cluster"):
        cards.check_apart(policies_of(workers))
    engines = compose(given({"a": {}, "b": {}}, actor_rollout_ref={"rollout": {"name": "vllm"}}))
    with pytest.raises(ConfigError, match=r"policies.a.actor_rollout_ref.rollout.devices is not set: with several"):
        cards.check_apart(policies_of(engines))


LORA = {"model": {"lora_rank": 4}}
SERVED = {"rollout": {"name": "vllm", "server_urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}}


@pytest.mark.parametrize(
    ("common", "own", "shared"),
    [
        (LORA, {}, True),
        (LORA, {"rollout": {"temperature": 0.5, "top_p": 0.9}, "model": {"lora_rank": 8}}, True),
        (LORA, {"rollout": {"max_num_seqs": 8}}, False),
        (LORA, {"model": {"path": "another"}}, False),
        (LORA, {"model": {"lora_rank": 0}}, False),
        ({}, {}, False),
        (LORA | SERVED, {}, True),
        (LORA | SERVED, {"rollout": {"top_p": 0.9}}, True),
        (LORA | SERVED, {"rollout": {"temperature": 0.5}}, False),  # their log probabilities would be of another kind
        (LORA | {"rollout": SERVED["rollout"] | {"name": "sglang"}}, {}, False),
        ({"model": LORA["model"] | {"lora": {"merge": True}}}, {}, False),
        (LORA, {"model": {"lora": {"merge": True}}}, False),
    ],
)
def test_adapters_over_the_same_weights_are_sampled_by_one_engine(
    common: dict[str, Any], own: dict[str, Any], shared: bool
) -> None:
    config = compose(given({"a": {}, "b": {"actor_rollout_ref": own}}, actor_rollout_ref=common))
    first, second = (engine_of_adapters(policy.config) for policy in policies_of(config))
    assert (first is not None and first == second) == shared


@pytest.mark.parametrize(
    ("rollout", "merge", "beside"),
    [
        ({}, None, False),
        ({}, False, True),
        ({"name": "vllm"}, None, False),
        ({"name": "vllm"}, False, True),
        ({"name": "vllm"}, True, False),
        (SERVED["rollout"], False, True),
        ({"name": "vllm", "weight_transfer": "ipc"}, False, False),
    ],
)
def test_one_adapter_is_sampled_beside_the_model_or_merged(
    rollout: dict[str, Any], merge: bool | None, beside: bool
) -> None:
    model = LORA["model"] | {"lora": {"merge": merge}}
    assert samples_adapter(compose({"actor_rollout_ref": {"model": model, "rollout": rollout}})) == beside
    assert not samples_adapter(compose({"actor_rollout_ref": {"rollout": rollout}}))


@pytest.mark.parametrize(
    ("common", "own", "told"),
    [
        (LORA | SERVED, {}, None),
        (SERVED, {}, r"policies.a and policies.b both have http://127.0.0.1:1 in .*rollout.server_urls: servers are"),
        (SERVED, {"rollout": {"server_urls": ["http://127.0.0.1:3"]}}, None),
        ({"rollout": {"name": "vllm", "devices": [1, 2]}}, {"rollout": {"devices": [2]}}, r"both have 2 in .*devices"),
        ({"rollout": {"name": "vllm", "devices": [1]}}, {"rollout": {"devices": [2]}}, None),
        (LORA | {"rollout": {"name": "vllm", "devices": [1]}}, {}, None),
    ],
)
def test_policies_that_share_no_engine_name_none_in_common(
    common: dict[str, Any], own: dict[str, Any], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "device_of", lambda _: torch.device("cuda"))
    config = compose(given({"a": {}, "b": {"actor_rollout_ref": own}}, actor_rollout_ref=common))
    with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        cards.check_apart(policies_of(config))


@pytest.mark.parametrize(
    ("policies", "problem"),
    [
        ({"a": {"train_evry": 1}}, "config key 'policies.a.train_evry' is unknown; did you mean 'train_every'?"),
        ({"a": {}, "b": {"zzz": 1}}, "config key 'policies.b.zzz' is unknown; there are agents, reward, train_every"),
        ({"a": {}, "b": None}, "config key policies.b is None: expected `object`"),
        ({"a": {}, "b": {"train_every": 1.5}}, "config key policies.b.train_every is 1.5: expected `int`"),
    ],
)
def test_what_is_wrong_in_a_policy_is_named_with_it(policies: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        compose({"policies": policies})
