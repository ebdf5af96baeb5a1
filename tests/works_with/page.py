"""`docs/works-with.md`: the table in words. `python -m tests.works_with.page` writes it."""

import re
from itertools import groupby
from pathlib import Path

from tests.works_with.table import AGENTS, DATE, ENVIRONMENTS, NOT_PLAYED, Agent, Mode

PAGE = Path(__file__).parents[2] / "docs" / "works-with.md"
_APIS = {"chat": "Chat Completions", "responses": "Responses", "messages": "Messages"}
_OPENING = """\
# Works with

Agents of other people, unmodified: each knows a base URL, a key and a model's name, and is played against the gateway
by `make test-works-with`. The versions are of {date}. Each agent of a framework has two user turns. In each, the model
reasons, says a few words, and calls two tools at once, in JSON that no library writes like that. Programs read two
files in two turns, with two commands at once.

What is tested of each: every call is recorded, and every sampled token is in exactly one training row, exactly once.
*Rows* are the sequences that the calls become ([forest](concepts/forest.md)). An agent makes one row if each of its
requests goes on from the one before, token for token. Where it makes more, what they share is computed again for each
row, and the table says why. Nothing is lost.

Over Messages, most of these use their class for Anthropic's models, with `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`
of `llm.env()`. What each SDK's own features do is in [The gateway](gateway.md).

"""


def page() -> str:
    """The page."""
    text = _OPENING.format(date=DATE)
    text += "| agent | version | over | calls | rows | why more than one |\n| --- | --- | --- | --- | --- | --- |\n"
    text += "".join(_lines(agent) for agent in AGENTS)
    text += "\n## How each is connected\n\n"
    text += "".join(f"- **{agent.title}**: `{agent.connects}`\n" for agent in AGENTS)
    text += "\n## Not played\n\n"
    return text + "".join(f"- {name}: {why}\n" for name, why in NOT_PLAYED.items())


def _lines(agent: Agent) -> str:
    """A line for the modes that leave the same."""
    pins = [re.sub(r"\[.*\]", "", pin) for pin in ENVIRONMENTS[agent.environment].pins]
    version = next(pin for pin in pins if not agent.package or re.fullmatch(rf"{agent.package}(==|@).*", pin))
    told = ""
    for (calls, rows, why, _), modes in groupby(agent.modes, lambda mode: mode[2:]):
        told += f"| {agent.title} | `{version}` | {_over(list(modes))} | {calls} | {rows} | {why} |\n"
    return told


def _over(modes: list[Mode]) -> str:
    by_api: dict[str, list[str]] = {}
    for mode in modes:
        by_api.setdefault(_APIS[mode.api], []).append("streamed" if mode.streamed == "stream" else "whole")
    return "; ".join(f"{api}, {' and '.join(how)}" for api, how in by_api.items())


if __name__ == "__main__":
    PAGE.write_text(page())
