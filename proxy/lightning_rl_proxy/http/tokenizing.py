"""Where prompts are put into tokens: short ones at once, long ones in threads, so that other calls need not wait.

What makes a request long is text that is new. Messages and tools that came before are not, in chat formats that write
each apart: there the tokenizer knows them (`rendering/cached_texts.py`).
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import xxhash

from lightning_rl_proxy.dialects.base import Request
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.forest.incremental_decode import DecodedBody
from lightning_rl_proxy.rendering.base import Renderer

T = TypeVar("T")

_LONG = 8192  # bytes of new text; tokenising more would keep the event loop from others
_KNOWN = 65_536  # messages and lists of tools, about 200 bytes each
_RULES = ("system", "developer")  # roles
# Texts that no format writes of itself.
_SAID, _RULE, _TOOL = {"user": "xqzasked", "assistant": "xqzanswered"}, "xqzrule", "xqztool"


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
        self._digests: OrderedDict[bytes, None] = OrderedDict()  # the digests of what was tokenised

    def is_long(self, request: Request, body: DecodedBody) -> bool:
        """Whether so much of a request is new that it is to be tokenised in a thread."""
        if body.read:
            return _new_text(request) > _LONG
        if len(body.body) <= _LONG or not self._digests or request.prompt is not None:
            return len(body.body) > _LONG
        parts = list(_parts(request))
        long = sum(size for digest, size in parts if digest not in self._digests) > _LONG
        if not long:  # what is new of it is tokenised now
            self._keep(parts)
        return long

    def remember(self, request: Request) -> None:
        """A long request was tokenised, and what it holds is known."""
        if self._writes_apart:
            self._keep(_parts(request))

    def _keep(self, parts: Iterable[tuple[bytes, int]]) -> None:
        for digest, _ in parts:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > _KNOWN:
            self._digests.popitem(last=False)

    async def of_body(self, work: Callable[[], T], size: int) -> T:
        """What `work` gives, which tokenises the prompt of a body of `size` bytes: a long one in a thread."""
        return await self.of_one_prompt(work) if size > _LONG else work()

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
    def _writes_apart(self) -> bool:
        """Whether a prompt's messages, and what stands before them, are tokenised each for itself; images are not."""
        if not self.renderer.tokenizer.keeps_parts or self.renderer.vision is not None:
            return False
        messages = [{"role": role, "content": mark} for role, mark in _SAID.items()]
        tool = {"name": "look_up", "description": _TOOL, "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": tool}]
        texts: list[str] = []
        for conversation in (messages, [{"role": "system", "content": _RULE}, *messages]):
            with suppress(GatewayError):  # some formats have no such role
                texts += self._parts_of(self.renderer.render(conversation, tools))
        alone = all(
            sum(mark in text for mark in _SAID.values()) + (_RULE in text or _TOOL in text) <= 1 for text in texts
        )
        return alone and bool(texts)

    def _parts_of(self, ids: list[int]) -> Iterator[str]:
        """The texts between the special tokens of a prompt."""
        tokenizer, part = self.renderer.tokenizer, list[int]()
        for token in ids:
            if token in tokenizer.added_ids:
                yield tokenizer.decode(part)
                part = []
            else:
                part.append(token)
        yield tokenizer.decode(part)


def _parts(request: Request) -> Iterator[tuple[bytes, int]]:
    """The digest and the size of each message as JSON, and of what stands before them: tools and rules, which many
    formats write together. No secret: who makes two of them collide has one tokenised where others wait for it."""
    rules = [message for message in request.messages if message.get("role") in _RULES]
    for part in ([rules, request.tools], *(one for one in request.messages if one.get("role") not in _RULES)):
        written = msgspec.json.encode(part)
        yield xxhash.xxh3_128_digest(written), len(written)


def _new_text(request: Request) -> int:
    """About how many characters a request's messages hold that were not read before."""
    size = 0
    for message in request.messages[request.known :]:
        content: Any = message.get("content")
        parts = content if isinstance(content, list) else [content]
        size += sum(len(part) if isinstance(part, str) else len(str(part)) for part in parts)
    return size
