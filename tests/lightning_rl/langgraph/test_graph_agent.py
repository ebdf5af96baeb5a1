"""Graphs as agents, through the real gateway: what is recorded of branches, tools, sub-graphs and user turns."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph

import lightning_rl as lrl
from lightning_rl.agents.agent import AgentNotFound, AgentSignature, ConfiguredAgent, agent_of_run, as_agent
from lightning_rl.agents.resources import LLM, ProxyLLM
from lightning_rl.config import compose
from lightning_rl.langgraph import ChatModel, ReactAgentLoop, agent_of
from lightning_rl.langgraph.graph_agent import GraphError, input_of
from lightning_rl.loading import NotLoadable
from lightning_rl.loops.configured import configured_agents
from lightning_rl.runner.agent_pickle import pickled
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_adapters.rows import Row
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.lightning_rl.langgraph import graphs
from tests.lightning_rl.langgraph.conftest import Recorded, calls_tool, llm_of
from tests.proxy.conftest import MODEL, TOKENIZER, Served

FILE = Path(graphs.__file__)
Run = Callable[..., Any]


@pytest.fixture
def run(llm: LLM) -> Run:
    """Run an agent on a task as a runner does."""

    def once(agent: Any, task: Any, where: LLM = llm) -> Any:
        resources = {"main_llm": ProxyLLM(MODEL, claimed=where)}
        return asyncio.run(agent.rollout(task, resources, SimpleNamespace(rollout_id="r1", mode="train")))

    return once


def trained(rows: list[Row], tokenizer: FastTokenizer) -> list[str]:
    """What each row trains, call by call."""
    said = []
    for row in rows:
        ids = [id for id, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        said.append(tokenizer.decode(ids))
    return said


def check_masks(calls: list[Call], rows: list[Row]) -> None:
    """Each sampled token has mask 1 in exactly one row, with its own logprob; nothing else has."""
    told = [
        (call_id, id, logprob)
        for row in rows
        for call_id, id, logprob, mask in zip(row.call_ids, row.token_ids, row.logprobs, row.loss_mask, strict=True)
        if mask
    ]
    sampled = [
        (call.call_id, id, logprob)
        for call in calls
        for id, logprob in zip(call.response_ids, call.logprobs or [], strict=True)
    ]
    assert sorted(told) == sorted(sampled)


def test_best_of_three_and_going_on_with_the_first_are_three_trajectories(
    served: Served, run: Run, recorded: Recorded, tokenizer: FastTokenizer
) -> None:
    served.engine.script.extend(["a first idea", "another idea", "a third idea", "good"])
    assert run(agent_of(graphs.best_of_3), {"question": "how?"}) == 1.0
    calls, rows = recorded()
    first = next(call for call in calls if "first" in tokenizer.decode(call.response_ids))
    assert [call.parent_id for call in calls] == [None, None, None, first.call_id]
    assert sorted(str(call.agent) for call in calls[:3]) == ["cold", "hot", "warm"]
    assert calls[3].agent == "revise"
    check_masks(calls, rows)
    assert sorted(trained(rows, tokenizer)) == [
        "a first idea<|im_end|>good<|im_end|>",
        "a third idea<|im_end|>",
        "another idea<|im_end|>",
    ]
    [long] = [row for row in rows if first.call_id in row.call_ids]
    start = len(first.prompt_ids)
    answered = len(first.response_ids)
    between = len(calls[3].prompt_ids)
    assert long.loss_mask == [0] * start + [1] * answered + [0] * between + [1] * len(calls[3].response_ids)
    assert long.token_ids[: -len(calls[3].response_ids)] == served.engine.prompts[3]


def test_a_streamed_call_has_the_name_of_its_node(served: Served, run: Run, recorded: Recorded) -> None:
    served.engine.script.extend(["a plan", "a text"])
    run(agent_of(graphs.streams), "write")
    calls, _ = recorded()
    assert [call.agent for call in calls] == ["plan", "write"]


def test_going_back_makes_a_row_for_each_way(
    served: Served, run: Run, recorded: Recorded, tokenizer: FastTokenizer
) -> None:
    served.engine.script.extend(["where to?", "left it is", "right it is", "once more"])
    run(agent_of(graphs.backtracks), {"question": "how?"})
    calls, rows = recorded()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[0].call_id, None]
    check_masks(calls, rows)
    assert trained(rows, tokenizer) == [
        "where to?<|im_end|>left it is<|im_end|>",  # the trunk is trained where its first continuation is
        "right it is<|im_end|>",
        "once more<|im_end|>",
    ]


def test_each_node_asks_with_its_own_sampling(served: Served, run: Run) -> None:
    served.ledger.sampling = {}
    served.engine.script.extend(["a first idea"] * 3)
    run(agent_of(graphs.best_of_3), {"question": "how?"})
    assert sorted(str(sampling.temperature) for sampling in served.engine.samplings) == ["0.5", "0.75", "1.0", "1.0"]


def test_tools_run_until_the_model_calls_none(served: Served, run: Run, recorded: Recorded) -> None:
    served.engine.script.extend([calls_tool("look_up", "cat", "dog"), calls_tool("look_up", "cow"), "Three words."])
    agent = agent_of(f"{FILE}:tools", reward=lambda task, state: float(state["messages"][-1].text == task["answer"]))
    assert run(agent, {"prompt": [{"role": "user", "content": "how many?"}], "answer": "Three words."}) == 1.0
    calls, rows = recorded()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    assert {call.agent for call in calls} == {"agent"}
    assert len(rows) == 1
    check_masks(calls, rows)


class Words(ReactAgentLoop):
    """verl's class form."""

    tools = (graphs.look_up,)
    prompt = "Be brief."


