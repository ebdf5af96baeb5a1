"""What is written in one turn of the event loop is sent at once, in order, and before the connection is closed."""

import asyncio

from lightning_rl.control_plane.one_write import OneWrite


class Transport(asyncio.Transport):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__({"peername": ("h", 1)})
        self.sent: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self.closing
        self.sent.append(data)

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


def test_writes_of_one_turn_leave_together_and_the_next_ones_after_them() -> None:
    async def work() -> None:
        transport = Transport()
        one = OneWrite(transport, asyncio.get_running_loop())
        one.write(b"head ")
        one.write(b"body")
        assert transport.sent == []
        await asyncio.sleep(0)
        assert transport.sent == [b"head body"]
        await asyncio.sleep(0)
        one.write(b"more")
        await asyncio.sleep(0)
        assert transport.sent == [b"head body", b"more"]
        assert one.get_extra_info("peername") == ("h", 1)

    asyncio.run(work())


def test_closing_sends_what_was_written_and_a_lost_connection_is_written_no_more() -> None:
    async def work() -> None:
        transport = Transport()
        one = OneWrite(transport, asyncio.get_running_loop())
        one.write(b"last words")
        one.close()
        assert (transport.sent, transport.closing) == ([b"last words"], True)
        one.write(b"too late")
        await asyncio.sleep(0)
        assert transport.sent == [b"last words"]

    asyncio.run(work())
