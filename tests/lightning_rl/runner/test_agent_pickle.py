"""An agent of a script reaches its processes with the clients and caches that it uses."""

import ctypes
import functools
import multiprocessing
import pickle
import subprocess
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from lightning_rl.runner.agent_pickle import AgentNotPicklable, pickled


def sent(agent: Any) -> Any:
    return pickle.loads(pickled(agent))


def by_value(**held: Any) -> Any:
    """An agent that travels by value, as one of a script does, and gives back what it holds."""

    def agent() -> dict[str, Any]:
        return held

    return agent


def test_a_client_is_made_anew_as_it_was() -> None:
    client = openai.OpenAI(
        base_url="http://h/v1", api_key="k", max_retries=7, timeout=3.0, organization="o", default_headers={"X-A": "b"}
    )
    claude = anthropic.AsyncAnthropic(base_url="http://c", auth_token="t")
    found = sent(by_value(client=client, claude=claude))()
    assert found["client"] is not client
    assert (str(found["client"].base_url), found["client"].api_key) == ("http://h/v1/", "k")
    assert (found["client"].max_retries, found["client"].timeout, found["client"].organization) == (7, 3.0, "o")
    assert found["client"].default_headers["X-A"] == "b"
    assert (found["claude"].auth_token, str(found["claude"].base_url)) == ("t", "http://c")


def test_locks_and_context_variables_are_new() -> None:
    without, given = ContextVar[int]("without"), ContextVar("given", default=(3,))
    given.set((4,))

    class Held:
        lock = threading.RLock()

        @functools.cached_property
        def length(self) -> int:
            with self.lock:
                return 7

    held = threading.Lock()
    with held:
        found = sent(by_value(kind=Held, held=held, again=held, without=without, given=given))()
    assert (found["kind"]().length, found["given"].get(), found["without"].get(1)) == (7, (3,), 1)
    assert found["held"] is found["again"] is not held
    assert found["held"].acquire(blocking=False)


HINTS = """
from __future__ import annotations
import dataclasses, operator, pickle, sys, typing
from typing import Annotated, TypedDict
from lightning_rl.runner.agent_pickle import pickled

@dataclasses.dataclass
class Item:
    of: list[Item]
    kind: Kind

class Kind(TypedDict):
    words: Annotated[list, operator.add]

def tool(item: Item, other: typing.Optional[list["Kind"]] = None) -> Missing: ...

def agent(task):
    hints = [typing.get_type_hints(Item), typing.get_type_hints(Kind, include_extras=True)]
    return [hints, tool.__globals__["Item"] is Item, tool.__globals__["Kind"] is Kind, pickle.dumps(Item([], {}))]

sys.stdout.buffer.write(pickled(agent))
"""
READS = """
import pickle, runpy, sys

class Spec:
    name = "lightning_rl.runner.process"

__spec__, Item = Spec, "the runner's"
hints, *same, item = pickle.load(sys.stdin.buffer)(None)
main = sys.modules["__main__"]
print(sorted(hints[0]), hints[0]["of"] == list[main.Item], hints[1], same, type(pickle.loads(item)) is main.Item, Item)
"""


def test_type_hints_and_pickles_of_a_script_are_read_there(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HINTS)
    made = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, check=True).stdout
    read = subprocess.run([sys.executable, "-c", READS], input=made, capture_output=True, check=True).stdout.decode()
    annotated = "{'words': typing.Annotated[list, <built-in function add>]}"
    assert read == f"['kind', 'of'] True {annotated} [True, True] True the runner's\n"


SENTINELS = """
import collections, dataclasses, sys
from lightning_rl.runner.agent_pickle import pickled

own = object()

@dataclasses.dataclass
class Task:
    text: str

def agent(task):
    return [dataclasses.fields(Task)[0].default is dataclasses.MISSING, collections.namedtuple is named, own is mine]

named, mine = collections.namedtuple, own
sys.stdout.buffer.write(pickled(agent))
"""


def test_what_is_compared_by_identity_is_the_librarys_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SENTINELS)
    made = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, check=True).stdout
    assert pickle.loads(made)(None) == [True, True, True]


def test_a_cached_function_begins_with_an_empty_cache() -> None:
    lock = threading.Lock()

    @functools.cache
    def held() -> Any:
        return threading.Lock()

    @functools.lru_cache(maxsize=3, typed=True)
    def fibonacci(n: int) -> int:
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    held()
    found = sent(by_value(held=held, fibonacci=fibonacci))()
    assert found["held"]() is found["held"]() is not lock
    assert found["fibonacci"](20) == 6765
    assert found["fibonacci"].cache_parameters() == {"maxsize": 3, "typed": True}


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (threading.Thread(name="loader"), "'loader' is a thread, which runs in this process alone"),
        (multiprocessing.Lock(), "Lock objects should only be shared between processes through inheritance"),
        (ctypes.pointer(ctypes.c_int(1)), "ctypes objects containing pointers cannot be pickled"),
        (openai.OpenAI(api_key="k", http_client=httpx2.Client()), "an http_client of its own"),
    ],
)
def test_what_cannot_be_sent_is_named_with_what_to_do(held: Any, why: str) -> None:
    with pytest.raises(AgentNotPicklable, match=f"{why}.*make it within the agent, or in a function with @functools"):
        pickled(by_value(held=held))


SCRIPT = """
import functools, pickle, sys
import openai
from lightning_rl.runner.agent_pickle import pickled

client = openai.OpenAI(base_url="http://h/v1", api_key="k")

@functools.cache
def cached():
    return openai.OpenAI(base_url="http://c/v1", api_key="c")

def agent(task):
    return [client.with_options(api_key="x").api_key, client.api_key, str(cached().base_url)]

sys.stdout.buffer.write(pickled(agent))
"""


def test_a_scripts_module_level_client_and_cached_function_travel(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    made = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, check=True).stdout
    assert pickle.loads(made)(None) == ["x", "k", "http://c/v1/"]