def test_the_loop_as_a_class_is_an_agent(
    served: Served, run: Run, recorded: Recorded, tokenizer: FastTokenizer
) -> None:
    served.engine.script.extend([calls_tool("look_up", "cat"), "A word."])
    agent = cloudpickle.loads(cloudpickle.dumps(as_agent(Words)))
    run(agent, "What is a cat?")
    calls, [row] = recorded()
    assert [call.agent for call in calls] == ["agent", "agent"]
    check_masks(calls, [row])
    assert "Be brief." in tokenizer.decode(served.engine.prompts[0])
    assert "cat is a word" in tokenizer.decode(served.engine.prompts[1])


def test_a_loop_that_sets_its_tools_where_nobody_looks_is_refused() -> None:
    with pytest.raises(AgentSignature, match=r"init_class is never called: write `tools = \[\.\.\.\]` in the class"):

        class Math(ReactAgentLoop):
            @classmethod
            def init_class(cls, config: Any, tokenizer: Any) -> None: ...


def test_a_node_of_a_sub_graph_is_named_with_the_node_that_it_is_within(
    served: Served, run: Run, recorded: Recorded
) -> None:
    served.engine.script.extend(["A plan.", calls_tool("look_up", "cat"), "A word."])
    run(agent_of(graphs.team), "What is a cat?")
    assert [call.agent for call in recorded()[0]] == ["the-planner", "researcher.agent", "researcher.agent"]


def test_a_user_answers_interrupts_and_the_conversation_goes_on(served: Served, run: Run, recorded: Recorded) -> None:
    served.engine.script.extend(["how old?", "how tall?", "done"])
    asked = []

    async def user(question: Any, task: Any) -> str:
        asked.append(question)
        return f"about {task['age']}"

    run(agent_of(graphs.asks_the_user, user=user), {"messages": [("user", "guess me")], "age": 30})
    assert asked == ["how old?", "how tall?"]
    calls, rows = recorded()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    assert len(rows) == 1
    check_masks(calls, rows)


def test_a_checkpointer_resumes_and_keeps_nothing_of_a_rollout(served: Served, run: Run, recorded: Recorded) -> None:
    saver = InMemorySaver()
    served.engine.script.extend(["how old?", "done"])
    agent = agent_of(lambda model: graphs.asks_the_user(model).compile(checkpointer=saver), user=lambda *_: "30")
    run(agent, "guess me")
    assert len(recorded()[1]) == 1
    assert not list(saver.list(None))


def test_a_thread_id_of_the_configuration_is_not_that_of_all_rollouts(served: Served) -> None:
    saver, threads = InMemorySaver(), list[str]()

    def remembers(state: Any, config: RunnableConfig) -> dict[str, Any]:
        threads.append(config["configurable"]["thread_id"])
        return {"messages": [("ai", "done")]}

    def build() -> Any:
        graph = StateGraph(MessagesState)
        graph.add_node("remembers", remembers)
        graph.add_edge(START, "remembers")
        return graph.compile(checkpointer=saver)

    agent = agent_of(build, config={"configurable": {"thread_id": "1"}})
    for _ in range(2):
        state = asyncio.run(agent.run("hi", None))
        assert [message.content for message in state["messages"]] == ["hi", "done"]
    assert len({*threads, "1"}) == 3


def test_a_graph_that_waits_for_a_person_says_what_to_do(served: Served, run: Run) -> None:
    served.engine.script.append("how old?")
    agent = agent_of(lambda model: graphs.asks_the_user(model).compile(checkpointer=InMemorySaver()))
    with pytest.raises(GraphError, match=r"who is asked 'how old\?'; say who answers: agent_of\(\.\.\., user=answer\)"):
        run(agent, "guess me")


