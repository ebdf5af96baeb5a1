"""Which agents are played, in which versions, over which APIs, and how many calls and training rows each makes.

`rows` is 1 where every request of the agent goes on from the one before, token for token. Where it is more, `why` says
what the framework does. `docs/works-with.md` is this table.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.works_with import programs

DATE = "2026-11-26"  # of the versions

Api = Literal["chat", "responses", "messages"]
Streamed = Literal["whole", "stream"]


class Environment(NamedTuple):
    """What pip or npm installs; `scripts` of npm packages are run behind that. `python` is the version it needs."""

    pins: tuple[str, ...]
    npm: bool = False
    scripts: tuple[str, ...] = ()
    python: str = ""  # by default the one that runs the tests


class Mode(NamedTuple):
    """One way in which an agent is played, and what it leaves."""

    api: Api
    streamed: Streamed
    calls: int = 4
    rows: int = 1
    why: str = ""
    housekeeping: int = 0  # calls that are no part of the task


class Agent(NamedTuple):
    """One agent.

    `said` are the model's answers, `printed` what the agent then prints; `connects` are the lines of a user that point
    it at the gateway. `command` makes the command line and whatever files it needs, `package` names its package among
    the environment's pins, by default the first. A prompt that holds `aside` is no part of the task: it is answered
    with a title, whenever it comes.
    """

    name: str
    title: str
    environment: str
    modes: tuple[Mode, ...]
    connects: str
    said: tuple[str, ...]
    printed: tuple[str, ...]
    command: Callable[[Any, Path, Path, Mode, dict[str, str]], list[str]]
    package: str = ""
    aside: str = ""


# Reasoning, words before two calls, and JSON as no library writes it: such an answer comes back in other words.
SAID = (
    "<think>\nTwo things to look up.\n</think>\n\nI look both up.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{ "arguments":{"city":"O\\u0073lo" } ,"name": "population"}\n</tool_call>',
    "It is sunny in Oslo, and 700,000 people live there.",
    "<think>\nOnce more.\n</think>\n\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city":   "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "population", "arguments": {"city": "Rome"}}\n</tool_call>',
    "It is rainy in Rome, and 2,800,000 people live there.",
)
PRINTED = (SAID[1], SAID[3])

# The call must be one: the answer begins with its opening, which is forced.
_FINAL_ANSWERS = (
    'weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{ "arguments":{"city":"O\\u0073lo" } ,"name": "population"}\n</tool_call>',
    f'final_answer", "arguments": {{"answer": "{PRINTED[0]}"}}}}\n</tool_call>',
    'weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "population", "arguments": {"city": "Rome"}}\n</tool_call>',
    f'final_answer", "arguments": {{"answer": "{PRINTED[1]}"}}}}\n</tool_call>',
)
_REPORTS = tuple(
    f'{{"city": "{city}",  "weather": "{weather}", "population": "{people}"}}}}\n</tool_call>'
    for city, weather, people in (("Oslo", "sunny", "700,000"), ("Rome", "rainy", "2,800,000"))
)
_MESSAGES_OF_ATOMIC = tuple(f'{{"chat_message":  "{answer}"}}}}\n</tool_call>' for answer in PRINTED)
_CODE = (
    'Thought: I look both up.\n<code>\nprint(weather("Oslo"), population("Oslo"))\n</code>',
    f'<code>\nfinal_answer("{PRINTED[0]}")\n</code>',
    '<code>\nprint(weather("Rome"), population("Rome"))\n</code>',
    f'<code>\nfinal_answer("{PRINTED[1]}")\n</code>',
)
_REACT = (
    'Thought: I need a tool.\nAction: weather\nAction Input: {"city": "Oslo"}',
    'Thought: And another.\nAction: population\nAction Input: {"city": "Oslo"}',
    f"Thought: I can answer.\nAnswer: {PRINTED[0]}",
    'Thought: Once more.\nAction: weather\nAction Input: {"city": "Rome"}',
    'Thought: And again.\nAction: population\nAction Input: {"city": "Rome"}',
    f"Thought: I can answer.\nAnswer: {PRINTED[1]}",
)


def _dspy(thought: str, tool: str, arguments: str) -> str:
    fields = {"next_thought": thought, "next_tool_name": tool, "next_tool_args": arguments}
    said = "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items())
    return f"{said}\n\n[[ ## completed ## ]]"


_DSPY = tuple(
    said
    for city, answer in zip(("Oslo", "Rome"), PRINTED, strict=True)
    for said in (
        _dspy("I look it up.", "weather", f'{{"city": "{city}"}}'),
        _dspy("And that.", "population", f'{{"city": "{city}"}}'),
        _dspy("Done.", "finish", "{}"),
        f"[[ ## reasoning ## ]]\nBoth are known.\n\n[[ ## answer ## ]]\n{answer}\n\n[[ ## completed ## ]]",
    )
)


def _in_shell(tool: str, argument: str, others: str = "") -> tuple[str, ...]:
    """Two commands at once in each turn, and what they say."""
    turns = []
    for name in ("hello", "world"):
        calls = "\n".join(
            f'<tool_call>\n{{"name": "{tool}", "arguments": {{"{argument}": "{command}"{others}}}}}\n</tool_call>'
            for command in (f"cat {name}.txt", f"wc -l {name}.txt")
        )
        turns += [f"<think>\nI look.\n</think>\n\nI look at it.\n{calls}", f"The file says {name}."]
    return tuple(turns)


_FILES = ("The file says hello.", "The file says world.")

ENVIRONMENTS = {
    "langchain": Environment(
        ("langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", "langgraph==1.2.24")
    ),
    "openai-agents": Environment(("openai-agents==0.24.0", "litellm==1.110.2")),
    "pydantic-ai": Environment(("pydantic-ai-slim[openai,anthropic]==2.66.0",)),
    "agno": Environment(("agno==3.1.10", "openai==3.57.0", "anthropic==2.14.0")),
    "strands": Environment(("strands-agents[openai,anthropic]==1.62.0",)),
    "haystack": Environment(("haystack-ai==3.4.1", "anthropic-haystack==8.0.1")),
    "autogen": Environment(("autogen-agentchat==0.7.5", "autogen-ext[openai,anthropic]==0.7.5", "anthropic==0.125.0")),
    "ag2": Environment(("ag2[openai,anthropic]==1.2.1",)),
    "smolagents": Environment(("smolagents[openai,litellm]==1.26.0", "litellm==1.110.2")),
    "semantic-kernel": Environment(("semantic-kernel[anthropic]==1.45.0",)),
    "crewai": Environment(("crewai[anthropic]==1.15.30", "litellm==1.110.2")),
    "camel": Environment(("camel-ai==0.2.90", "mcp==1.30.0", "openai==3.57.0", "anthropic==0.125.0")),
    "instructor": Environment(("instructor==1.17.0", "anthropic==2.14.0")),
    "atomic-agents": Environment(("atomic-agents==1.1.11", "instructor==1.9.2", "pydantic==2.11.10")),
    "mcp-agent": Environment(("mcp-agent==0.2.6", "mcp==1.30.0", "openai==3.57.0", "anthropic==0.84.0")),
    "dspy": Environment(("dspy==3.4.1",)),
    "llama-index": Environment(
        (
            "llama-index-core==0.14.25",
            "llama-index-llms-openai-like==0.8.1",
            "llama-index-llms-anthropic==0.12.3",
            "anthropic==0.125.0",
        )
    ),
    "js": Environment(
        (
            "ai@7.0.173",
            "@ai-sdk/openai-compatible@3.0.92",
            "@ai-sdk/openai@4.0.118",
            "@ai-sdk/anthropic@4.0.105",
            "langchain@1.5.14",
            "@langchain/openai@1.6.0",
            "@langchain/anthropic@1.5.11",
            "@langchain/core@1.4.0",
            "openai@7.57.0",
            "zod@4.6.7",
        ),
        npm=True,
    ),
    "claude-code": Environment(
        ("@anthropic-ai/claude-code@2.1.332",), npm=True, scripts=("@anthropic-ai/claude-code/install.cjs",)
    ),
    "codex": Environment(("@openai/codex@0.169.0",), npm=True),
    "opencode": Environment(("opencode-ai@1.18.33",), npm=True),
    "qwen-code": Environment(("@qwen-code/qwen-code@0.24.4",), npm=True),
    "aider": Environment(("aider-chat==0.86.2",)),
    "claude-agent-sdk": Environment(("claude-agent-sdk==0.2.189",)),
    "mini-swe-agent": Environment(("mini-swe-agent==2.4.6",)),
    "openhands": Environment(("openhands-sdk==1.58.2", "openhands-tools==1.58.2"), python="3.12"),
    "google-adk": Environment(("google-adk==2.13.0", "litellm==1.110.2", "anthropic==2.14.0")),
}


def _both(api: Api, calls: int = 4, rows: int = 1, why: str = "") -> tuple[Mode, Mode]:
    return Mode(api, "whole", calls, rows, why), Mode(api, "stream", calls, rows, why)


_CHAT, _RESPONSES, _MESSAGES = _both("chat"), _both("responses"), _both("messages")
_AS_JSON = "it writes each answer back as the JSON of its object"
_IN_FIELDS = "each step is a new prompt, which tells the earlier ones in fields"
_DOUBLED = "litellm 1.105, through which it goes, doubles the reasoning of a stream"
_DROPPED = "it drops the words beside the calls, in the turn that has some"


def _script(name: str) -> Callable[[Any, Path, Path, Mode, dict[str, str]], list[str]]:
    """The agent of a framework: a script in `agents/`."""
    script = Path(__file__).parent / "agents" / name

    def command(_llm: Any, environment: Path, _folder: Path, mode: Mode, _variables: dict[str, str]) -> list[str]:
        return [str(environment / "bin" / "python"), str(script), mode.api, mode.streamed]

    return command


def _module(name: str) -> Callable[[Any, Path, Path, Mode, dict[str, str]], list[str]]:
    """The agent of a framework of npm: node finds packages beside a script alone."""
    scripts = Path(__file__).parent / "agents"

    def command(_llm: Any, environment: Path, _folder: Path, mode: Mode, _variables: dict[str, str]) -> list[str]:
        for script in (name, "asked.mjs"):
            shutil.copy(scripts / script, environment / script)
        return ["node", str(environment / name), mode.api, mode.streamed]

    return command


def _program(
    written: Callable[[Any, Path, dict[str, str]], list[str]],
) -> Callable[[Any, Path, Path, Mode, dict[str, str]], list[str]]:
    return _with_files(lambda llm, _environment, folder, _mode, variables: written(llm, folder, variables))


def _with_files(
    written: Callable[[Any, Path, Path, Mode, dict[str, str]], list[str]],
) -> Callable[[Any, Path, Path, Mode, dict[str, str]], list[str]]:
    """A command that reads two files."""

    def command(llm: Any, environment: Path, folder: Path, mode: Mode, variables: dict[str, str]) -> list[str]:
        for name in ("hello", "world"):
            (folder / "work" / f"{name}.txt").write_text(f"{name}\n")
        return written(llm, environment, folder, mode, variables)

    return command


def _framework(
    name: str, title: str, environment: str, modes: tuple[Mode, ...], connects: str, said: tuple[str, ...] = SAID
) -> Agent:
    return Agent(name, title, environment, modes, connects, said, PRINTED, _script(f"{name}.py"))


AGENTS = (
    _framework(
        "langchain_agent", "LangChain, `create_agent`", "langchain", _CHAT + _RESPONSES + _MESSAGES,
        'init_chat_model(f"openai:{llm.model}", base_url=llm.base_url, api_key=llm.api_key)',
    ),
    Agent(
        "langgraph_agent", "LangGraph", "langchain", _CHAT + _RESPONSES + _MESSAGES,
        'init_chat_model(f"openai:{llm.model}", base_url=llm.base_url, api_key=llm.api_key)',
        SAID, PRINTED, _script("langgraph_agent.py"), "langgraph",
    ),
    _framework(
        "openai_agents", "OpenAI Agents SDK", "openai-agents", _RESPONSES + _CHAT + _MESSAGES,
        "OpenAIResponsesModel(llm.model, llm.async_openai())",
    ),
    _framework(
        "pydantic_agent", "Pydantic AI", "pydantic-ai", _CHAT + _RESPONSES + _MESSAGES,
        "OpenAIChatModel(llm.model, provider=OpenAIProvider(openai_client=llm.async_openai()))",
    ),
    _framework(
        "agno_agent", "Agno", "agno", _CHAT + _both("responses", rows=2, why=_DROPPED) + _MESSAGES,
        "OpenAIChat(id=llm.model, base_url=llm.base_url, api_key=llm.api_key)",
    ),
    _framework(
        "strands_agent", "Strands Agents", "strands", (_CHAT[1], _RESPONSES[1], _MESSAGES[1]),
        'OpenAIModel(model_id=llm.model, client_args={"base_url": llm.base_url, "api_key": llm.api_key})',
    ),
    _framework(
        "haystack_agent", "Haystack", "haystack",
        (*_CHAT, *_RESPONSES, Mode("messages", "whole", rows=2, why=_DROPPED), Mode("messages", "stream")),
        "OpenAIChatGenerator(model=llm.model, api_base_url=llm.base_url, api_key=Secret.from_token(llm.api_key))",
    ),
    _framework(
        "autogen_agent", "AutoGen", "autogen",
        _CHAT + _both("messages", rows=3, why="it writes the reasoning back as the answer's words"),
        "OpenAIChatCompletionClient(model=llm.model, base_url=llm.base_url, api_key=llm.api_key, model_info=...)",
    ),
    _framework(
        "ag2_agent", "AG2", "ag2", _CHAT + _RESPONSES + _MESSAGES,
        "OpenAIConfig(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)",
    ),
    _framework(
        "semantic_kernel_agent", "Semantic Kernel", "semantic-kernel",
        (
            Mode("chat", "whole", rows=2, why=_DROPPED),
            Mode("chat", "stream", rows=3, why=f"{_DROPPED}, and puts them before the next answer"),
            Mode("responses", "whole", rows=2, why="it leaves out the calls of a turn that is over"),
            Mode("responses", "stream", rows=3, why="it leaves out the calls and the answer of a turn that is over"),
            Mode("messages", "whole"),
            Mode("messages", "stream", rows=2, why="it puts the words beside the calls before the next answer, too"),
        ),
        "OpenAIChatCompletion(ai_model_id=llm.model, async_client=llm.async_openai())",
    ),
    _framework(
        "crewai_agent", "CrewAI", "crewai",
        (
            *_both("chat", rows=2, why=_DROPPED), Mode("responses", "whole", rows=2, why=_DROPPED),
            *_both("messages", rows=2, why=_DROPPED),
        ),
        'LLM(model=f"openai/{llm.model}", base_url=llm.base_url, api_key=llm.api_key)',
    ),
    _framework(
        "llama_index_function", "LlamaIndex, `FunctionAgent`", "llama-index", _CHAT + _RESPONSES + _MESSAGES,
        "OpenAILike(llm.model, api_base=llm.base_url, api_key=llm.api_key, is_chat_model=True, "
        "is_function_calling_model=True)",
    ),
    _framework(
        "google_adk_agent", "Google ADK", "google-adk", _CHAT + _MESSAGES,
        'LiteLlm(model=f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key)',
    ),
    Agent(
        "smolagents_agent", "smolagents, `ToolCallingAgent`", "smolagents", _CHAT + _MESSAGES,
        "OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key)",
        _FINAL_ANSWERS, PRINTED, _script("smolagents_agent.py"),
    ),
    Agent(
        "smolagents_code", "smolagents, `CodeAgent`", "smolagents", _CHAT,
        "OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key)",
        _CODE, PRINTED, _script("smolagents_code.py"),
    ),
    Agent(
        "llama_index_react", "LlamaIndex, `ReActAgent`", "llama-index",
        _both("chat", 6, 6, "it writes each answer back in words of its own, with its result in the same message"),
        "OpenAILike(llm.model, api_base=llm.base_url, api_key=llm.api_key, is_chat_model=True)",
        _REACT, PRINTED, _script("llama_index_react.py"),
    ),
    Agent(
        "camel_agent", "CAMEL", "camel", (Mode("chat", "whole"), Mode("chat", "stream", rows=2, why=_DROPPED),
         Mode("messages", "whole"), Mode("messages", "stream", rows=2, why=_DROPPED)),
        "ModelFactory.create(ModelPlatformType.OPENAI_COMPATIBLE_MODEL, llm.model, url=llm.base_url, ...)",
        SAID, PRINTED, _script("camel_agent.py"),
    ),
    Agent(
        "instructor_agent", "instructor", "instructor", (
            Mode("chat", "whole", 2), Mode("messages", "whole", 2),
            *_both("responses", 2, 2, _AS_JSON), Mode("chat", "stream", 2, 2, _AS_JSON),
            Mode("messages", "stream", 2, 2, _AS_JSON),
        ),
        "instructor.from_openai(llm.openai())", _REPORTS, PRINTED, _script("instructor_agent.py"),
    ),
    Agent(
        "atomic_agent", "Atomic Agents", "atomic-agents", _both("chat", 2, 2, _AS_JSON),
        "BaseAgentConfig(client=instructor.from_openai(llm.openai()), model=llm.model)",
        _MESSAGES_OF_ATOMIC, PRINTED, _script("atomic_agent.py"),
    ),
    Agent(
        "mcp_agent_llm", "mcp-agent", "mcp-agent", (Mode("chat", "whole"), Mode("messages", "stream")),
        "OpenAISettings(base_url=llm.base_url, api_key=llm.api_key, default_model=llm.model)",
        SAID, PRINTED, _script("mcp_agent_llm.py"),
    ),
    Agent(
        "dspy_agent", "DSPy, `ReAct`", "dspy",
        _both("chat", 8, 8, _IN_FIELDS) + _both("responses", 8, 8, _IN_FIELDS) + _both("messages", 8, 8, _IN_FIELDS),
        'dspy.LM(f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key, cache=False)',
        _DSPY, PRINTED, _script("dspy_agent.py"),
    ),
    Agent(
        "vercel_ai", "Vercel AI SDK", "js", _CHAT + _RESPONSES + _MESSAGES,
        'createOpenAICompatible({ name: "gateway", baseURL: process.env.OPENAI_BASE_URL, '
        "apiKey: process.env.OPENAI_API_KEY })",
        SAID, PRINTED, _module("vercel_ai.mjs"),
    ),
    Agent(
        "langchain_js", "LangChain.js, `createAgent`", "js", _CHAT + _RESPONSES + _MESSAGES,
        "new ChatOpenAI({ model, configuration: { baseURL: process.env.OPENAI_BASE_URL } })",
        SAID, PRINTED, _module("langchain_js.mjs"), "langchain",
    ),
    Agent(
        "openai_js", "OpenAI's SDK for JavaScript", "js", _CHAT + _RESPONSES,
        "new OpenAI()  // it reads OPENAI_BASE_URL and OPENAI_API_KEY", SAID, PRINTED,
        _module("openai_js.mjs"), "openai",
    ),
    _framework(
        "claude_sdk", "Claude Agent SDK", "claude-agent-sdk", _MESSAGES[1:],
        "ClaudeAgentOptions(env=llm.claude_code_env())",
        tuple(re.sub(r'"(weather|population)"', r'"mcp__cities__\1"', answer) for answer in SAID),
    ),
    Agent(
        "claude_code", "Claude Code", "claude-code", (Mode("messages", "stream"),),
        "env=os.environ | llm.claude_code_env()",
        _in_shell("Bash", "command", ', "description": "look"'), _FILES, _program(programs.claude_code),
    ),
    Agent(
        "codex", "Codex", "codex", (Mode("responses", "stream"),),
        "llm.codex_config() in $CODEX_HOME/config.toml, and env=os.environ | llm.env()",
        _in_shell("exec_command", "cmd"), _FILES, _program(programs.codex),
    ),
    Agent(
        "opencode", "opencode", "opencode",
        (Mode("chat", "stream", 5, 2, "it asks for a title, which is housekeeping", 1),),
        "a provider of npm @ai-sdk/openai-compatible in OPENCODE_CONFIG_CONTENT",
        _in_shell("bash", "command", ', "description": "look"'), _FILES, _program(programs.opencode),
        aside="title generator",
    ),
    Agent(
        "qwen_code", "Qwen Code", "qwen-code",
        (Mode("chat", "stream", 4, 2, "a resumed session leaves a reminder out of its first message"),),
        "env=os.environ | llm.env()",
        _in_shell("run_shell_command", "command", ', "is_background": false'), _FILES, _program(programs.qwen_code),
    ),
    Agent(
        "aider", "aider", "aider",
        (Mode("chat", "stream", 2, 2, "each turn ends with instructions that the next one leaves out"),),
        'aider --model openai/NAME, and env=os.environ | llm.env()', _FILES, _FILES, _program(programs.aider),
    ),
    Agent(
        "openhands_agent", "OpenHands", "openhands",
        (*_CHAT, Mode("messages", "whole"), Mode("messages", "stream", rows=3, why=_DOUBLED)),
        'LLM(model=f"openai/{llm.model}", base_url=llm.base_url, api_key=llm.api_key)',
        _in_shell("terminal", "command"), _FILES, _with_files(_script("openhands_agent.py")),
    ),
    Agent(
        "mini", "mini-swe-agent", "mini-swe-agent", (Mode("chat", "whole", calls=2),),
        "mini --model openai/NAME, and env=os.environ | llm.env()",
        (
            _in_shell("bash", "command")[0],
            '<tool_call>\n{"name": "bash", "arguments": {"command": '
            '"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat hello.txt"}}\n</tool_call>',
        ),
        ("hello",), _program(programs.mini),
    ),
)  # fmt: skip

NOT_PLAYED = {
    "CrewAI, streamed over Responses": "it reads the words of a streamed answer, and leaves out its calls",
}
