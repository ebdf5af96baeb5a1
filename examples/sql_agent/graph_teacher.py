"""A teacher with bad habits for the graph's three prompts, as a chat model that plays in the very graph.

It writes as `teacher.py` does, slips and all. As a checker it knows what is right, but accepts much of what is wrong,
and at times rejects what is right. As a rewriter it knows the right query too and is right more often than not. What is
left to learn is which of its own answers earn the reward, at each node.
"""

import random
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

from .graph import SHORT
from .teacher import first_try, suspicious

REJECTS_WRONG = 0.2  # how often a wrong query is rejected whose result looks well,
REJECTS_SUSPICIOUS = 0.45  # and one whose result no right query gives
REJECTS_RIGHT = 0.1
MISNAMES = 0.15  # how often a rejection gives another reason than the true one
KNOWS = 0.6  # how often a rewrite is right at once; else it is another first try

REASONS = ("JOIN", "GROUP BY", "ORDER BY", "DESC", "WHERE", "avg", "sum", "max", "min", "count", ">", "<")
CASE = "case"  # of a text value: all that the query of another slip than these has wrong


class Teacher(BaseChatModel):
    """Answers each node of `sql_graph(teacher, SHORT)` as one who knows that `gold` is right.

    `said` gathers the conversations: what each node asked, and the answer.
    """

    gold: str
    rng: random.Random
    said: list[list[dict[str, str]]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "teacher"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        prompt = messages[0].text
        answer = self._answer(run_manager.metadata["langgraph_node"], prompt)
        self.said.append([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])

    def _answer(self, node: str, prompt: str) -> str:
        if node == "check":
            _schema, _question, query, *result, _done = prompt.split("\n")
            return self._check(query, "\n".join(result))
        if node == "rewrite" and self.rng.random() < KNOWS:
            return self.gold
        return first_try(self.rng, self.gold)

    def _check(self, query: str, result: str) -> str:
        if query == self.gold:
            rejects = REJECTS_RIGHT
        else:
            rejects = REJECTS_SUSPICIOUS if suspicious(result) else REJECTS_WRONG
        if self.rng.random() >= rejects:
            return SHORT.accepts
        known = query != self.gold and self.rng.random() >= MISNAMES
        return f"no: {missing(query, self.gold) if known else self.rng.choice([*REASONS, CASE])}"


def missing(query: str, gold: str) -> str:
    """The first thing that the right query has and this one has not, or `case`."""
    return next((reason for reason in REASONS if _has(gold, reason) and not _has(query, reason)), CASE)


def _has(query: str, part: str) -> bool:
    # ">=" is not ">".
    return part in query.replace(f"{part}=", "")
