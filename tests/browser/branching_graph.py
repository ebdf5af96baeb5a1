"""A LangGraph graph whose conversations branch: drafts, two ways on from the first, an answer that was edited."""

import operator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.graph import START, StateGraph


class Drafts(TypedDict, total=False):
    """A question, its drafts, and what came of them."""

    question: str
    drafts: Annotated[list[AnyMessage], operator.add]
    reward: float


def graph(model: BaseChatModel) -> Any:
    """Drafts at once, then two ways on from one of them, then an edited history."""

    def draft(state: Drafts) -> dict[str, Any]:
        return {"drafts": [model.invoke([HumanMessage(state["question"])])]}

    def revise(state: Drafts) -> dict[str, Any]:
        question, first = HumanMessage(state["question"]), state["drafts"][0]
        ways = [model.invoke([question, first, HumanMessage(way)]) for way in ("left", "right")]
        model.invoke([question, AIMessage("another answer than was given"), HumanMessage("left")])
        return {"reward": float(len(ways[0].text + ways[1].text) % 3)}

    built = StateGraph(Drafts).add_node("revise", revise)
    names = ["cold", "warm", "hot"]
    for name in names:
        built.add_node(name, draft)
        built.add_edge(START, name)
    return built.add_edge(names, "revise")
