"""A store that falls behind: the attempt fails as infrastructure and is retried; nobody else notices."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import openai
import pytest

from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Ending, Finish, RolloutRequest
from lightning_rl.store.errors import Conflict
from lightning_rl_adapters.call import calls_of
from tests.lightning_rl.control_plane.test_killed import ask, engine
from tests.lightning_rl.control_plane.test_process import TOKENIZER

PROGRAM = """
import asyncio, os, sys

from lightning_rl.control_plane import process
from lightning_rl.control_plane.gateways.store_ledger import StoreLedger
from lightning_rl_proxy.recording.recorder import Recorder

Recorder.__init__.__kwdefaults__["max_waiting"] = 2
take = StoreLedger.add_spans

async def add_spans(self, spans):
    while not os.path.exists(sys.argv[1]):
        await asyncio.sleep(0.01)
    await take(self, spans)

StoreLedger.add_spans = add_spans
process.main()
"""


def test_an_attempt_whose_calls_were_given_up_is_retried_and_the_tokens_add_up(tmp_path) -> None:
    settings = {"store": f"sqlite:///{tmp_path / 'store.db'}", "run_dir": str(tmp_path), "admin_key": "a"}
    settings |= {"runner_key": "r", "model": "policy", "tokenizer": str(TOKENIZER), "renderer": "qwen3"}
    with engine() as sampler:
        settings |= {"engines": [sampler]}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "go")]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            child.stdin.write(msgspec.json.encode(settings) + b"\n")
            child.stdin.flush()
            store = HttpStore(msgspec.json.decode(child.stdout.readline())["url"], "a")
            store.enqueue([RolloutRequest(task=1, rollout_id="r1")])
            (claim,) = store.claim("w")
            call(claim, 3)  # the third finds no room
            finish = Finish(status="succeeded", reward=1.0)
            with pytest.raises(openai.ConflictError, match="did not take its records in time"):
                call(claim, 1)
            with ThreadPoolExecutor(1) as threads:
                finishing = threads.submit(store.finish, "r1", claim.attempt.attempt_id, finish)
                (tmp_path / "go").touch()
                with pytest.raises(Conflict, match="was stored as failed, not as succeeded: RecordingLost"):
                    finishing.result(20)
            with pytest.raises(Conflict, match="was stored as failed"):  # said again
                store.finish("r1", claim.attempt.attempt_id, finish)
            many = [Ending(rollout_id="r1", attempt_id=claim.attempt.attempt_id, finish=finish)]
            with pytest.raises(Conflict, match="was stored as failed"):
                store.finish_many(many)
            (again,) = store.claim("w", wait_seconds=30)
            assert again.attempt.sequence == 2
            call(again, 2)
            store.finish("r1", again.attempt.attempt_id, finish)
            state = store.state()
            trace = store.traces(["r1"])["r1"]
            assert (trace.rollout.status, trace.rollout.counting_attempt_id) == ("succeeded", again.attempt.attempt_id)
            stored = sum(one.sampled_tokens for a in trace.attempts for one in calls_of(a.spans))
            assert state["models"]["policy"]["tokens_received"] == stored + state["tokens_pending"]
            assert state["tokens_pending"] == state["tokens_lost"] > 0
            child.stdin.close()
            assert child.wait(20) == 0


def call(claim, times: int) -> None:
    llm = claim.resources["main_llm"]
    with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0) as sdk:
        for _ in range(times):
            ask(sdk, stream=False)
