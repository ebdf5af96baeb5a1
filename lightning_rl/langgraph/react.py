"""The usual loop as a graph: the model is asked, the tools that it calls are run, until it calls none."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from lightning_rl.agents.agent import AgentSignature
from lightning_rl.langgraph.chat_model import ChatModel
from lightning_rl.langgraph.graph_agent import GraphAgent


def react_agent(
    tools: Sequence[BaseTool | Callable[..., Any]],
    *,
    model: BaseChatModel | None = None,
    prompt: str | None = None,
    recursion_limit: int = 25,
) -> Any:
    """A compiled graph of the nodes `agent` and `tools` over messages.

    Args:
        tools: LangChain tools, or functions with type hints and a docstring.
        model: who is asked; `ChatModel()` by default, which is the policy in training.
        prompt: the system message.
        recursion_limit: nodes run at most; with more, LangGraph raises GraphRecursionError.
    """
    node = ToolNode(tools)
    bound_model = (model or ChatModel()).bind_tools(list(node.tools_by_name.values()))
    system: list[BaseMessage] = [SystemMessage(prompt)] if prompt else []

    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound_model.invoke([*system, *state["messages"]])]}

    async def agent_async(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound_model.ainvoke([*system, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", RunnableLambda(agent, agent_async))
    graph.add_node("tools", node)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile().with_config(recursion_limit=recursion_limit)


class ReactAgentLoop(GraphAgent):
    """The loop as an agent, in verl's class form: subclass it and set `tools`, or define `build_graph`.

    Its graph is built anew for every rollout. Raises AgentSignature for a subclass that sets its tools in `init_class`,
    as verl's do: nobody calls it.
    """

    tools: ClassVar[Sequence[BaseTool | Callable[..., Any]]] = ()
    prompt: ClassVar[str | None] = None
    recursion_limit: ClassVar[int] = 25

    def __init__(self) -> None:
        super().__init__(self.build_graph)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "init_class"):
            raise AgentSignature(f"{cls.__name__}.init_class is never called: write `tools = [...]` in the class")

    @classmethod
    def build_graph(cls) -> Any:
        """The graph of one rollout: `react_agent` with the tools of the class."""
        return react_agent(cls.tools, prompt=cls.prompt, recursion_limit=cls.recursion_limit)
