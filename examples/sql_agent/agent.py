"""An ordinary agent: it asks a model for SQL, runs it, shows what came back, and asks again.

Nothing here knows of training. `solve` is the agent; it needs only something that answers a chat.
`sql_agent` gives it the model behind a URL and returns its reward.

Invariant: what the model writes can read its own database and nothing else.
"""

import functools
import sqlite3
from collections import Counter
from collections.abc import Callable
from typing import Any

import openai

from lightning_rl import LLM, rollout

TURNS = 3
MAX_TOKENS = 48  # of one answer
SHOWN_ROWS = 2
STEPS = 1_000_000  # of SQLite's machine, about 20 ms: our queries need some hundred

Message = dict[str, str]
Rows = list[tuple[Any, ...]]

READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


def run_sql(database: str, sql: str) -> Rows | str:
    """The rows that `sql` gives, or the text of its error. It may read, and only `database`."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
        connection.set_progress_handler(lambda: 1, STEPS)  # the first call interrupts the query
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
        return connection.execute(sql).fetchmany(1000)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: not valid text
        return f"error: {error}"
    finally:
        connection.close()


def show(result: Rows | str) -> str:
    """What the model sees of a result: an error, `empty`, or the first rows."""
    if isinstance(result, str):
        return result[:60]
    if not result:
        return "empty"
    lines = [" ".join(_show_value(value) for value in row) for row in result[:SHOWN_ROWS]]
    return "\n".join([*lines, "..."] if len(result) > SHOWN_ROWS else lines)


def _show_value(value: Any) -> str:
    if value is None:
        return "NULL"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def same_answer(database: str, sql: str, gold: str) -> bool:
    """Whether both queries give the same rows, in the same order where `gold` asks for one."""
    expected, got = run_sql(database, gold), run_sql(database, sql)
    if isinstance(expected, str):
        raise ValueError(f"gold query fails on {database}: {gold!r}: {expected}")
    if isinstance(got, str):
        return False
    return got == expected if "ORDER BY" in gold else Counter(got) == Counter(expected)


def solve(task: dict[str, str], chat: Callable[[list[Message]], str]) -> tuple[float, list[Message]]:
    """Answer one question in at most three turns.

    Args:
        task: `question`, `schema`, `database` (path of an SQLite file) and `gold` (right SQL).
        chat: takes the messages so far, returns the model's next answer.

    Returns:
        The reward, 1.0 when the last SQL gives what the gold query gives and 0.0 otherwise, and
        the whole conversation.
    """
    messages = [{"role": "user", "content": f"{task['schema']}\n{task['question']}"}]
    sql = ""
    for _ in range(TURNS):
        answer = chat(messages)
        messages.append({"role": "assistant", "content": answer})
        if answer.strip() == "done":
            break
        sql = answer
        messages.append({"role": "user", "content": show(run_sql(task["database"], sql))})
    return float(same_answer(task["database"], sql, task["gold"])), messages


@functools.cache
def _client() -> openai.OpenAI:
    """One for the process: making one costs more than a call. URL and key come with each use."""
    return openai.OpenAI(base_url="http://unused.invalid/v1", api_key="unused")


@rollout
def sql_agent(task: dict[str, str], llm: LLM) -> float:
    """Answer one question with the model behind `llm`; see `solve` for the task and the reward."""
    client = _client().with_options(base_url=llm.base_url, api_key=llm.api_key)

    def chat(messages: list[Message]) -> str:
        answer = client.chat.completions.create(
            model=llm.model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=MAX_TOKENS,
        )
        return answer.choices[0].message.content or ""

    return solve(task, chat)[0]
