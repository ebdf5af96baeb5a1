"""Images are kept once for all attempts that show them, and are read back as they were written."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from hashlib import sha256

import msgspec
import sqlalchemy as sa

from lightning_rl.store import schema
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.store.databases import connect
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters import semconv
from lightning_rl_adapters.media import media_of, media_span
from lightning_rl_adapters.span import Span, pack

CAT, DOG = os.urandom(5000), os.urandom(3000)


def started(store: SqlStore, name: str) -> str:
    return store.start(RolloutRequest(task={}, rollout_id=name), "w").attempt.attempt_id


def image(rollout: str, attempt: str, data: bytes, digest: str | None = None) -> Span:
    named = sha256(data).hexdigest() if digest is None else digest
    return media_span(rollout, attempt, named, data=data, media_type="image/png", at_ns=7)


def kept(url: str) -> list[bytes]:
    with closing(connect(url)) as database:
        return database.read(lambda connection: list(connection.execute(sa.select(schema.contents.c.data)).scalars()))


def test_an_image_is_kept_once_for_all_attempts_that_show_it(url: str) -> None:
    with closing(SqlStore(url)) as store:
        spans = {}
        for name in ("one", "two", "three"):
            attempt = started(store, name)
            spans[name] = [image(name, attempt, CAT), *([image(name, attempt, DOG)] if name == "two" else [])]
            store.add_spans([*spans[name], *spans[name]])
        store.add_spans(spans["one"])  # again
        found = store.traces(list(spans))
        assert {name: trace.attempts[0].spans for name, trace in found.items()} == spans
        assert media_of(found["two"].attempts[0].spans) == {sha256(data).hexdigest(): data for data in (CAT, DOG)}
    assert sorted(kept(url)) == sorted([CAT, DOG])


def test_bytes_of_another_digest_stay_in_their_own_span(url: str) -> None:
    """Nobody can have another attempt read other bytes than its own."""
    with closing(SqlStore(url)) as store:
        wrong, right = started(store, "wrong"), started(store, "right")
        digest = sha256(CAT).hexdigest()
        spans = [image("wrong", wrong, DOG, digest), image("right", right, CAT)]
        for span in spans:
            store.add_spans([span])
        assert store.spans("wrong", wrong) + store.spans("right", right) == spans
    assert kept(url) == [CAT]


def test_what_only_looks_like_an_image_is_left_as_it_is(url: str) -> None:
    known = sha256(CAT).hexdigest()
    with closing(SqlStore(url)) as store:
        attempt = started(store, "r")
        store.add_spans([image("r", attempt, CAT)])
        odd: list[dict[str, object]] = [
            {},
            {semconv.MEDIA_SHA256: known},
            {semconv.MEDIA_SHA256: known, semconv.MEDIA_DATA: None},
            {semconv.MEDIA_SHA256: known, semconv.MEDIA_DATA: b""},
            {semconv.MEDIA_SHA256: known, "-1": known},
            {semconv.MEDIA_SHA256: 5, semconv.MEDIA_DATA: b"x"},
            {semconv.MEDIA_DATA: "text"},
            {"said": semconv.MEDIA_SPAN},
        ]
        spans = [
            msgspec.structs.replace(image("r", attempt, CAT), span_id=f"s{number}", attributes=attributes)
            for number, attributes in enumerate(odd)
        ]
        store.add_spans(spans)
        found = {span.span_id: span for span in store.spans("r", attempt)}
        assert [found[span.span_id] for span in spans] == spans
    assert kept(url) == [CAT]


def test_spans_of_an_older_release_hold_their_images_themselves(url: str) -> None:
    with closing(SqlStore(url)) as store:
        attempt = started(store, "r")
        span = image("r", attempt, CAT)
        with closing(connect(url)) as database:
            row = msgspec.structs.asdict(pack(span))
            database.write(lambda connection: connection.execute(sa.insert(schema.spans), row))
        assert store.spans("r", attempt) == [span]


def test_many_may_write_the_same_images_at_once(url: str) -> None:
    rounds = [[os.urandom(2000) for _ in range(30)] for _ in range(5)]
    with closing(SqlStore(url)) as store:
        attempts = [started(store, f"r{number}") for number in range(3)]
        together = threading.Barrier(3)

        def write(number: int) -> None:
            with closing(SqlStore(url)) as own:
                for pictures in rounds:
                    together.wait(30)
                    order = pictures if number % 2 else pictures[::-1]
                    own.add_spans([image(f"r{number}", attempts[number], data) for data in order])

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(write, range(3)))
        pictures = sorted(data for some in rounds for data in some)
        for number in range(3):
            assert sorted(media_of(store.spans(f"r{number}", attempts[number])).values()) == pictures
    assert sorted(kept(url)) == pictures
