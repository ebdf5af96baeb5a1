"""As many rollouts at once as the engine bears: a real engine of four places, and agents that rest between calls."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import lightning_rl as lrl
from lightning_rl import tutorial
from lightning_rl.agents.agent import as_agent
from lightning_rl.control_plane.launch import launch
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.inference.load import ModelSource
from lightning_rl.runner.launch import launch as launch_runners
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutConfig, RolloutRequest
from tests.lightning_rl.control_plane.test_process import policy_of

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PLACES, ROLLOUTS = 4, 32


@lrl.rollout
def rests(task: int, llm: lrl.LLM) -> float:
    """Two calls, and a tool between them that takes its time."""
    long: Any = {"max_tokens": 80, "temperature": 50.0}  # so hot that answers go on to their limit
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        chat: Any = [{"role": "user", "content": f"table {task}: size id\nHow many are there?"}]
        first = client.chat.completions.create(model=llm.model, messages=chat, **long)
        time.sleep(0.1 * (1 + task % 7))
        chat += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And?"},
        ]
        client.chat.completions.create(model=llm.model, messages=chat, **long)
    return 1.0


@contextmanager
def watched(policy: EmbeddedPolicy) -> Iterator[list[int]]:
    """How many requests wait in the engine, again and again while the block runs."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            seen.append(max(0, policy.engine.in_flight - PLACES))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def ended(store: HttpStore, names: list[str]) -> list[str]:
    """Wait until all have; their states."""
    end, left = time.monotonic() + 240, set(names)
    while left:
        assert time.monotonic() < end, f"{len(left)} rollouts did not end"
        left.difference_update(rollout.rollout_id for rollout in store.wait(sorted(left), 2))
    return [store.rollout(name).status for name in names]


def test_the_queue_of_a_small_engine_stays_short_and_all_rollouts_end(tmp_path: Path) -> None:
    policy = EmbeddedPolicy(ModelSource(device="cpu"), threads=1, max_num_seqs=PLACES)
    policy.start()
    names = [f"r{number}" for number in range(ROLLOUTS)]
    settings = policy_of(model=policy.name, tokenizer=str(tutorial.checkpoint()), engines=policy.registrations())
    try:
        with launch(tmp_path, settings, admin_key="a", runner_key="r") as running, watched(policy) as waiting:
            store = HttpStore(running.url, "a")
            end = time.monotonic() + 20
            while store.state()["models"][policy.name]["capacity"] != PLACES:
                assert time.monotonic() < end, "the engine's capacity is not known"
            with launch_runners(ROLLOUTS, as_agent(rests), running.url, "r", log_dir=tmp_path):
                store.enqueue([RolloutRequest(task=i, rollout_id=name) for i, name in enumerate(names)])
                assert ended(store, names) == ["succeeded"] * ROLLOUTS
    finally:
        policy.close()
    # Without a bound up to 28 wait; what still does are agents that come back from their tools while it is full.
    busy = [n for n in waiting if n] or [0]
    assert sum(waiting) / len(waiting) < PLACES
    assert max(busy) < ROLLOUTS // 2


def test_a_run_whose_engine_is_away_ends_its_rollouts_instead_of_holding_them_back(tmp_path: Path) -> None:
    policy = EmbeddedPolicy(ModelSource(device="cpu"), threads=1, max_num_seqs=PLACES)
    policy.start()
    names = [f"r{number}" for number in range(3 * PLACES)]
    settings = policy_of(model=policy.name, tokenizer=str(tutorial.checkpoint()), engines=policy.registrations())
    with launch(tmp_path, settings, admin_key="a", runner_key="r") as running:
        store = HttpStore(running.url, "a")
        end = time.monotonic() + 20
        while store.state()["models"][policy.name]["capacity"] != PLACES:
            assert time.monotonic() < end, "the engine's capacity is not known"
        policy.close()
        once = RolloutConfig(max_attempts=1)
        with launch_runners(8, as_agent(rests), running.url, "r", log_dir=tmp_path):
            store.enqueue([RolloutRequest(task=i, rollout_id=name, config=once) for i, name in enumerate(names)])
            assert ended(store, names) == ["failed"] * len(names)


def test_a_paused_model_takes_as_many_rollouts_as_it_bears_and_the_others_when_it_goes_on(tmp_path: Path) -> None:
    policy = EmbeddedPolicy(ModelSource(device="cpu"), threads=1, max_num_seqs=PLACES)
    policy.start()
    names = [f"r{number}" for number in range(3 * PLACES)]
    settings = policy_of(model=policy.name, tokenizer=str(tutorial.checkpoint()), engines=policy.registrations())
    try:
        with launch(tmp_path, settings, admin_key="a", runner_key="r") as running:
            store = HttpStore(running.url, "a")
            end = time.monotonic() + 20
            while store.state()["models"][policy.name]["capacity"] != PLACES:
                assert time.monotonic() < end, "the engine's capacity is not known"
            store.pause(policy.name)
            with launch_runners(2 * PLACES, as_agent(rests), running.url, "r", log_dir=tmp_path):
                store.enqueue([RolloutRequest(task=i, rollout_id=name) for i, name in enumerate(names)])
                # Some may be held back before those that are let through have begun.
                while not (now := store.state())["claims_held_back"] or now["open_attempts"] < PLACES:
                    assert time.monotonic() < end + 40, "nothing is held back"
                    time.sleep(0.02)
                assert now["open_attempts"] == PLACES
                store.resume(policy.name)
                assert ended(store, names) == ["succeeded"] * len(names)
    finally:
        policy.close()
