"""Where prompts are put into tokens: short ones at once, long ones in threads, so that other calls need not wait.

What makes a request long is text that is new. Tools that came before are not, in chat formats that write them apart
from what is said: there the tokenizer knows them (`rendering/cached_texts.py`).
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

import msgspec
import xxhash

from lightning_rl_proxy.dialects.base import Request
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.forest.incremental_decode import DecodedBody
from lightning_rl_proxy.rendering.base import Renderer

T = TypeVar("T")

_LONG = 8192  # bytes of new text; tokenising more would keep the event loop from others
_KNOWN = 256  # lists of tools
_SAID, _SHOWN = "xqzsaid", "xqzshown"  # which no chat format writes of itself


class Tokenizing:
    """The threads of one gateway that tokenise.

    Args:
        renderer: the policy's chat format.
        longest_context: how many tokens a prompt may have; longer ones are given up early.
        threads: how many there are; None: one for each core of the machine.
    """

    def __init__(self, renderer: Renderer, longest_context: Callable[[], int | None], threads: int | None) -> None:
        self.renderer = renderer
        self._longest_context = longest_context
        self._threads = ThreadPoolExecutor(threads or os.cpu_count(), thread_name_prefix="tokenizing")
        self._known: OrderedDict[bytes, None] = OrderedDict()  # the digests of tools

    def is_long(self, request: Request, body: DecodedBody) -> bool:
        """Whether so much of a request is new that it is to be tokenised in a thread."""
        if body.read:
            return _new_text(request) > _LONG
        new = len(body.body)
        if new > _LONG and request.tools:
            written = msgspec.json.encode(request.tools)
            if (digest := _digest(written)) in self._known:
                self._known.move_to_end(digest)
                new -= len(written)
        return new > _LONG

    def remember(self, request: Request) -> None:
        """The request was tokenised: so its tools are known."""
        if request.tools and self._writes_tools_apart:
            self._known[_digest(msgspec.json.encode(request.tools))] = None
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)

    async def count(self, request: Request, size: int) -> int:
        """How many tokens a request's prompt has, whose body is `size` bytes long. Raises GatewayError."""
        render = partial(self.renderer.render, request.messages, request.tools)
        return len(await self.of_one_prompt(render) if size > _LONG else render())

    async def of_one_prompt(self, work: Callable[[], T]) -> T:
        """What `work` gives in a thread, which tokenises one prompt there."""
        long_texts = self.renderer.tokenizer.long_texts
        long_texts.context = self._longest_context()

        def bounded() -> T:
            with long_texts.of_one_prompt():
                return work()

        return await self.in_thread(bounded)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` gives in a thread. Whoever is cancelled meanwhile waits until it is done."""
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    @cached_property
    def _writes_tools_apart(self) -> bool:
        tokenizer = self.renderer.tokenizer
        if not tokenizer.keeps_parts:
            return False
        tool = {"name": "look_up", "description": _SHOWN, "parameters": {"type": "object", "properties": {}}}
        try:
            ids = self.renderer.render([{"role": "user", "content": _SAID}], [{"type": "function", "function": tool}])
        except GatewayError:  # a format that shows no tools
            return False
        parts: list[list[int]] = [[]]
        for token in ids:
            if token in tokenizer.added_ids:
                parts.append([])
            else:
                parts[-1].append(token)
        texts = [tokenizer.decode(part) for part in parts]
        return any(_SHOWN in text for text in texts) and not any(_SHOWN in text and _SAID in text for text in texts)


def _digest(written: bytes) -> bytes:
    """No secret: who makes two lists of tools collide has one of them tokenised where others wait for it."""
    return xxhash.xxh3_128_digest(written)


def _new_text(request: Request) -> int:
    """About how many characters a request's messages hold that were not read before."""
    size = 0
    for message in request.messages[request.known :]:
        content: Any = message.get("content")
        parts = content if isinstance(content, list) else [content]
        size += sum(len(part) if isinstance(part, str) else len(str(part)) for part in parts)
    return size
