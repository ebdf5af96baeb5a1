"""An SGLang server takes new weights from a folder, or the trainer hears why not."""

import socket
from pathlib import Path

import pytest
from aiohttp import web

from lightning_rl.inference.servers.errors import Unreached, WeightsRefused
from lightning_rl.inference.sglang import update_from_disk
from tests.proxy.engines.sglang_stand_in import StandIn
from tests.proxy.engines.vllm_stand_in import serving


def test_the_weights_of_a_folder_are_loaded_under_their_version_and_the_caches_flushed() -> None:
    server = StandIn()
    with serving(server.app) as url:
        update_from_disk(url + "/", Path("/models/step-7"), 7)
    assert server.weight_version == "7"
    asked = {"model_path": "/models/step-7", "weight_version": "7", "flush_cache": True, "abort_all_requests": False}
    assert server.orders == [("/update_weights_from_disk", asked)]


def test_a_refused_update_says_where_what_and_why() -> None:
    server = StandIn()
    words = r"SGLang server http://.* did not take version 7 from /missing \(400\): Failed to get weights iterator"
    with serving(server.app) as url, pytest.raises(WeightsRefused, match=words):
        update_from_disk(url, Path("/missing"), 7)
    assert server.weight_version == "default"


def test_a_server_without_the_route_or_without_an_answer_did_not_update() -> None:
    with serving(web.Application()) as url, pytest.raises(WeightsRefused, match=r"\(404\): 404: Not Found"):
        update_from_disk(url, Path("/models"), 7)
    with pytest.raises(Unreached, match=r"http://127\.0\.0\.1:1/update_weights_from_disk does not answer"):
        update_from_disk("http://127.0.0.1:1", Path("/models"), 7)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreached, match="does not answer"):
        update_from_disk(f"http://127.0.0.1:{silent.getsockname()[1]}", Path("/models"), 7, seconds=0.05)
