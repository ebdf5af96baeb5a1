"""The store as the gateway sees it."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_rl.control_plane.gateways.resolve import check_resources, resolve
from lightning_rl.control_plane.gateways.store_ledger import StoreLedger
from lightning_rl.store.contract import Finish, ResourcesRequest, RolloutRequest
from lightning_rl.store.errors import Invalid
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.recording.ledger import AttemptInfo

POLICY = {
    "type": "proxy_llm",
    "model": "m",
    "sampling_parameters": {"temperature": 0.7},
    "val_sampling_parameters": {"temperature": 0},
}


def test_an_attempt_has_the_sampling_and_the_seed_key_of_its_mode() -> None:
    store, sql = SqlStore("sqlite://"), SqlThread()
    store.enqueue([RolloutRequest(task=1, rollout_id="bare")])
    store.publish(ResourcesRequest(resources={"main_llm": POLICY}))
    numbered = {"task_index": 5}
    store.enqueue(
        [
            RolloutRequest(task=1, rollout_id="train", metadata=numbered),
            RolloutRequest(task=1, rollout_id="train.run", metadata=numbered | {"seed_key": "train"}),
            RolloutRequest(task=1, rollout_id="val", mode="val", metadata=numbered),
            RolloutRequest(task=1, rollout_id="test", mode="test"),
        ]
    )
    attempts = {c.rollout.rollout_id: c.attempt.attempt_id for c in store.claim("w", limit=5)}
    store.finish("bare", attempts["bare"], Finish(status="succeeded"))
    ledger = StoreLedger(store, sql)
    infos = {r: asyncio.run(ledger.attempt(r, a)) for r, a in attempts.items()}
    assert {r: (i.mode, i.open, i.sampling, i.seed_key) for r, i in infos.items()} == {
        "bare": ("train", False, {}, "bare"),
        "train": ("train", True, {"temperature": 0.7}, "train"),
        "train.run": ("train", True, {"temperature": 0.7}, "train"),
        "val": ("val", True, {"temperature": 0}, "val/5"),
        "test": ("test", True, {"temperature": 0}, "test"),
    }
    assert asyncio.run(ledger.attempt("train", "nope")) is None
    sql.close()
    store.close()


def test_the_store_is_asked_of_attempts_together_that_call_while_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    store, sql = SqlStore("sqlite://"), SqlThread()
    openings, asked, busy = store.openings, [], threading.Event()

    def hanging(places: Sequence[tuple[str, str]]) -> Any:
        asked.append({rollout_id for rollout_id, _ in places})
        busy.wait(10)
        return openings(places)

    store.enqueue([RolloutRequest(task=n, rollout_id=f"r{n}") for n in range(5)])
    claims = {claim.rollout.rollout_id: claim.attempt.attempt_id for claim in store.claim("w", limit=5)}
    store.finish("r4", claims["r4"], Finish(status="succeeded"))
    monkeypatch.setattr(store, "openings", hanging)
    ledger = StoreLedger(store, sql)

    async def work() -> dict[str, AttemptInfo | None]:
        first = asyncio.create_task(ledger.attempt("r0", claims["r0"]))
        while not asked:
            await asyncio.sleep(0.001)
        names = ["r1", "r2", "r3", "r4"]
        others = [asyncio.create_task(ledger.attempt(name, claims[name])) for name in names]
        unknown = asyncio.create_task(ledger.attempt("r1", "nope"))
        await asyncio.sleep(0)
        others[0].cancel()  # its client leaves: the others hear their answers all the same
        busy.set()
        found = dict(zip(names[1:], await asyncio.gather(*others[1:]), strict=True))
        return {"r0": await first, **found, "nope": await unknown}

    infos = asyncio.run(work())
    assert asked == [{"r0"}, {"r1", "r2", "r3", "r4"}]
    assert {name: info and (info.rollout_id, info.open) for name, info in infos.items()} == {
        "r0": ("r0", True), "r2": ("r2", True), "r3": ("r3", True), "r4": ("r4", False), "nope": None,
    }  # fmt: skip
    sql.close()
    store.close()


def test_an_attempt_of_several_policies_has_the_sampling_of_each_the_first_of_them_in_front() -> None:
    store, sql = SqlStore("sqlite://"), SqlThread()
    other = {**POLICY, "model": "a", "agents": "a|x.*", "sampling_parameters": {"temperature": 0.2}}
    judge = {"type": "proxy_llm", "model": "judge"}
    first = {**POLICY, "agents": "m"}
    resources = {"a": other, "b": first, "main_llm": first, "judge": judge}
    store.publish(ResourcesRequest(resources=resources))
    store.enqueue([RolloutRequest(task=1, rollout_id="r")])
    [claim] = store.claim("w")
    info = asyncio.run(StoreLedger(store, sql).attempt("r", claim.attempt.attempt_id))
    assert info is not None
    assert [(one.name, one.model, one.agents, one.sampling) for one in info.policies] == [
        ("b", "m", "m", {"temperature": 0.7}),
        ("a", "a", "a|x.*", {"temperature": 0.2}),
    ]
    llms = resolve(claim, "http://h", b"secret").resources
    root = f"http://h/rollout/r/attempt/{claim.attempt.attempt_id}"
    assert {name: llm["base_url"] for name, llm in llms.items()} == {
        "main_llm": f"{root}/v1",
        "judge": f"{root}/v1",
        "a": f"{root}/agent/a/v1",
        "b": f"{root}/agent/b/v1",
    }
    with pytest.raises(Invalid, match="resource 'a': agents is no regular expression"):
        check_resources(ResourcesRequest(resources={"a": {**other, "agents": "("}}))
    sql.close()
    store.close()
