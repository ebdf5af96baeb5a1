"""docs/gateway.md's tables, made of what was played: `python -m tests.sdk.matrix` rewrites them between their marks.

A cell says what came of a conversation in all four ways of calling; none is written by hand.
"""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rl_proxy.dialects import chat_completions, completions, messages, responses
from lightning_rl_proxy.dialects.base import Tables
from lightning_rl_proxy.dialects.wire.engine_fields import WHY
from tests.sdk import players
from tests.sdk.players import CONVERSATIONS, MODES, PLAYERS, Mode
from tests.sdk.stage import Environment, Outcome, Play, Stage, amiss, staged

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gateway.md"
HERE = ""
OPENAI_2 = ".venv-sdk2"
LITELLM = ".venv-sdk-litellm"
DIALECTS: dict[str, tuple[str, Tables]] = {
    "chat_completions": ("Chat Completions", chat_completions.TABLES),
    "responses": ("Responses", responses.TABLES),
    "messages": ("Messages", messages.TABLES),
    "completions": ("Completions", completions.TABLES),
}
_REFERENCES = {"completions": "openai-completions"}  # whose prompts are its own


class Column(NamedTuple):
    """A player, and the folder of the environment that it plays in."""

    player: str
    environment: str = HERE


COLUMNS = [
    Column("openai-chat", OPENAI_2),
    Column("openai-chat"),
    Column("litellm-chat"),
    Column("openai-responses", OPENAI_2),
    Column("openai-previous", OPENAI_2),
    Column("openai-responses"),
    Column("openai-previous"),
    Column("litellm-responses", LITELLM),
    Column("litellm-previous", LITELLM),
    Column("anthropic-messages"),
    Column("litellm-messages"),
    Column("openai-completions", OPENAI_2),
    Column("openai-completions"),
    Column("litellm-completions"),
]


class Cell(NamedTuple):
    """The name of a table's cell: dialect, SDK, feature."""

    dialect: str
    sdk: str
    feature: str


class Plays:
    """What was played in one environment; nothing is played twice."""

    def __init__(self, stage: Stage, environment: Environment | None = None) -> None:
        self._stage = stage
        self._by: Play = players.play if environment is None else environment.play
        self._version = players.version if environment is None else environment.version
        self._known: dict[tuple[str, Mode, str, str], Outcome] = {}

    def of(self, player: str, mode: Mode, conversation: str, door: str = "url") -> Outcome:
        """What came of a conversation."""
        name = (player, mode, conversation, door)
        if name not in self._known:
            self._known[name] = self._stage.play(player, mode, conversation, door=door, by=self._by)
        return self._known[name]

    def cells(self, player: str) -> dict[Cell, str]:
        """A player's column."""
        kind = PLAYERS[player]
        sdk = f"{kind.sdk} {self._version(player).split('.')[0]}{kind.way}"
        return {
            Cell(DIALECTS[kind.dialect][0], sdk, CONVERSATIONS[name].title): _joined(
                {mode: verdict(player, name, self.of(player, mode, name)) for mode in MODES}
            )
            for name in CONVERSATIONS
        }


def reference(player: str) -> str:
    """The player whose forests this one's must equal."""
    return _REFERENCES.get(PLAYERS[player].dialect, "openai-chat")


def verdict(player: str, conversation: str, outcome: Outcome) -> str:
    """yes; extra: by a field that the API lacks; 4xx: that error, as it must be; -: the API has none; else no."""
    if outcome.played.lacks is not None:
        return "-"
    if amiss(player, conversation, outcome) is not None:
        refused = outcome.played.error is not None and outcome.played.error["status"] == 400
        return "-" if outcome.played.extra and refused else "no"
    if outcome.played.error is not None:
        return str(outcome.played.error["status"])
    return "extra" if outcome.played.extra else "yes"


def _joined(verdicts: Mapping[Mode, str]) -> str:
    """One cell of the verdicts on all ways of calling."""
    if len(set(verdicts.values())) == 1:
        return verdicts[MODES[0]]
    whole, streamed = ({verdicts[mode] for mode in MODES if mode.streamed is kind} for kind in (False, True))
    if len(whole) == len(streamed) == 1:
        return f"{whole.pop()}; streamed {streamed.pop()}"
    return "; ".join(f"{mode} {verdict}" for mode, verdict in verdicts.items())


def features(cells: Mapping[Cell, str]) -> str:
    """A table per dialect: features down, SDKs across."""
    parts = []
    for title, _ in DIALECTS.values():
        sdks = list(dict.fromkeys(cell.sdk for cell in cells if cell.dialect == title))
        rows = [[c.title, *(cells[Cell(title, sdk, c.title)] for sdk in sdks)] for c in CONVERSATIONS.values()]
        parts.append(f"### {title}: what was played\n\n{_table(['feature', *sdks], rows)}")
    return "\n".join(parts)


def fields() -> str:
    """The tables of fields of each dialect."""
    return "\n".join(
        f"### {title}: fields\n\n"
        f"- honoured: {', '.join(f'`{name}`' for name in sorted(tables.honoured))}\n"
        f"- hints: {', '.join(f'`{name}`' for name in sorted(tables.hints))}\n\n"
        + _table(["field", "what becomes of it", "why"], [*_relaxed(tables), *_refused(tables)])
        for title, tables in DIALECTS.values()
    )


def _relaxed(tables: Tables) -> Iterable[list[str]]:
    return ([f"`{name}`", "relaxed", done] for name, done in sorted(tables.relaxed.items()))


def _refused(tables: Tables) -> Iterable[list[str]]:
    return ([f"`{name}`", f"refused{_off(values)}", WHY[name]] for name, values in sorted(tables.off.items()))


def _off(values: tuple[Any, ...]) -> str:
    return f", but for `{'`, `'.join(map(json.dumps, values))}`" if values else ""


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def section(page: str, name: str) -> str:
    """What stands between the marks of a section."""
    match = re.search(rf"<!-- {name}: .*? -->\n\n(.*)\n<!-- end of {name} -->", page, re.DOTALL)
    if match is None:
        raise ValueError(f"{PAGE} has no section {name!r}")
    return match[1]


def written(page: str) -> dict[Cell, str]:
    """The cells that a page has."""
    cells: dict[Cell, str] = {}
    for part in section(page, "features").split("### ")[1:]:
        title, _, table = part.partition(": what was played\n\n")
        head, _, *rows = [[word.strip() for word in line.split("|")[1:-1]] for line in table.strip().splitlines()]
        for row in rows:
            cells |= {Cell(title, sdk, row[0]): value for sdk, value in zip(head[1:], row[1:], strict=True)}
    return cells


def rewritten(page: str, cells: Mapping[Cell, str]) -> str:
    """A page with its sections made anew."""
    for name, text in (("features", features(cells)), ("fields", fields())):
        page = page.replace(section(page, name), text)
    return page


def main() -> None:
    """Play everything and rewrite the page."""
    with tempfile.TemporaryDirectory() as folder, staged(Path(folder)) as stage:
        environments = {name: Environment(ROOT / name / "bin" / "python") for name in (OPENAI_2, LITELLM)}
        plays = {HERE: Plays(stage)} | {name: Plays(stage, env) for name, env in environments.items()}
        cells: dict[Cell, str] = {}
        for column in COLUMNS:
            cells |= plays[column.environment].cells(column.player)
        for environment in environments.values():
            environment.close()
    PAGE.write_text(rewritten(PAGE.read_text(), cells))


if __name__ == "__main__":
    main()
