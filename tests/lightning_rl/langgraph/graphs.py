"""Graphs as an author writes them: nothing here knows of training, and any chat model may be behind them."""

import operator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage, message_chunk_to_message
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime
from langgraph.types import interrupt

from lightning_rl.langgraph import ChatModel, react_agent


def look_up(what: str) -> str:
    """Look a word up."""
    return f"{what} is a word"


def one_node(model: BaseChatModel) -> Any:
    """A draft that asks once; the model is an argument."""

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    return StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").add_edge("answer", END)


async def _configured(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    return {"messages": [await config["configurable"]["model"].ainvoke(state["messages"])]}


# The model is taken from the config; the graph is compiled once, when the file is imported.
from_config: CompiledStateGraph[Any, Any, Any, Any] = (
    StateGraph(MessagesState).add_node("answer", _configured).add_edge(START, "answer").compile()
)

# The model is the default one: the rollout's, else the environment's.
tools = react_agent([look_up], prompt="Be brief.", recursion_limit=6)


class Best(TypedDict, total=False):
    """A question, its drafts, and the answer that went on from one of them."""

    question: str
    drafts: Annotated[list[AnyMessage], operator.add]
    answer: str
    reward: float


def best_of_3(model: BaseChatModel) -> Any:
    """Three drafts of one question, each warmer than the last; a critic goes on with the first."""

    def drafted(temperature: float) -> Any:
        def draft(state: Best) -> dict[str, Any]:
            return {"drafts": [model.bind(temperature=temperature).invoke([HumanMessage(state["question"])])]}

        return draft

    def revise(state: Best) -> dict[str, Any]:
        first = next(draft for draft in state["drafts"] if draft.text == "a first idea")
        answer = model.invoke([HumanMessage(state["question"]), first, HumanMessage("Go on.")])
        return {"answer": answer.text, "reward": float(answer.text == "good")}

    graph = StateGraph(Best)
    graph.add_node("revise", revise)
    names = ["cold", "warm", "hot"]
    for name, temperature in zip(names, (0.5, 0.75, 1.0), strict=True):
        graph.add_node(name, drafted(temperature))
        graph.add_edge(START, name)
    graph.add_edge(names, "revise")
    return graph


def streams(model: BaseChatModel) -> Any:
    """Two nodes that read their answers piece by piece."""

    def plan(state: MessagesState) -> dict[str, Any]:
        return {"messages": [add(*model.stream(state["messages"]))]}

    async def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": [add(*[chunk async for chunk in model.astream(state["messages"])])]}

    def add(first: Any, *others: Any) -> Any:
        return message_chunk_to_message(sum(others, first))

    graph = StateGraph(MessagesState).add_node("plan", plan).add_node("write", write)
    return graph.add_edge(START, "plan").add_edge("plan", "write")


def backtracks(model: BaseChatModel) -> Any:
    """Two turns, then back to the first answer and on another way, then back to the question."""

    def talk(state: Best) -> dict[str, Any]:
        question = HumanMessage(state["question"])
        first = model.invoke([question])
        model.invoke([question, first, HumanMessage("left")])
        model.invoke([question, first, HumanMessage("right")])
        return {"answer": model.invoke([question, HumanMessage("again")]).text}

    return StateGraph(Best).add_node("talk", talk).add_edge(START, "talk")


def asks_the_user(model: BaseChatModel) -> Any:
    """Asks the person what the model wants to know, and the model again."""

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def wait(state: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(interrupt(state["messages"][-1].text))]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_node("wait", wait)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", lambda state: END if state["messages"][-1].text == "done" else "wait")
    return graph.add_edge("wait", "ask")


def team(model: BaseChatModel) -> Any:
    """A planner, and a researcher with tools that is a graph of its own."""

    def plan(state: MessagesState) -> dict[str, Any]:
        model.invoke([HumanMessage("Plan.")])
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("the planner", plan)
    graph.add_node("researcher", react_agent([look_up], model=model))
    return graph.add_edge(START, "the planner").add_edge("the planner", "researcher")


class WithModel(TypedDict):
    """What a graph is given beside its state."""

    model: BaseChatModel


def _in_context(state: MessagesState, runtime: Runtime[WithModel]) -> dict[str, Any]:
    return {"messages": [runtime.context["model"].invoke(state["messages"])]}


# The model is taken from the context.
from_context = (
    StateGraph(MessagesState, context_schema=WithModel).add_node("answer", _in_context).add_edge(START, "answer")
)


def for_ever(model: BaseChatModel) -> Any:
    """Never ends by itself."""

    def again(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"]), HumanMessage("again")]}

    return StateGraph(MessagesState).add_node("again", again).add_edge(START, "again").add_edge("again", "again")


default = ChatModel(temperature=0.5)


def no_argument() -> Any:
    """A draft whose model is the default one."""
    return one_node(default)


not_a_graph = 3
