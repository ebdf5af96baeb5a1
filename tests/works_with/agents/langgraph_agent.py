"""LangGraph: a graph of a model and its tools, which keeps the conversation itself."""

import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from langchain.chat_models import init_chat_model
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

api, stream = sys.argv[1], sys.argv[2] == "stream"
if api == "messages":
    model = init_chat_model("anthropic:policy", streaming=stream, max_tokens=200)
else:
    model = init_chat_model("openai:policy", streaming=stream, use_responses_api=api == "responses")
model = model.bind_tools([weather, population])
graph = StateGraph(MessagesState)
graph.add_node("ask", lambda state: {"messages": [model.invoke([("system", INSTRUCTIONS), *state["messages"]])]})
graph.add_node("tools", ToolNode([weather, population]))
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", tools_condition)
graph.add_edge("tools", "ask")
compiled = graph.compile(checkpointer=InMemorySaver())
for question in QUESTIONS:
    said = compiled.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "1"}})
    print(said["messages"][-1].text)
