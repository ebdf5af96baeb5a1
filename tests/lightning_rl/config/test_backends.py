"""Frozen models in the configuration: where they are and where their keys are, and never a key."""

import traceback
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.config import ConfigError, compose, to_yaml
from lightning_rl.config.backends import registrations
from lightning_rl.config.schema import BackendRefused
from lightning_rl.ppo_algorithm import PPO

KEY = "sk-nobody-may-see-this"
OPENAI = {"kind": "openai", "url": "https://helper.example/v1"}


def backends(**models: Any) -> dict[str, Any]:
    return {"gateway": {"backends": models}}


def test_a_model_is_registered_with_the_key_that_its_variable_holds() -> None:
    helper, judge = OPENAI | {"remote_model": "gpt", "api_key_env": "HELPER_KEY"}, {"kind": "litellm"}
    config = compose(backends(helper=helper, **{"anthropic/claude-4.5": judge}))
    assert registrations(config.gateway, {"HELPER_KEY": KEY}) == [
        {"model": "helper", "kind": "openai", "url": OPENAI["url"], "remote_model": "gpt", "api_key": KEY},
        {"model": "anthropic/claude-4.5", "kind": "litellm"},
    ]
    assert registrations(compose().gateway, {}) == []


@pytest.mark.parametrize("environment", [{}, {"HELPER_KEY": ""}])
def test_a_variable_that_is_not_set_is_named(environment: dict[str, str]) -> None:
    config = compose(backends(helper=OPENAI | {"api_key_env": "HELPER_KEY"}))
    with pytest.raises(
        ConfigError, match=r"gateway\.backends\.helper\.api_key_env: .* HELPER_KEY is not set, .*: set it"
    ):
        registrations(config.gateway, environment)


def test_a_run_does_not_begin_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HELPER_KEY", raising=False)
    algorithm = PPO(backends(helper=OPENAI | {"api_key_env": "HELPER_KEY"}))
    try:
        with pytest.raises(ConfigError, match="HELPER_KEY is not set"):
            algorithm.open(tmp_path)
    finally:
        algorithm.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match="the run is not open"):
        _ = algorithm.models


def test_the_command_line_names_models_whole_or_key_by_key() -> None:
    named = {"gateway": {"backends": {"checkpoint": OPENAI}}}  # as a section of verl's
    assert list(compose(named).gateway.frozen_models()) == ["checkpoint"]
    whole = compose(command_line=["gateway.backends={judge: {kind: openai, url: 'https://h/v1', api_key_env: A_KEY}}"])
    parts = compose(
        command_line=[
            "+gateway.backends.judge.kind=openai",
            "+gateway.backends.judge.url='https://h/v1'",
            "+gateway.backends.judge.api_key_env=A_KEY",
        ]
    )
    one = compose(command_line=["+gateway.backends.judge={kind: openai, url: 'https://h/v1', api_key_env: A_KEY}"])
    given = compose(backends(judge={"kind": "openai", "url": "https://h/v1", "api_key_env": "A_KEY"}))
    assert whole == one == parts == given


def test_what_is_kept_of_a_run_names_the_variable(tmp_path: Path) -> None:
    config = compose(backends(**{"gpt-4.1": OPENAI | {"api_key_env": "HELPER_KEY"}}))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose(file=tmp_path / "config.yaml") == config
    assert "HELPER_KEY" in to_yaml(config)


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (
            OPENAI | {"api_key": KEY},
            r"helper\.api_key: .* put the key into an environment variable and give the .* name",
        ),
        (OPENAI | {"api_key": None}, "no key stands in it"),
        (OPENAI | {"key": KEY}, "unknown field `key`; there are kind .*, url, remote_model and api_key_env"),
        (OPENAI | {"api_key_env": KEY}, "the NAME of an environment variable, in capital letters, never the key"),
        (OPENAI | {"url": f"https://user:{KEY}@h/v1"}, "url is http.* without a user, a key or a query"),
        (OPENAI | {"url": f"https://h/v1?key={KEY}"}, "url is http.* without a user, a key or a query"),
        (OPENAI | {"url": "helper.example"}, "url is http"),
        ({"kind": "openai"}, r"helper\.url: kind openai needs the service's base URL"),
        ({"kind": "vllm"}, "Invalid enum value 'vllm'.*kind \\(openai, litellm\\)"),
        ({"remote_model": KEY}, "missing required field `kind`"),
        (KEY, "Expected `object`, got `str`"),
        ([KEY], "Expected `object`, got `array`"),
    ],
)
def test_what_is_wrong_is_told_with_advice_and_without_the_value(wrong: Any, advice: str) -> None:
    with pytest.raises(BackendRefused, match=advice) as refused:
        compose(backends(helper=wrong))
    assert "gateway.backends.helper" in str(refused.value)
    assert KEY not in "".join(traceback.format_exception(refused.value))


def test_a_model_has_a_name() -> None:
    with pytest.raises(BackendRefused, match=r"gateway\.backends: a model has no name"):
        compose(backends(**{"": {"kind": "litellm"}}))
