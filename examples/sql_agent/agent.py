"""An ordinary agent: it asks a model for SQL, runs it, shows what came back, and asks again.

Nothing here knows of training. `solve` is the agent; it needs only something that answers a chat.
`sql_agent` gives it the model behind a URL and returns its reward.
"""

from collections.abc import Callable

from lightning_rl import LLM, rollout

from .queries import run_sql, same_answer, show

TURNS = 3
MAX_TOKENS = 48  # of one answer

Message = dict[str, str]


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


@rollout
def sql_agent(task: dict[str, str], llm: LLM) -> float:
    """Answer one question with the model behind `llm`; see `solve` for the task and the reward."""
    client = llm.openai()

    def chat(messages: list[Message]) -> str:
        answer = client.chat.completions.create(
            model=llm.model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=MAX_TOKENS,
        )
        return answer.choices[0].message.content or ""

    return solve(task, chat)[0]
