"""Lists of rollouts: filtered, sorted by any column, a page at a time behind a key; and the groups and tasks of a run.

Invariant: a page costs what it holds, not where it stands (keyset paging), and everything that comes from outside is a
parameter of the statement or one of the names below.
"""

import json
import math
import re
import sqlite3
import unicodedata
from collections.abc import Mapping
from typing import Any

from lightning_rl.errors import Explained
from lightning_rl.viewer.index import Index, row_of

COLUMNS = (
    "position", "rollout_id", "status", "mode", "step", "group_id", "agent", "task", "reward", "error", "attempts",
    "created", "seconds", "calls", "sampled", "forks", "trained_step", "trained", "advantage",
)  # fmt: skip
_SHOWN = ", ".join((*COLUMNS, "rewards", "task_key"))
_EQUAL = ("status", "mode", "agent", "group_id", "task_key")
_KNOWN = (*_EQUAL, "step", "reward_min", "reward_max", "excluded", "text", "sort", "after", "limit")
_LARGEST_PAGE = 500
_TERM = re.compile(r'"([^"]+)"|(\S+)')
_PART = re.compile(r"\*(\w+)")  # of a word, anywhere in it
_SHORTEST_PART = 3
_MOST_WORDS = 20_000  # that a part of a word may be found in
_WORDS_AT_ONCE = 500  # of a question to FTS5, which takes longer than in proportion for more


class WrongQuery(Explained, ValueError):
    """A query that names what the index does not have."""


