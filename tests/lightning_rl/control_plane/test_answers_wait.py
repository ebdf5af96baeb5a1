"""What an answer waits for in the store: nothing, but for one question after a restart."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.control_plane.gateways.store_ledger import StoreLedger, claimed_info
from lightning_rl.store.contract import Claim, GatewayInfo, RolloutRequest
from lightning_rl.store.errors import StoreUnwritable
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.http.keys import sign_attempt_key
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.lightning_rl.control_plane.gateways.test_membership import until
from tests.proxy.conftest import MODEL, TOKENIZER, ScriptedEngine

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def renderer() -> LibraryRenderer:
    return load_renderer(TOKENIZER, "qwen3", MODEL)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    with closing(SqlStore(f"sqlite:///{tmp_path / 'run.db'}")) as store:
        yield store


class Hanging:
    """A store's method that says nothing until `end`; then it fails. Of a test that fails it is the end, too."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.end = self._over.set

    def __enter__(self) -> "Hanging":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, *_: Any) -> None:
        self._over.wait()
        raise StoreUnwritable("gone")


def gateway_of(
    store: SqlStore, sql: SqlThread, renderer: LibraryRenderer, folder: Path, fleet: Membership | None = None
) -> Gateway:
    router = Router(MODEL)
    router.register(ScriptedEngine(FastTokenizer(TOKENIZER)))
    ledger = StoreLedger(store, sql, fleet)
    return Gateway(ledger=ledger, secret=store.secret, journal=folder / "journal", renderer=renderer, router=router)


async def ask(gateway: Gateway, claim: Claim, messages: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Status and body of a chat completion, asked for at the gateway's door."""
    rollout_id, attempt_id = claim.rollout.rollout_id, claim.attempt.attempt_id
    key = sign_attempt_key(gateway._secret, rollout_id, attempt_id, int(time.time()) + 600)
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions",
        "headers": [(b"authorization", f"Bearer {key}".encode())],
    }  # fmt: skip
    body = json.dumps({"model": MODEL, "messages": messages}).encode()
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    said: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()  # a client that stays
        return parts.pop()

    async def send(message: Any) -> None:
        said.append(message)

    async with asyncio.timeout(60):
        await gateway(scope, receive, send)
    return said[0]["status"], json.loads(b"".join(one.get("body", b"") for one in said))


def went_on(messages: list[dict[str, Any]], answer: dict[str, Any]) -> list[dict[str, Any]]:
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    return [*messages, said, {"role": "user", "content": "and?"}]


def calls(store: SqlStore, claim: Claim) -> list[Call]:
    return calls_of(store.trace(claim.rollout.rollout_id, claim.attempt.attempt_id).spans)


@pytest.mark.parametrize("gateways", ["one, of its own store", "one", "several"])
def test_no_answer_waits_for_a_store_that_hangs_or_is_refused_because_of_it(
    store: SqlStore, renderer: LibraryRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gateways: str
) -> None:
    """Also when the gateway's lease is long over, whether others share the store or not."""

    async def work(hanging: Hanging) -> None:
        fleet = None
        if gateways != "one, of its own store":
            fleet = Membership(store, gateway_id="g", url="http://g", lease_seconds=0.2, every_seconds=0.05)
        if gateways == "several":
            store.gateways.announce(GatewayInfo(gateway_id="other", url="http://other"), 600)
        sql = SqlThread()
        gateway = gateway_of(store, sql, renderer, tmp_path, fleet)
        if fleet is not None:
            await fleet.join()
            assert len(fleet.others) == (gateways == "several")
            renewing = asyncio.create_task(fleet.run(lambda: (0, 0)))
        await gateway.start()
        claim = store.start(RolloutRequest(task=1), "w")
        gateway.open(claimed_info(claim))
        for where, what in ((store, "add_packed"), (store.gateways, "announce")):
            monkeypatch.setattr(where, what, hanging)
        status, answer = await ask(gateway, claim, HELLO)
        assert status == 200
        if fleet is not None:
            await until(lambda: not fleet.sure)
        status, answer = await ask(gateway, claim, went_on(HELLO, answer))
        assert status == 200
        assert gateway.state()["records_waiting"] == 2
        assert calls(store, claim) == []
        monkeypatch.undo()
        hanging.end()
        await gateway.seal(claim.rollout.rollout_id, claim.attempt.attempt_id)
        first, second = calls(store, claim)
        assert second.parent_id == first.call_id
        if fleet is not None:
            renewing.cancel()
            await fleet.leave(stored=False)
        await gateway.stop()
        sql.close()

    async def to_its_end() -> None:
        with Hanging() as hanging:
            await work(hanging)

    asyncio.run(to_its_end())


def test_after_a_restart_the_store_is_asked_once_for_each_attempt_and_knows_what_the_journal_knew(
    store: SqlStore, renderer: LibraryRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()
    openings, trace = store.openings, store.trace

    def counted_openings(places: Sequence[tuple[str, str]]) -> Any:
        asked.update(f"opening {rollout_id}" for rollout_id, _ in places)
        return openings(places)

    def counted_trace(rollout_id: str, attempt_id: str) -> Any:
        asked[f"trace {rollout_id}"] += 1
        return trace(rollout_id, attempt_id)

    async def before(claim: Claim) -> list[dict[str, Any]]:
        """A server that is killed when it has answered, with the record in its journal alone."""
        sql = SqlThread()
        with monkeypatch.context() as broken, Hanging() as hanging:
            broken.setattr(store, "add_packed", hanging)
            gateway = gateway_of(store, sql, renderer, tmp_path)
            await gateway.start()
            gateway.open(claimed_info(claim))
            _, answer = await ask(gateway, claim, HELLO)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            hanging.end()
            sql.close()
        assert calls(store, claim) == []
        return went_on(HELLO, answer)

    async def after(claim: Claim, fresh: Claim, history: list[dict[str, Any]]) -> None:
        sql = SqlThread()
        gateway = gateway_of(store, sql, renderer, tmp_path)
        await gateway.start()
        monkeypatch.setattr(store, "openings", counted_openings)
        monkeypatch.setattr(store, "trace", counted_trace)
        answers = await asyncio.gather(*(ask(gateway, claim, history) for _ in range(3)))
        assert [status for status, _ in answers] == [200] * 3
        await ask(gateway, claim, went_on(history, answers[0][1]))
        for _ in range(2):
            await ask(gateway, fresh, HELLO)
        assert asked == {"opening kept": 1, "trace kept": 1, "opening fresh": 1}  # of the other nothing is recorded
        await gateway.stop()
        monkeypatch.undo()
        sql.close()

    claim, fresh = (store.start(RolloutRequest(task=1, rollout_id=name), "w") for name in ("kept", "fresh"))
    history = asyncio.run(before(claim))
    asyncio.run(after(claim, fresh, history))
    first, *second, third = calls(store, claim)
    assert [call.parent_id for call in second] == [first.call_id] * 3
    assert [call.number for call in (first, *second, third)] == [0, 1, 2, 3, 4]
    assert third.parent_id in [call.call_id for call in second]
