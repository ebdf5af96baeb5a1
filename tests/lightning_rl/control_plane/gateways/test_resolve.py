"""What a run publishes of its policy is what the server takes."""

import msgspec
import pytest

from lightning_rl.config import compose
from lightning_rl.control_plane.gateways.resolve import ProxyLLMResource
from lightning_rl.ppo import resolved_config


@pytest.mark.parametrize("mode", ["train", "val"])
def test_the_sampling_of_a_run_is_taken_as_it_is_published(mode: str) -> None:
    config = compose({"actor_rollout_ref": {"rollout": {"ignore_eos": True, "top_k": 5}}})
    published = {"type": "proxy_llm", "model": "policy", **resolved_config.sampling_parameters(config)}
    taken = msgspec.json.decode(msgspec.json.encode(published), type=ProxyLLMResource)
    assert taken.sampling(mode)["ignore_eos"] is True
