"""Whole prompts that come again are rendered once, also while they are rendered: a group's first calls have the same
messages.

Invariant: the ids are those that rendering gives. So a prompt is found by the exact JSON of its messages and tools, and
a format that reads the clock has none kept.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from lightning_rl_proxy.rendering.long_texts import LongTexts

_BYTES = 16 * 2**20  # of all prompts that are kept
_ID_BYTES = 40  # of an id: it, and its place in a list
_LARGEST = _BYTES // 8  # of one prompt
Render = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None], list[int]]


class RenderedPrompts:
    """The prompts of one chat format. Threads may share it.

    Args:
        render: gives a prompt's ids, and always the same for the same messages and tools.
        long_texts: bounds prompts, those that are found here, too.
        size: bytes of all prompts that are kept; those that were not asked for longest go first.
    """

    def __init__(self, render: Render, long_texts: LongTexts, size: int = _BYTES) -> None:
        self._render, self._long_texts, self._most = render, long_texts, size
        self._ids_of_parts: OrderedDict[bytes, list[int]] = OrderedDict()
        self._rendering: dict[bytes, Future[list[int] | None]] = {}  # None: it could not be rendered
        self._size = 0
        self._lock = threading.Lock()

    def ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """The ids of a prompt, in a list of the caller's own. Raises what `render` does, and PromptTooLong."""
        try:
            key = msgspec.json.encode((messages, tools))
        except (TypeError, ValueError):  # no JSON: rendering says what is wrong with it
            return self._render(messages, tools)
        with self._lock:
            shared_ids = self._ids_of_parts.get(key)
            by_another = None if shared_ids is not None else self._rendering.get(key)
            if shared_ids is not None:
                self._ids_of_parts.move_to_end(key)
            elif by_another is None:
                rendering = self._rendering[key] = Future[list[int] | None]()
        if by_another is not None:
            shared_ids = by_another.result()
        elif shared_ids is None:
            return self._render_for_all(key, rendering, messages, tools)
        if shared_ids is None:  # rendering it here says what is wrong with it
            return self._render(messages, tools)
        self._long_texts.count(len(shared_ids))
        return shared_ids.copy()  # the numbers are shared: an attempt that is open keeps its prompt

    def _render_for_all(
        self,
        key: bytes,
        rendering: Future[list[int] | None],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
    ) -> list[int]:
        """The ids of a prompt, which other threads wait for."""
        shared_ids = None
        try:
            ids = self._render(messages, tools)
            shared_ids = ids.copy()
            if _size(key, shared_ids) <= _LARGEST:
                self._keep(key, shared_ids)
            return ids
        finally:
            with self._lock:
                del self._rendering[key]
            rendering.set_result(shared_ids)

    def _keep(self, key: bytes, ids: list[int]) -> None:
        with self._lock:
            if key in self._ids_of_parts:
                return
            self._ids_of_parts[key] = ids
            self._size += _size(key, ids)
            while self._size > self._most:
                self._size -= _size(*self._ids_of_parts.popitem(last=False))


def _size(key: bytes, ids: list[int]) -> int:
    return len(key) + _ID_BYTES * len(ids)
