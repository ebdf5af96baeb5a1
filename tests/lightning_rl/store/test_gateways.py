"""Who has which attempt: leases, placing, and what a gateway may take over from one that is gone."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import sqlalchemy as sa

from lightning_rl.store.contract import Finish, GatewayInfo, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import NotFound
from lightning_rl.store.gateways import APART_SECONDS
from lightning_rl.store.sql import SqlStore
from tests.lightning_rl.store.conftest import Clock

LEASE = 15.0
PATIENT = RolloutConfig(unresponsive_seconds=1e6, timeout_seconds=None)


def gateway(name: str, **said: int) -> GatewayInfo:
    return GatewayInfo(gateway_id=name, url=f"http://{name}", **said)


@pytest.fixture
def shared(postgres_url: str, clock: Clock) -> Iterator[SqlStore]:
    store = SqlStore(postgres_url, clock)
    yield store
    store.close()


def claimed(store: SqlStore, n: int = 1) -> list[tuple[str, str]]:
    """Rollout and attempt ids of new claims."""
    store.enqueue([RolloutRequest(task=1, config=PATIENT) for _ in range(n)])
    return [(c.rollout.rollout_id, c.attempt.attempt_id) for c in store.claim("w", limit=n)]


def die(clock: Clock) -> None:
    clock.advance(LEASE + APART_SECONDS + 1)


def test_a_gateway_is_there_while_its_lease_holds(shared: SqlStore, clock: Clock) -> None:
    gateways = shared.gateways
    assert gateways.announce(gateway("a"), LEASE) == []
    [other] = gateways.announce(gateway("b", open_attempts=3, calls_in_flight=2), LEASE)
    assert other.gateway_id == "a"
    [seen] = gateways.announce(gateway("a"), LEASE)
    assert (seen.url, seen.open_attempts, seen.calls_in_flight) == ("http://b", 3, 2)
    clock.advance(LEASE - 1)
    gateways.announce(gateway("a"), LEASE)
    clock.advance(2)
    assert [each.gateway_id for each in gateways.live()] == ["a"]


def test_a_claim_names_the_gateway_with_the_fewest_attempts(shared: SqlStore) -> None:
    for name in "abc":
        shared.gateways.announce(gateway(name), LEASE)
    shared.enqueue([RolloutRequest(task=1, config=PATIENT) for _ in range(7)])
    urls = Counter(claim.gateway_url for claim in shared.claim("w", limit=7))
    assert sorted(urls.values()) == [2, 2, 3]
    [fewest, _] = [url for url, count in urls.items() if count == 2]
    started = shared.start(RolloutRequest(task=1, rollout_id="r"), "w")
    assert started.gateway_url in [url for url, count in urls.items() if count == 2]
    assert fewest
    again = shared.start(RolloutRequest(task=1, rollout_id="r"), "w")
    assert again.gateway_url == started.gateway_url  # the same answer, not another gateway


def test_forty_claims_at_once_over_several_stores_differ_by_one_at_most(postgres_url: str) -> None:
    with ExitStack() as opened:
        stores = [SqlStore(postgres_url) for _ in range(4)]
        for store in stores:
            opened.callback(store.close)
        for name in "abc":
            stores[0].gateways.announce(gateway(name), 600)
        stores[0].enqueue([RolloutRequest(task=i) for i in range(40)])
        urls: list[str | None] = []
        begin = threading.Barrier(8)

        def claim(store: SqlStore) -> None:
            begin.wait()
            for _ in range(5):
                urls.extend(one.gateway_url for one in store.claim("w"))

        threads = [threading.Thread(target=claim, args=(stores[i % 4],)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(Counter(urls).values()) == [13, 13, 14]


def test_an_ended_attempt_is_nobodys_and_makes_room(shared: SqlStore) -> None:
    for name in "ab":
        shared.gateways.announce(gateway(name), LEASE)
    first, second = claimed(shared), claimed(shared)
    [(rollout_id, attempt_id)] = first
    owner = shared.gateways.owner(attempt_id)
    assert owner is not None
    shared.finish(rollout_id, attempt_id, Finish(status="succeeded"))
    assert shared.gateways.owner(attempt_id) is None
    assert shared.gateways.take(rollout_id, attempt_id, "b") is None
    [(_, third)] = claimed(shared)
    placed = shared.gateways.owner(third)
    assert placed is not None
    assert placed.gateway_id == owner.gateway_id
    assert second


def test_without_gateways_claims_name_none(shared: SqlStore) -> None:
    [(rollout_id, attempt_id)] = claimed(shared)
    assert shared.gateways.owner(attempt_id) is None
    shared.gateways.announce(gateway("a"), LEASE)
    owner = shared.gateways.take(rollout_id, attempt_id, "a")  # whoever is asked first has it
    assert owner is not None
    assert owner.gateway_id == "a"
    with pytest.raises(NotFound):
        shared.gateways.take(rollout_id, "nope", "a")


def placed_at_a(store: SqlStore, n: int = 1) -> list[tuple[str, str]]:
    store.gateways.announce(gateway("a"), LEASE)
    return claimed(store, n)


def owner_after(store: SqlStore, place: tuple[str, str], asking: str) -> str:
    owner = store.gateways.take(*place, asking)
    assert owner is not None
    return owner.gateway_id


def test_what_a_gateway_had_that_is_gone_is_tried_again_and_not_taken_over(shared: SqlStore, clock: Clock) -> None:
    [place] = placed_at_a(shared)
    assert owner_after(shared, place, "b") == "a"
    clock.advance(LEASE + APART_SECONDS / 2)  # by the clock of another server it may still live
    owner = shared.gateways.owner(place[1])
    assert owner is not None
    assert (owner.live, owner.gone, owner.left) == (False, False, False)
    assert shared.gateways.abandoned() == []
    die(clock)
    shared.gateways.announce(gateway("b"), LEASE)
    assert owner_after(shared, place, "b") == "a"
    assert [(late.attempt_id, late.why) for late in shared.gateways.abandoned()] == [(place[1], "server")]
    [moved] = shared.expire(shared.gateways.abandoned())
    assert (moved.rollout_id, moved.status) == (place[0], "queued")
    assert shared.gateways.lost("a", [place[1]]) == {place[1]}


def test_a_gateway_that_comes_back_has_its_attempts_until_somebody_ended_them(shared: SqlStore, clock: Clock) -> None:
    [place] = placed_at_a(shared)
    die(clock)
    shared.gateways.announce(gateway("a"), LEASE)
    assert shared.gateways.abandoned() == []
    assert shared.gateways.lost("a", [place[1]]) == set()


def test_a_gateway_that_left_leaves_its_attempts_to_all_at_once(shared: SqlStore, clock: Clock) -> None:
    first, second = placed_at_a(shared, 2)
    shared.gateways.announce(gateway("b"), LEASE)
    shared.gateways.leave("a")
    assert [each.gateway_id for each in shared.gateways.live()] == ["b"]
    assert shared.gateways.abandoned() == []
    assert owner_after(shared, first, "b") == "b"
    assert owner_after(shared, first, "a") == "b"
    assert shared.gateways.lost("a", [first[1], second[1]]) == {first[1]}
    shared.gateways.announce(gateway("a"), LEASE)  # started again, it has what nobody took
    assert owner_after(shared, second, "b") == "a"
    die(clock)
    assert {late.attempt_id for late in shared.gateways.abandoned()} == {first[1], second[1]}


def test_who_may_end_an_overdue_attempt(shared: SqlStore, clock: Clock) -> None:
    [(_, attempt_id)] = placed_at_a(shared)
    assert shared.gateways.may_end("a", [attempt_id]) == {attempt_id}
    assert shared.gateways.may_end("b", [attempt_id]) == set()
    die(clock)
    assert shared.gateways.may_end("b", [attempt_id]) == {attempt_id}


def test_who_is_gone_and_has_nothing_is_forgotten(shared: SqlStore, clock: Clock) -> None:
    [place] = placed_at_a(shared)
    shared.gateways.announce(gateway("b"), LEASE)
    die(clock)
    shared.gateways.announce(gateway("c"), LEASE)
    assert shared.gateways.owner(place[1]) is not None  # `a` still has something
    shared.expire(shared.gateways.abandoned())
    shared.gateways.announce(gateway("c"), LEASE)
    assert shared.gateways.announce(gateway("d"), LEASE)[0].gateway_id == "c"


def test_a_gateway_makes_up_for_lost_time_of_its_own_attempts(shared: SqlStore, clock: Clock) -> None:
    shared.gateways.announce(gateway("a"), LEASE)
    shared.enqueue([RolloutRequest(task=1, rollout_id="r")])
    [claim] = shared.claim("w")
    before = claim.attempt.deadline_at
    assert before is not None
    shared.postpone(5, gateway_id="b")
    assert shared.rollout("r").attempts[0].deadline_at == before
    shared.postpone(5, gateway_id="a")
    assert shared.rollout("r").attempts[0].deadline_at == before + 5
    lease = shared.rollout("r").attempts[0].lease_expires_at
    clock.advance(1)
    shared.make_up(20, gateway_id="b")
    (attempt,) = shared.rollout("r").attempts
    assert (attempt.deadline_at, attempt.lease_expires_at) == (before + 5, lease)
    shared.make_up(20, gateway_id="a")
    (attempt,) = shared.rollout("r").attempts
    assert attempt.deadline_at == before + 25
    assert attempt.lease_expires_at > lease


def test_stores_in_a_schema_each_of_one_database_share_nothing(postgres_url: str) -> None:
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        for name in ("one", "two"):
            connection.execute(sa.text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    with ExitStack() as opened:
        of_schema = sa.make_url(postgres_url).update_query_dict
        urls = [of_schema({"options": f"-csearch_path={name}"}) for name in ("one", "two")]
        one, two = [SqlStore(url.render_as_string(hide_password=False)) for url in urls]
        for store in (one, two):
            opened.callback(store.close)
        one.gateways.announce(gateway("a"), 600)
        one.enqueue([RolloutRequest(task=1, rollout_id="r")])
        assert two.rollouts(["r"]) == two.claim("w") == two.gateways.live() == []
        assert [claim.rollout.rollout_id for claim in one.claim("w")] == ["r"]
