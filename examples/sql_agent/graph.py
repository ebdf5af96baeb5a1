"""The SQL agent as a LangGraph graph: write a query, execute it, check what came back, rewrite it.

An agent as its author would write it: nothing here knows of training. The model is an argument, so it is whatever the
caller gives: `ChatOpenAI` in production, the policy in training.

Invariant: each node asks with a prompt of its own, so no call continues another's conversation; at most `turns` queries
are run, and nobody is asked to check the last of them, since nothing could follow.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from langchain_core.language_models.chat_models import BaseChatModel
from langgraph.graph import END, START, StateGraph

from .queries import run_sql, show

TURNS = 3

_FENCE = re.compile(r"```(?:sql(?:ite3?)?)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Prompts:
    """What each node asks, as `str.format` templates over the state, and the text that accepts a query.

    `write` may name {schema} and {question}; `check` {query} and {result} too; `rewrite` {feedback} besides, which is
    the check's whole answer. A check whose answer has `accepts` in it accepts the query.
    """

    write: str
    check: str
    rewrite: str
    accepts: str


SHORT = Prompts(
    write="{schema}\n{question}",
    check="{schema}\n{question}\n{query}\n{result}\ndone?",
    rewrite="{schema}\n{question}\n{query}\n{result}\n{feedback}",
    accepts="done",
)


class State(TypedDict, total=False):
    """A question about a database, and what became of it so far."""

    schema: str
    question: str
    database: str  # path of an SQLite file
    query: str  # the last one
    result: str  # what the model sees of what it gave
    feedback: str  # what the last check said
    turn: int  # queries so far


def query_in(answer: str) -> str:
    """The query in an answer: what stands in its last fence of SQL, else the whole of it."""
    fenced = _FENCE.findall(answer)
    return str(fenced[-1] if fenced else answer).strip()


def look(database: str, query: str) -> str:
    """What the small model sees of what a query gives."""
    return show(run_sql(database, query))


def sql_graph(
    model: BaseChatModel | Mapping[str, BaseChatModel],
    prompts: Prompts = SHORT,
    turns: int = TURNS,
    look: Callable[[str, str], str] = look,
) -> Any:
    """The compiled graph. It takes `schema`, `question` and `database`, and ends with `query`, `result` and `turn`.

    `model` is asked by all nodes, or a mapping has one for each of `write`, `check` and `rewrite`. `look` runs a query
    on a database and says what came back.
    """
    models = model if isinstance(model, Mapping) else dict.fromkeys(("write", "check", "rewrite"), model)

    def ask(node: str, state: State) -> str:
        return models[node].invoke(getattr(prompts, node).format(**state)).text

    def write(state: State) -> State:
        return {"query": query_in(ask("write", state)), "turn": 1}

    def execute(state: State) -> State:
        return {"result": look(state["database"], state["query"])}

    def check(state: State) -> State:
        return {"feedback": ask("check", state)}

    def rewrite(state: State) -> State:
        return {"query": query_in(ask("rewrite", state)), "turn": state["turn"] + 1}

    def after_execute(state: State) -> str:
        return "check" if state["turn"] < turns else END

    def after_check(state: State) -> str:
        return END if prompts.accepts in state["feedback"] else "rewrite"

    graph = StateGraph(State)
    for node in (write, execute, check, rewrite):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "write")
    graph.add_edge("write", "execute")
    graph.add_conditional_edges("execute", after_execute, ["check", END])
    graph.add_conditional_edges("check", after_check, ["rewrite", END])
    graph.add_edge("rewrite", "execute")
    return graph.compile()