def page(index: Index, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of rollouts.

    `query` may have `sort` (a column, with `-` before it for the largest first), `after` (the `next` of the page
    before), `limit`; and the filters `status`, `mode`, `agent`, `group_id`, `task_key`, `step`, `reward_min`,
    `reward_max`, `excluded`, `text`. Raises WrongQuery.
    """
    if unknown := [name for name in query if name not in _KNOWN]:
        raise WrongQuery(f"there is no filter {unknown[0]!r}; there are {', '.join(_KNOWN)}")
    number = _number(query, "limit")
    limit = 100 if number is None else int(min(number, _LARGEST_PAGE))
    if limit < 1:
        raise WrongQuery(f"limit={query['limit']!r} is below 1")
    column, down = _sort(query.get("sort") or "-position")
    key, key_values = _behind(column, down, query.get("after"))
    order = f"{column} IS NULL, {column} {'DESC' if down else 'ASC'}, position {'DESC' if down else 'ASC'}"
    with index.reading() as connection:
        where, values = _filters(query, connection)
        total = None
        if not query.get("after"):
            total = connection.execute(f"SELECT count(*) FROM rollouts{_where(where)}", values).fetchone()[0]
        statement = f"SELECT {_SHOWN} FROM rollouts{_where([*where, *key])} ORDER BY {order} LIMIT ?"
        rows = connection.execute(statement, [*values, *key_values, limit + 1]).fetchall()
    rollouts = [row_of(row) for row in rows[:limit]]
    more = len(rows) > limit
    following = json.dumps([rollouts[-1][column], rollouts[-1]["position"]]) if more else None
    return {"rollouts": rollouts, "next": following, "total": total}


def choices(index: Index) -> dict[str, Any]:
    """What the filters can be set to, with how many rollouts each has."""
    with index.reading() as connection:

        def counted(column: str, table: str = "rollouts") -> dict[str, int]:
            query = f"SELECT {column}, count(*) FROM {table} WHERE {column} IS NOT NULL GROUP BY 1 ORDER BY 2 DESC"
            return dict(map(tuple, connection.execute(f"{query} LIMIT 200")))

        steps = connection.execute("SELECT min(step), max(step) FROM rollouts").fetchone()
        return {
            "status": counted("status"),
            "mode": counted("mode"),
            "agent": counted("agent"),
            "excluded": counted("reason", "exclusions"),
            "steps": list(steps),
            "rollouts": connection.execute("SELECT count(*) FROM rollouts").fetchone()[0],
        }


def groups(index: Index, query: Mapping[str, str]) -> dict[str, Any]:
    """The groups of a step (by default the newest that has some), those with most variance first."""
    step = _number(query, "step")
    with index.reading() as connection:
        steps = [row[0] for row in connection.execute(
            "SELECT DISTINCT step FROM rollouts WHERE group_id IS NOT NULL AND step IS NOT NULL ORDER BY step"
        )]  # fmt: skip
        chosen = steps[-1] if step is None and steps else step
        rows = connection.execute(
            "SELECT group_id, min(task) AS task, mode, count(*) AS n, avg(reward) AS mean, min(reward) AS low, "
            "max(reward) AS high, sum(trained) AS trained FROM rollouts "
            "WHERE group_id IS NOT NULL AND step IS ? GROUP BY group_id "
            "ORDER BY max(reward) - min(reward) DESC, group_id LIMIT 500",
            (chosen,),
        ).fetchall()
    return {"step": chosen, "steps": steps, "groups": [dict(row) for row in rows]}


def group(index: Index, group_id: str) -> list[dict[str, Any]]:
    """The rollouts of a group, the best first."""
    with index.reading() as connection:
        query = (
            f"SELECT {_SHOWN} FROM rollouts WHERE group_id = ? ORDER BY reward IS NULL, reward DESC, position LIMIT 64"
        )
        return [row_of(row) for row in connection.execute(query, (group_id,))]


def tasks(index: Index, query: Mapping[str, str]) -> dict[str, Any]:
    """The tasks that were rolled out early and late, those that changed most first."""
    with index.reading() as connection:
        modes = [row[0] for row in connection.execute(
            "SELECT mode FROM rollouts WHERE step IS NOT NULL GROUP BY mode HAVING count(DISTINCT step) > 1"
        )]  # fmt: skip
        mode = query.get("mode") or ("val" if "val" in modes else modes[0] if modes else "train")
        rows = connection.execute(
            "WITH edge AS (SELECT task_key, min(step) AS first, max(step) AS last FROM rollouts WHERE mode = ? "
            "AND step IS NOT NULL AND status IN ('succeeded', 'failed') "
            "GROUP BY task_key HAVING min(step) < max(step)) "
            "SELECT edge.task_key, first, last, min(task) AS task, "
            "avg(CASE WHEN step = first THEN reward END) AS before, "
            "avg(CASE WHEN step = last THEN reward END) AS after "
            "FROM edge JOIN rollouts ON rollouts.task_key = edge.task_key AND mode = ? AND step IN (first, last) "
            "GROUP BY edge.task_key "
            "ORDER BY abs(coalesce(after, 0) - coalesce(before, 0)) DESC, after DESC, edge.task_key LIMIT 200",
            (mode, mode),
        ).fetchall()
    return {"mode": mode, "modes": modes, "tasks": [dict(row) for row in rows]}


def task(index: Index, task_key: str, query: Mapping[str, str]) -> dict[str, Any]:
    """The rollouts of one task, by step: of more than fit those of its first step and the newest."""
    values = (task_key, query.get("mode") or "val")
    where = "FROM rollouts WHERE task_key = ? AND mode = ?"
    with index.reading() as connection:
        first = connection.execute(f"SELECT min(step) {where}", values).fetchone()[0]
        statement = f"SELECT {_SHOWN} {where} ORDER BY step IS NOT ?, step DESC, position DESC LIMIT {_LARGEST_PAGE}"
        rows = connection.execute(statement, (*values, first)).fetchall()
    rollouts = [row_of(row) for row in rows]
    return {"rollouts": sorted(rollouts, key=lambda row: (-1 if row["step"] is None else row["step"], row["position"]))}


def _where(conditions: list[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _sort(sort: str) -> tuple[str, bool]:
    column = sort.removeprefix("-")
    if column not in COLUMNS:
        raise WrongQuery(f"there is no column {column!r} to sort by; there are {', '.join(COLUMNS)}")
    return column, sort.startswith("-")


def _behind(column: str, down: bool, after: str | None) -> tuple[list[str], list[Any]]:
    """What stands behind the key of the page before; rows without a value come last either way."""
    if not after:
        return [], []
    try:
        value, position = json.loads(after)
        if not isinstance(value, str | int | float | None) or not isinstance(position, int):
            raise ValueError(after)
        if max(abs(number) for number in (value, position) if isinstance(number, int)) >= 2**63:  # SQLite's
            raise ValueError(after)
    except (ValueError, TypeError) as error:
        raise WrongQuery(f"after={after!r} is no key of a page: send the `next` of the page before") from error
    beyond = "<" if down else ">"
    if value is None:
        return [f"{column} IS NULL AND position {beyond} ?"], [position]
    return [f"({column} {beyond} ? OR ({column} = ? AND position {beyond} ?) OR {column} IS NULL)"], [
        value, value, position,
    ]  # fmt: skip


def _filters(query: Mapping[str, str], connection: sqlite3.Connection) -> tuple[list[str], list[Any]]:
    where: list[str] = []
    values: list[Any] = []
    for name in _EQUAL:
        if query.get(name):
            where.append(f"{name} = ?")
            values.append(query[name])
    for name, condition in (("step", "step = ?"), ("reward_min", "reward >= ?"), ("reward_max", "reward <= ?")):
        number = _number(query, name)
        if number is not None:
            where.append(condition)
            values.append(number)
    if query.get("excluded"):
        where.append("position IN (SELECT position FROM exclusions WHERE reason = ?)")
        values.append(query["excluded"])
    for term in _terms(query.get("text") or ""):  # each anywhere in the rollout
        words = _words_with(part[1], connection) if (part := _PART.fullmatch(term)) else [term]
        subquery = " UNION ALL ".join(["SELECT rowid FROM words WHERE words MATCH ?"] * len(words)) or "NULL"
        where.append(f"position IN (SELECT position FROM texts WHERE id IN ({subquery}))")
        values += words
    return where, values


def _number(query: Mapping[str, str], name: str) -> float | None:
    text = query.get(name)
    if text is None or text == "":
        return None
    try:
        number = float(text)
    except ValueError as error:
        raise WrongQuery(f"{name}={text!r} is no number") from error
    if not math.isfinite(number):
        raise WrongQuery(f"{name}={text!r} is no number")
    return number


def _terms(words: str) -> list[str]:
    """What is looked for, one term at a time: `*part` is anywhere in a word, the others are as FTS5 is asked. The last
    word may go on; what stands in quotation marks is one."""
    terms = []
    words = words.replace("\0", " ")  # which ends a text of SQLite's
    for phrase, word in _TERM.findall(words.strip()):
        term = phrase or word.replace('"', "")
        if term.strip("*"):
            terms.append(word if _PART.fullmatch(word) else f'"{term}"')
    if terms and terms[-1].startswith('"') and not words.rstrip().endswith('"'):
        terms[-1] += "*"
    return terms or ['""'] * bool(words.strip(" *"))


def _words_with(part: str, connection: sqlite3.Connection) -> list[str]:
    """What FTS5 is asked for the words of the run that have the part in them.

    It looks at each different word of the run. An index of all parts (FTS5's trigram) was tried: it is three times as
    large as the text, and takes eight times as long to fill as that of words.
    """
    if len(part) < _SHORTEST_PART:
        raise WrongQuery(f"*{part} is too little of a word: give {_SHORTEST_PART} characters or more behind the *")
    folded = "".join(c for c in unicodedata.normalize("NFD", part.lower()) if not unicodedata.combining(c))
    query = "SELECT term FROM vocabulary WHERE instr(term, ?) LIMIT ?"
    words = [row[0] for row in connection.execute(query, (folded, _MOST_WORDS + 1))]
    if len(words) > _MOST_WORDS:
        raise WrongQuery(f"more than {_MOST_WORDS:,} different words have {part} in them: give more of it")
    chunks = [words[start : start + _WORDS_AT_ONCE] for start in range(0, len(words), _WORDS_AT_ONCE)]
    return [" OR ".join(f'"{word}"' for word in chunk) for chunk in chunks]
