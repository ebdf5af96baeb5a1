"""A gateway among others: its lease, which attempts are its own, and what servers do for each other."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import urllib3

from lightning_rl.control_plane.gateways import membership
from lightning_rl.control_plane.gateways.cluster_rpc import ASKED, peer_key
from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.store import schema
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, GatewayInfo, Overdue, RolloutRequest
from lightning_rl.store.errors import Conflict, StoreUnwritable
from lightning_rl.store.sql import SqlStore
from lightning_rl_proxy.gateway import Gateway
from tests.lightning_rl.store.backends import served

ME, OTHER = "me", GatewayInfo(gateway_id="other", url="http://other")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    with closing(SqlStore(f"sqlite:///{tmp_path / 'run.db'}")) as store:
        claim = store.start(RolloutRequest(task=1, rollout_id="r"), "w")
        store.gateways.announce(GatewayInfo(gateway_id=ME, url="http://me"), 600)
        store.gateways.take("r", claim.attempt.attempt_id, ME)
        yield store


def name(store: SqlStore) -> tuple[str, str]:
    return "r", store.rollout("r").attempts[0].attempt_id


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


def within(store: SqlStore, work: Callable[[Membership], Coroutine[Any, Any, None]], **fields: Any) -> None:
    """Do some work with a gateway that renews its lease often."""

    async def run() -> None:
        fleet = Membership(store, gateway_id=ME, url="http://me", every_seconds=0.02, **fields)
        await fleet.join()
        renewing = asyncio.create_task(fleet.run(lambda: (1, 2)))
        try:
            await work(fleet)
        finally:
            renewing.cancel()
            await fleet.leave(stored=False)

    asyncio.run(run())


def refusing(*_: Any) -> None:
    raise StoreUnwritable("gone")


def test_it_is_sure_of_what_it_holds_until_its_lease_is_over_and_again_when_it_has_looked(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(fleet: Membership) -> None:
        store.gateways.announce(OTHER, 600)
        await until(lambda: [each.gateway_id for each in fleet.others] == [OTHER.gateway_id])
        assert fleet.sure
        monkeypatch.setattr(store.gateways, "announce", refusing)
        await until(lambda: not fleet.sure)
        monkeypatch.undo()
        await until(lambda: fleet.lapsed)
        assert not fleet.sure  # until it is known what others have ended meanwhile
        assert await fleet.lost([name(store), ("r", "not-mine")]) == [("r", "not-mine")]
        fleet.lapsed = False
        assert fleet.sure

    within(store, work, lease_seconds=0.3)


def test_who_was_away_calls_nobody_gone_before_the_others_had_time_to_renew(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is away is away for all: the first to reach it again must not end what the others have."""
    monkeypatch.setattr(membership, "APART_SECONDS", 0.05)
    claim = store.start(RolloutRequest(task=2, rollout_id="others"), "w")
    place = ("others", claim.attempt.attempt_id)
    store.gateways.announce(OTHER, 600)
    store.gateways.take(*place, OTHER.gateway_id)
    store.gateways.announce(OTHER, -600)  # its lease is long over
    overdue = [Overdue(rollout_id=place[0], attempt_id=place[1], why="lease")]

    async def gone(fleet: Membership) -> tuple[list[str], set[str]]:
        return [late.attempt_id for late in await fleet.abandoned()], await fleet.may_end(overdue)

    async def work(fleet: Membership) -> None:
        assert await gone(fleet) == ([], set())
        await until(lambda: fleet.knows_who_is_gone)
        assert await gone(fleet) == ([place[1]], {place[1]})
        monkeypatch.setattr(store.gateways, "announce", refusing)
        await until(lambda: not fleet.sure)
        assert await gone(fleet) == ([], set())
        monkeypatch.undo()
        monkeypatch.setattr(membership, "APART_SECONDS", 600)
        await until(lambda: fleet.lapsed)
        assert await gone(fleet) == ([], set())

    within(store, work, lease_seconds=0.3)


Pair = tuple[str, str, SqlStore]


@pytest.fixture
def pair(postgres_url: str, tmp_path: Path) -> Iterator[Pair]:
    """The URLs of two servers of one store, and the store."""
    with ExitStack() as opened:
        urls = []
        store = opened.enter_context(closing(SqlStore(postgres_url)))
        for which in ("one", "two"):
            own = opened.enter_context(closing(SqlStore(postgres_url)))
            (tmp_path / which).mkdir()

            def fleet(url: str, which: str = which, own: SqlStore = own) -> Membership:
                return Membership(own, gateway_id=which, url=url, every_seconds=0.05)

            urls.append(opened.enter_context(served(own, tmp_path / which, sweep_seconds=0.05, fleet=fleet)))
        HttpStore(urls[0], "admin").publish({"main_llm": {"type": "proxy_llm", "model": "m"}})
        yield urls[0], urls[1], store