def test_a_graph_that_never_ends_meets_its_limit(served: Served, run: Run, recorded: Recorded) -> None:
    with pytest.raises(GraphRecursionError):
        run(agent_of(graphs.for_ever, recursion_limit=4), "hi")
    assert len(recorded()[0]) == 4


@pytest.mark.parametrize("name", ["one_node", "from_config", "from_context", "no_argument", "tools"])
def test_a_graph_is_found_by_its_path_whatever_its_form(
    served: Served, run: Run, name: str, recorded: Recorded
) -> None:
    assert run(agent_of(f"{FILE}:{name}"), "hi") is None
    [call] = recorded()[0]
    assert call.model == MODEL
    assert call.agent == ("agent" if name == "tools" else "answer")


def test_rollouts_at_once_ask_each_behind_its_own_door(served: Served) -> None:
    agent = agent_of(f"{FILE}:no_argument")

    async def all_at_once() -> None:
        resources = [{"main_llm": ProxyLLM(MODEL, claimed=llm_of(served, f"r{i}"))} for i in range(12)]
        await asyncio.gather(
            *(agent.rollout(f"task {i}", given, SimpleNamespace(rollout_id=i)) for i, given in enumerate(resources))
        )

    asyncio.run(all_at_once())
    for i in range(12):
        served.seal(f"r{i}")
        [call] = served.ledger.calls(f"r{i}")
        assert call.agent == "answer"


@pytest.mark.parametrize("graph", [f"{FILE}:best_of_3", graphs.best_of_3, graphs.from_config, graphs.tools])
def test_an_agent_goes_to_a_runners_process(graph: Any) -> None:
    agent = cloudpickle.loads(cloudpickle.dumps(agent_of(graph, recursion_limit=7)))
    assert agent.config == {"recursion_limit": 7}


def test_a_compiled_graph_runs_where_it_was_sent(served: Served, run: Run, recorded: Recorded) -> None:
    """LangGraph compares with objects of its own by identity: copies of them would be written as the state."""
    graph = graphs.one_node(ChatModel()).compile()
    agent = agent_of(graph, reward=lambda _, state: float(len(state["messages"])))
    assert run(pickle.loads(pickled(agent)), "hi") == 2.0
    assert len(recorded()[0]) == 1


def test_a_prompt_that_is_a_text_is_a_users_message() -> None:
    assert input_of({"prompt": "hi", "level": 3}) == {"messages": [{"role": "user", "content": "hi"}], "level": 3}


def test_what_is_no_graph_is_refused_when_the_agent_is_made() -> None:
    with pytest.raises(GraphError, match="3 is no graph: a compiled one, a StateGraph, or a function"):
        agent_of(f"{FILE}:not_a_graph")
    with pytest.raises(NotLoadable, match=r"has no 'one_nod'; did you mean 'one_node'\?"):
        agent_of(f"{FILE}:one_nod")
    with pytest.raises(GraphError, match=r"graph_config has \['recursionlimit'\]"):
        agent_of(graphs.one_node, config={"recursionlimit": 3})
    with pytest.raises(GraphError, match=r"a task of type int is no graph's input; say what is: agent_of\("):
        input_of(3)


def named(graph: dict[str, Any]) -> list[ConfiguredAgent]:
    return configured_agents(compose({"actor_rollout_ref": {"rollout": {"multi_turn": {"langgraph": graph}}}}))


def test_the_agent_of_a_run_is_the_graph_that_its_configuration_names(
    served: Served, run: Run, recorded: Recorded
) -> None:
    graph = {"path": f"{FILE}:one_node", "graph_config": {"recursion_limit": 3}}
    run(agent_of_run(None, named(graph)), "hi")
    assert len(recorded()[0]) == 1


ONE_NODE = """
from langgraph.graph import START, MessagesState, StateGraph
from lightning_rl.langgraph import ChatModel

def ask(state):
    return {"messages": [ChatModel().invoke(state["messages"])]}

draft = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask")
"""


@pytest.mark.parametrize(
    ("name", "more"), [("one", ""), ("two", "graph = draft.compile()"), ("three", "def graph(): return draft")]
)
def test_the_path_of_a_file_alone_is_its_graph(
    served: Served, run: Run, recorded: Recorded, tmp_path: Path, name: str, more: str
) -> None:
    """verl's form, in YAML: `path: /path/to/graph.py`."""
    file = tmp_path / f"graph_{name}.py"
    file.write_text(ONE_NODE + more)
    written = tmp_path / "run.yaml"
    written.write_text(
        "actor_rollout_ref:\n  rollout:\n    multi_turn:\n      chat_template_kwargs: {enable_thinking: false}\n"
        f"      langgraph:\n        path: {file}\n        graph_config: {{recursion_limit: 100}}\n"
    )
    [agent] = configured_agents(compose(file=written))
    run(agent_of_run(None, [agent]), "hi")
    [call] = recorded()[0]
    assert call.agent == "ask"


