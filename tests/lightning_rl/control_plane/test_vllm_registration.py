"""A vLLM server is probed as it is registered: its tokens are marked with what was found, and a poor one is refused."""

import asyncio
from pathlib import Path

import pytest

from lightning_rl.control_plane.gateways.engine_registration import attacher
from lightning_rl.control_plane.gateways.engines import EngineRequest
from lightning_rl.control_plane.launch import ServerNotStarted, launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import Conflict, Invalid
from lightning_rl_proxy.routing.router import Router
from lightning_rl_proxy.sampling import Sampling
from tests.lightning_rl.control_plane.test_process import policy_of
from tests.proxy.engines.vllm_stand_in import StandIn, serving


class Renderer:
    stop_token_ids = (0,)


def attached(url: str) -> Router:
    router = Router("m")
    request = EngineRequest(model="m", kind="vllm", url=url)
    asyncio.run(attacher(router, Renderer())(request))  # type: ignore[arg-type]
    return router


@pytest.mark.parametrize(("mode", "kind"), [("raw", "raw"), ("processed", "sampled")])
def test_a_registered_engine_marks_its_tokens_with_the_kind_that_was_found(mode: str, kind: str) -> None:
    with serving(StandIn(mode=f"{mode}_logprobs").app) as url:
        [pool] = attached(url)._engines.values()
        [engine] = [replica.engine for replica in pool.replicas]
        assert engine.logprob_kind(Sampling(temperature=0.7)) == kind


def test_a_refused_engine_is_invalid_and_an_absent_one_a_conflict() -> None:
    with serving(StandIn(scale_out=False).app) as url, pytest.raises(Invalid, match="--enable-scale-out"):
        attached(url)
    with pytest.raises(Conflict, match="cannot be reached"):
        attached("http://127.0.0.1:1")


def test_a_server_registers_at_its_start_and_by_request_what_has_all_flags(tmp_path: Path) -> None:
    with serving(StandIn().app) as good, serving(StandIn(dev_mode=False).app) as poor:
        first = {"model": "policy", "kind": "vllm", "url": good}
        with launch(tmp_path, policy_of(engines=[first]), admin_key="a", runner_key="r") as running:
            store = HttpStore(running.url, "a")
            assert store.state()["models"]["policy"]["engines"] == 1
            with pytest.raises(Invalid, match="VLLM_SERVER_DEV_MODE=1"):
                store.register_engine("policy", "vllm", poor)
            with pytest.raises(Conflict, match="cannot be reached"):
                store.register_engine("policy", "vllm", "http://127.0.0.1:1")
            assert store.register_engine("policy", "vllm", good) == store.engines()[0]
            assert [engine["url"] for engine in store.engines()] == [good]
            assert store.state()["models"]["policy"]["engines"] == 1


def test_a_server_whose_engine_lacks_a_flag_does_not_start_and_names_it(tmp_path: Path) -> None:
    with serving(StandIn(scale_out=False).app) as url:
        poor = {"model": "policy", "kind": "vllm", "url": url}
        with (
            pytest.raises(ServerNotStarted, match="--enable-scale-out"),
            launch(tmp_path, policy_of(engines=[poor]), admin_key="a", runner_key="r"),
        ):
            pass