def call(url: str, claim: Any) -> urllib3.BaseHTTPResponse:
    """A call of the claim's attempt at any gateway."""
    llm = claim.resources["main_llm"]
    path = llm["base_url"].partition("/rollout/")[2]
    headers = {"authorization": f"Bearer {llm['api_key']}"}
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    return urllib3.request("POST", f"{url}/rollout/{path}/chat/completions", json=body, headers=headers, retries=False)


def test_a_claim_names_the_least_busy_gateway_and_only_that_answers(pair: Pair) -> None:
    one, two, store = pair
    claims = [HttpStore(one, "admin").start(RolloutRequest(task=i)) for i in range(4)]
    at = [claim.resources["main_llm"]["base_url"].partition("/rollout")[0] for claim in claims]
    assert sorted(at) == sorted([one, one, two, two])
    for claim, url in zip(claims, at, strict=True):
        other = two if url == one else one
        refused = call(other, claim)
        assert (refused.status, refused.headers["x-should-retry"]) == (503, "true")
        assert f"is at the gateway {url}" in refused.json()["error"]["message"]
        assert "no engine serves" in call(url, claim).json()["error"]["message"]  # the key is good there
    listed = HttpStore(two, "admin")._call("GET", "/gateways", None, dict[str, Any])["gateways"]
    assert {each["url"] for each in listed} == {one, two}
    assert len(store.gateways.live()) == 2


def test_a_finish_at_the_other_server_shuts_the_door_where_the_attempt_is(pair: Pair) -> None:
    one, two, _ = pair
    for _ in range(2):
        claim = HttpStore(one, "admin").start(RolloutRequest(task=1))
        url = claim.resources["main_llm"]["base_url"].partition("/rollout")[0]
        call(url, claim)
        other = HttpStore(two if url == one else one, "admin")
        other.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, Finish(status="succeeded"))
        assert call(url, claim).status == 409
        assert other.rollout(claim.rollout.rollout_id).status == "succeeded"


@pytest.mark.parametrize("lost", [False, True])
def test_a_gateway_that_gave_records_of_an_attempt_up_leaves_nothing_to_others(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    def fleet(url: str) -> Membership:
        return Membership(store, gateway_id="one", url=url, every_seconds=0.05)

    monkeypatch.setattr(Gateway, "is_lost", lambda *_: lost)
    with closing(SqlStore(postgres_url)) as store:
        with served(store, tmp_path, fleet=fleet) as url:
            HttpStore(url, "admin").publish({"main_llm": {"type": "proxy_llm", "model": "m"}})
            claim = HttpStore(url, "admin").start(RolloutRequest(task=1))
        owner = store.gateways.owner(claim.attempt.attempt_id)
        assert owner is not None
        assert owner.left == (not lost)


def test_an_attempt_whose_gateway_is_gone_and_may_have_kept_calls_fails_whatever_its_worker_says(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Membership, "knows_who_is_gone", True)
    one, two, store = pair
    claim = HttpStore(one, "admin").start(RolloutRequest(task=1))
    attempt_id = claim.attempt.attempt_id
    asked = two if claim.resources["main_llm"]["base_url"].startswith(one) else one
    moved = sa.update(schema.placements).where(schema.placements.c.attempt_id == attempt_id)
    store._database.write(lambda connection: connection.execute(moved.values(gateway_id="gone")))  # whom nobody knows
    with pytest.raises(Conflict, match="ServerGone"):
        HttpStore(asked, "admin").finish(claim.rollout.rollout_id, attempt_id, Finish(status="succeeded"))
    [attempt] = HttpStore(asked, "admin").rollout(claim.rollout.rollout_id).attempts
    assert (attempt.error.type, attempt.error.infrastructure) == ("ServerGone", True)


def test_the_key_of_the_gateways_opens_what_they_ask_each_other_and_nothing_else(pair: Pair) -> None:
    one, _, store = pair
    key = {"authorization": f"Bearer {peer_key(store.secret)}"}

    def ask(method: str, path: str, **headers: str) -> int:
        return urllib3.request(method, f"{one}/api/v1{path}", headers=key | headers, json={}, retries=False).status

    assert ask("POST", "/peers/pauses", **{ASKED: "one"}) == 200
    assert ask("POST", "/peers/pauses", **{ASKED: "two"}) == 409  # a balancer led to another gateway than was meant
    assert ask("POST", "/peers/pauses") == 409
    for method, path in (("GET", "/state"), ("POST", "/rollouts/claim"), ("POST", "/pause"), ("GET", "/gateways")):
        assert ask(method, path) == 403
    forged = {"authorization": f"Bearer {peer_key(b'another secret')}", ASKED: "one"}
    assert urllib3.request("POST", f"{one}/api/v1/peers/pauses", headers=forged, json={}, retries=False).status == 401