def test_a_file_of_no_graph_or_of_several_asks_which(tmp_path: Path) -> None:
    several = (ONE_NODE + "other = draft.compile()", "several graphs, draft, other")
    for name, (text, told) in {"several": several, "nothing": ("x = 1", "no graph")}.items():
        file = tmp_path / f"{name}_of_a_test.py"
        file.write_text(text)
        with pytest.raises(GraphError, match=f"has no `graph`, and {told}: name the one that is meant, .*:NAME"):
            agent_of(str(file))
    with pytest.raises(NotLoadable, match=r"missing\.py': there is no file"):
        agent_of(str(tmp_path / "missing.py"))


def test_there_is_one_agent_given_or_named() -> None:
    given = as_agent(lambda task: 1.0)
    assert agent_of_run(given, named({})) is given
    with pytest.raises(
        AgentNotFound, match=r"lrl\.Trainer\(agent\), a program: .*, a graph: .*langgraph\.path=my_graph\.py:graph"
    ):
        agent_of_run(None, named({}))
    with pytest.raises(AgentNotFound, match=r"multi_turn\.langgraph\.path=a\.py:graph name two agents: leave one out"):
        agent_of_run(given, named({"path": "a.py:graph"}))


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize("order", ["algorithm in fit", "algorithm in Trainer"])
def test_a_trainer_without_an_agent_trains_the_graph_of_the_configuration(order: str, tmp_path: Path) -> None:
    langgraph = {"path": f"{FILE}:one_node", "graph_config": {"recursion_limit": 5}}
    multi_turn = {"langgraph": langgraph, "chat_template_kwargs": {"enable_thinking": False}}
    algorithm = lrl.PPO(
        {
            "data": {"train_batch_size": 1, "max_response_length": 8},
            "actor_rollout_ref": {"rollout": {"n": 2, "multi_turn": multi_turn}},
            "trainer": {"total_training_steps": 1, "logger": [], "all_failed": "go_on"},  # nothing judges it
        }
    )
    if order == "algorithm in fit":
        lrl.Trainer(run_dir=tmp_path / "run").fit(algorithm, ["cars: size id"])
    else:
        lrl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run").fit(train_dataset=["cars: size id"])
    store = SqlStore(f"sqlite:///{tmp_path / 'run' / 'store.db'}")
    rollouts, _ = store.page(limit=10)
    traces = store.traces([rollout.rollout_id for rollout in rollouts])
    found = [calls_of(trace.attempts[-1].spans) for trace in traces.values()]
    assert [len(calls) for calls in found] == [1, 1]
    without_thought = FastTokenizer(TOKENIZER).encode("<think>\n\n</think>\n\n")
    for [call] in found:
        assert call.agent == "answer"
        assert call.prompt_ids[-len(without_thought) :] == without_thought


def test_fit_says_what_it_is_given_too_much_or_too_little(tmp_path: Path) -> None:
    algorithm = lrl.Baseline()
    with pytest.raises(AgentNotFound, match="name the agent"):
        lrl.Trainer().fit(algorithm, ["a task"])
    with pytest.raises(AgentNotFound, match="name the agent"):
        lrl.Trainer().dev(["a task"])
    with pytest.raises(TypeError, match=r"fit takes an algorithm first.*Trainer\(algorithm=algorithm\)\.fit\(agent"):
        lrl.Trainer().fit(lambda task: 1.0, ["a task"])
    with pytest.raises(TypeError, match="the Trainer has an algorithm, and fit is given another"):
        lrl.Trainer(algorithm=algorithm).fit(algorithm, ["a task"])
    with pytest.raises(TypeError, match=r"algorithm takes one, as in algorithm=lrl\.PPO\(config\)"):
        lrl.Trainer(algorithm=lrl.PPO)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fit is given the other"):
        lrl.Trainer(lambda task: 1.0, algorithm=algorithm)
    graph = {"actor_rollout_ref": {"rollout": {"multi_turn": {"langgraph": {"path": f"{FILE}:one_node"}}}}}
    with pytest.raises(AgentNotFound, match="name two agents"):
        lrl.Trainer(lambda task: 1.0, run_dir=tmp_path / "run").fit(lrl.PPO(graph), ["a task"])
    assert not (tmp_path / "run").exists()


def test_importing_the_room_loads_no_langgraph() -> None:
    code = "import sys, lightning_rl.langgraph; print({'langgraph', 'langchain_core', 'openai'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_without_langgraph_the_room_says_what_to_install() -> None:
    code = "import sys; sys.modules['langchain_core'] = None; from lightning_rl.langgraph import ChatModel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs langchain_core" in done.stderr
    assert "pip install 'lightning-rl[langgraph]'" in done.stderr
