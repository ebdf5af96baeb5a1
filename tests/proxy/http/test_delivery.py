"""Clients of one answer that leave, join and are cut off between its end and its delivery."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_rl_proxy.address import Address
from lightning_rl_proxy.dialects import chat_completions
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.http.attempt import LiveAttempt
from lightning_rl_proxy.http.delivery import Delivery, Patience
from lightning_rl_proxy.http.failures import CallFailures
from lightning_rl_proxy.http.inflight_request import InflightRequest
from lightning_rl_proxy.recording.ledger import AttemptInfo

BODY = b"of a request"


class Exchange:
    """A request that is worked on until its `answer` is there."""

    def __init__(self) -> None:
        info = AttemptInfo(rollout_id="r", attempt_id="a", mode="train", open=True, sampling={}, seed_key="r")
        self.attempt = LiveAttempt(Address("r", "a"), info, 0.0)
        self.inflight = InflightRequest(BODY, lambda: None)
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.sent: list[MutableMapping[str, Any]] = []
        self.attempt.begin(self.inflight, asyncio.create_task(self._work()))
        self.delivery = Delivery(
            Mock(), CallFailures(), Counter(), Patience(600, 600, 600), lambda _: False, lambda *_: lambda _: None
        )

    def follow(self) -> "tuple[asyncio.Future[None], asyncio.Task[None]]":
        """A client that waits for it: to be settled once it is gone, and its delivery."""
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone.add_done_callback(self.inflight.wake)
        delivered = self.delivery.deliver(self.attempt, chat_completions, self.inflight, gone, self._send)
        return gone, asyncio.create_task(delivered)

    def joined_by_an_equal_one(self) -> bool:
        """Whether a request with the same body that is no retry would be given this answer."""
        return self.attempt.joined(BODY, marked_as_retry=False) is not None

    async def _work(self) -> bytes:
        return await self.answer

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def call() -> None:
        await asyncio.wait_for(work(), 20)

    asyncio.run(call())


def test_an_equal_request_is_a_sample_of_its_own_once_a_retry_has_joined() -> None:
    async def work() -> None:
        exchange = Exchange()
        gone, first = exchange.follow()
        await asyncio.sleep(0)
        gone.set_result(None)
        await first
        assert exchange.joined_by_an_equal_one()
        exchange.follow()
        await asyncio.sleep(0)
        assert not exchange.joined_by_an_equal_one()

    run(work)


def test_a_client_that_leaves_as_another_gets_the_whole_answer_leaves_nothing_to_join() -> None:
    async def work() -> None:
        exchange = Exchange()
        (_, stays), (gone, leaves) = exchange.follow(), exchange.follow()
        await asyncio.sleep(0)
        exchange.answer.set_result(b"{}")
        gone.set_result(None)
        await asyncio.gather(stays, leaves)
        assert [message.get("status") for message in exchange.sent] == [200, None]
        assert not exchange.joined_by_an_equal_one()

    run(work)


def test_an_answer_that_is_there_when_its_attempt_is_sealed_reaches_nobody() -> None:
    async def work() -> None:
        exchange = Exchange()
        _, delivered = exchange.follow()
        await asyncio.sleep(0)
        exchange.answer.set_result(b"{}")
        assert exchange.inflight.task is not None
        await exchange.inflight.task
        assert exchange.delivery.close(exchange.attempt) == []
        with pytest.raises(GatewayError, match="attempt a is closed"):
            await delivered
        assert exchange.sent == []

    run(work)
