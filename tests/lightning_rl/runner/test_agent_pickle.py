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
from types import ModuleType
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


def test_context_variables_have_their_defaults_and_cached_properties_travel() -> None:
    without, given = ContextVar[int]("without"), ContextVar("given", default=(3,))
    given.set((4,))

    class Held:
        @functools.cached_property
        def length(self) -> int:
            return 7

    found = sent(by_value(kind=Held, without=without, given=given, again=given))()
    assert (found["kind"]().length, found["given"].get(), found["without"].get(1)) == (7, (3,), 1)
    assert found["given"] is found["again"] is not given


HINTS = """
from __future__ import annotations
import dataclasses, operator, pickle, sys, threading, typing
from typing import Annotated, TypedDict
from lightning_rl.runner.agent_pickle import pickled

@dataclasses.dataclass
class Item:
    of: list[Item]
    kind: Kind

def merge(one, other):
    return one + other

class Kind(TypedDict):
    words: Annotated[list, merge, operator.add]

class Held:
    lock = threading.Lock()  # cannot be sent, and is only named

class Refuses:
    def __reduce__(self):
        raise OSError("only here")

opened, refuses, large, Id = threading.Lock(), Refuses(), bytes(2**21), typing.NewType("Id", int)

def tool(item: Item, other: typing.Optional[list["Kind"]], held: Held | opened | refuses | large) -> Missing: ...

def ids(one: Id): ...

def agent(task):
    hints = [typing.get_type_hints(Item), typing.get_type_hints(Kind, include_extras=True)]
    left_out = tool.__globals__.keys() & {"Held", "opened", "refuses", "large", "Missing"}
    same = tool.__globals__["Item"] is Item and tool.__globals__["Kind"] is Kind
    return [hints, same, [left_out, typing.get_type_hints(ids)], pickle.dumps(Item([], {}))]

sys.stdout.buffer.write(pickled(agent))
"""
READS = """
import pickle, runpy, sys

class Spec:
    name = "lightning_rl.runner.process"

__spec__, Item = Spec, "the runner's"
hints, *same, item = pickle.load(sys.stdin.buffer)(None)
main = sys.modules["__main__"]
reducers = [each.__name__ for each in hints[1]["words"].__metadata__]
print(sorted(hints[0]), hints[0]["of"] == list[main.Item], reducers, same, type(pickle.loads(item)) is main.Item, Item)
"""


def test_type_hints_and_pickles_of_a_script_are_read_there(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HINTS)
    made = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, check=True).stdout
    read = subprocess.run([sys.executable, "-c", READS], input=made, capture_output=True, check=True).stdout.decode()
    assert read == "['kind', 'of'] True ['merge', 'add'] [True, [set(), {'one': typing.Any}]] True the runner's\n"


def test_a_process_that_is_no_runner_keeps_its_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(HINTS)
    made = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, check=True).stdout
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    vars(main)["Item"] = "its own"
    pickle.loads(made)
    assert (sys.modules["__main__"], vars(main)["Item"], vars(main)["Kind"].__name__) == (main, "its own", "Kind")


SENTINELS = """
import collections, dataclasses, sys, types
from lightning_rl.runner.agent_pickle import pickled

own = object()
held = sys.modules["held"] = types.ModuleType("held")
exec("class Empty: pass\\nclass Words(dict): pass", held.__dict__)
held.made_here, held.words, held.plain = held.Empty(), held.Words(a=1), object()
from lightning_rl.langgraph.endpoint import _rollouts

@dataclasses.dataclass
class Task:
    text: str

def agent(task):
    from lightning_rl.langgraph import endpoint
    made = [type(made_here).__name__, words, type(plain), _rollouts is endpoint._rollouts]
    missing = dataclasses.fields(Task)[0].default
    return [missing is dataclasses.MISSING, collections.namedtuple is named, own is mine, made]

named, mine = collections.namedtuple, own
made_here, words, plain = held.made_here, held.words, held.plain
sys.stdout.buffer.write(pickled(agent))
"""


def test_what_is_compared_by_identity_is_the_librarys_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(SENTINELS)
    made = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, check=True).stdout
    here = ModuleType("held")  # as it is imported, before the script had put anything there
    exec("class Empty: pass\nclass Words(dict): pass\nmade_here = None", here.__dict__)
    monkeypatch.setitem(sys.modules, "held", here)
    assert pickle.loads(made)(None) == [True, True, True, ["Empty", {"a": 1}, object, True]]
    monkeypatch.setitem(sys.modules, "nowhere", ModuleType("nowhere"))
    sys.modules["nowhere"].plain = object()  # type: ignore[attr-defined]
    made = pickled(by_value(plain=sys.modules["nowhere"].plain))
    monkeypatch.delitem(sys.modules, "nowhere")
    assert type(pickle.loads(made)()["plain"]) is object


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
    with pytest.raises(AgentNotPicklable, match=f"{why}.*make it within the agent, in a module"):
        pickled(by_value(held=held))


def test_the_global_that_cannot_be_sent_is_named() -> None:
    class Holder:
        def __init__(self) -> None:
            self.lock = threading.Lock()

    script: dict[str, Any] = {"__name__": "__main__", "fine": 1, "holder": Holder()}
    exec(
        "def used(): return fine, holder\nclass Tool:\n def run(self): return used()\ndef agent(): return tool", script
    )
    script["tool"] = script["Tool"]()
    with pytest.raises(AgentNotPicklable, match=r"in 'holder' of the script \(a .*Holder\)"):
        pickled(script["agent"])


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
