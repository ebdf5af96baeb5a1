"""Every public name of verl's agent framework is here, or says what to write in its place; the page has each."""

import json
import re
from pathlib import Path

import pytest

import lightning_rl.compat as compat
from lightning_rl.compat.agent_framework_names import HERE, INSTEAD, METHODS_INSTEAD
from lightning_rl.loops import AgentFramework

ROOT = Path(__file__).parents[3]
NAMES = json.loads((ROOT / "tests/data/verl_agent_framework_names.json").read_text())
PAGE = (ROOT / "docs/coming-from-verl.md").read_text()
_, _, _SECTION = PAGE.partition("## The agent framework and its gateway\n")
SECTION, _, _ = _SECTION.partition("\n## ")


def row_of(name: str) -> str:
    """What the page's table says in the second column of the row with a name in the first."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", SECTION, re.MULTILINE)
    [said] = [here for there, here in rows if f"`{name}`" in there]
    return str(said)


@pytest.mark.parametrize("name", NAMES["classes"])
def test_each_name_is_there_or_says_what_to_write(name: str) -> None:
    said = row_of(name)
    if name in HERE:
        assert getattr(compat, name) is not None
        assert "`lightning_rl.compat` has" in said
        return
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}: {INSTEAD[name]} (docs/coming-from-verl.md)")):
        getattr(compat, name)
    assert "`lightning_rl.compat` has" not in said


@pytest.mark.parametrize("name", NAMES["methods"])
def test_each_method_is_there_or_says_what_to_write(name: str) -> None:
    row_of(name)
    framework = AgentFramework("http://127.0.0.1:1", "key", lambda task, llm: 1.0)
    if name not in METHODS_INSTEAD:
        assert callable(getattr(framework, name))
        return
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}: {METHODS_INSTEAD[name]}")):
        getattr(framework, name)


def test_no_other_names_are_promised() -> None:
    assert {*HERE, *INSTEAD} == set(NAMES["classes"])
    assert set(NAMES["methods"]) >= METHODS_INSTEAD.keys()
    assert compat.OpenAICompatibleAgentFramework is AgentFramework
    with pytest.raises(AttributeError, match=r"has no attribute 'Nothing'$"):
        compat.Nothing  # noqa: B018
