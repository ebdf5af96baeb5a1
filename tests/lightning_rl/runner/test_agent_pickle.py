"""An agent of a script reaches its processes with the clients and caches that it uses."""

import ctypes
import functools
import multiprocessing
import pickle
import subprocess
import sys
import threading
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
        (threading.Lock(), "cannot pickle '_thread.lock' object"),
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
