"""One player per SDK and dialect: each plays the conversations as an agent's author writes them with that SDK.

Histories are kept in the SDK's own objects, and answers are read from them. The module stands alone, so that any
interpreter with an SDK can run it: `python players.py` plays what it is asked for, one line of JSON each.
"""

import asyncio
import contextlib
import importlib.metadata
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would fetch its prices from the network

LOOK_UP = ("look_up", "Look a word up.", {"type": "object", "properties": {"what": {"type": "string"}}})
COUNT = ("count", "Count things.", {"type": "object", "properties": {"what": {"type": "string"}}})
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Lacking(Exception):
    """The API has no such thing."""


class Mode(NamedTuple):
    """How an author calls: with the asynchronous client or the plain one, answers streamed or whole."""

    asynchronous: bool
    streamed: bool

    def __str__(self) -> str:
        return f"{'async' if self.asynchronous else 'sync'}-{'streamed' if self.streamed else 'whole'}"


MODES = [Mode(asynchronous, streamed) for asynchronous in (False, True) for streamed in (False, True)]


class Seen(NamedTuple):
    """What the author sees of an answer. `finish` is stop, length or tool_calls; `logprobs` counts tokens."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments
    finish: str = "stop"
    reasoning: str = ""
    logprobs: int = 0


class Answer(NamedTuple):
    """One choice: what the author sees, the ids of its tool calls, and the SDK's object that goes into the history."""

    seen: Seen
    call_ids: list[str]
    own: Any


class Door(NamedTuple):
    """Where the gateway is asked: a base URL without `/v1`, and a key."""

    url: str
    key: str


async def maybe(value: Any) -> Any:
    """The value of a call, whether the client is asynchronous or not."""
    return await value if inspect.isawaitable(value) else value


async def each(stream: Any, mode: Mode) -> AsyncIterator[Any]:
    """The parts of either client's stream."""
    if mode.asynchronous:  # litellm's streams claim to be both
        async for part in stream:
            yield part
    else:
        for part in stream:
            yield part
        hang_up(stream)


def hang_up(stream: Any) -> None:
    """Close what a stream that was read is wrapped around.

    litellm leaves the answer of its last request open inside a cycle of references. The collector would close it at
    some later moment, and where that is within httpcore's pool, the thread waits for ever for a lock that it holds.
    """
    for name in ("completion_stream", "streaming_response", "response_iterator", "response"):
        inner = getattr(stream, name, None)
        if inner is not None:
            hang_up(inner)
    if callable(close := getattr(stream, "close", None)) and not inspect.iscoroutinefunction(close):
        close()


def same(arguments: Any) -> str:
    """Arguments in one spelling, whether the SDK gives text or objects."""
    return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)


class Player:
    """An author with one SDK. A player has one conversation; `seen` are the answers in order.

    `ask` takes the wishes of the conversations by neutral names. What the SDK's method has no parameter for goes by
    `extra_body`, and its names into `extra`.
    """

    sdk: ClassVar[str]
    dialect: ClassVar[str]
    way: ClassVar[str]  # of several that the SDK has to speak the dialect

    def __init__(self, door: Door, mode: Mode, model: str) -> None:
        self.door = door
        self.mode = mode
        self.model = model
        self.seen: list[Seen] = []
        self.extra: set[str] = set()
        self.history: list[Any] = []
        self.answers: list[Answer] = []

    async def ask(self, keep: int = 0, unknown: Mapping[str, Any] | None = None, **wishes: Any) -> Answer:
        """Ask for answers, and put number `keep` into the history."""
        self.answers = await self._asked({"max_tokens": 64} | wishes, dict(unknown or {}))
        if len(self.answers) < wishes.get("n", 1):
            raise Lacking(f"several choices: the SDK tells of {len(self.answers)}")
        self.seen += [answer.seen for answer in self.answers]
        self._keep(self.answers[keep])
        return self.answers[keep]

    def system(self, text: str) -> None:
        raise NotImplementedError

    def developer(self, text: str) -> None:
        raise Lacking("a developer role")

    def user(self, text: str) -> None:
        raise NotImplementedError

    def image(self, text: str) -> None:
        raise Lacking("images")

    def result(self, call_id: str, text: str) -> None:
        raise Lacking("tools")

    async def _asked(self, wishes: dict[str, Any], unknown: dict[str, Any]) -> list[Answer]:
        raise NotImplementedError

    def _keep(self, answer: Answer) -> None:
        self.history.append(answer.own)

    def _fields(self, known: Iterable[str], fields: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call: what the method does not know goes into `extra_body`."""
        known = set(known)
        extra = {name: value for name, value in fields.items() if name not in known}
        self.extra |= extra.keys()
        own = {name: value for name, value in fields.items() if name in known}
        return own | ({"extra_body": extra | unknown} if extra | unknown else {})


def chat_fields(wishes: dict[str, Any]) -> dict[str, Any]:
    """The wishes in Chat Completions' words."""
    fields = dict(wishes)
    if "tools" in fields:
        fields["tools"] = [
            {"type": "function", "function": {"name": name, "description": says, "parameters": takes}}
            for name, says, takes in fields["tools"]
        ]
    if fields.get("tool_choice") not in (None, "required"):
        fields["tool_choice"] = {"type": "function", "function": {"name": fields["tool_choice"]}}
    if schema := fields.pop("schema", None):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return fields


def chat_answers(completion: Any) -> list[Answer]:
    """The choices of a chat completion."""
    answers = []
    for choice in completion.choices:
        message, calls = choice.message, choice.message.tool_calls or []
        seen = Seen(
            message.content or "",
            tuple((call.function.name, same(call.function.arguments)) for call in calls),
            choice.finish_reason,
            getattr(message, "reasoning_content", None) or "",
            _logprobs(choice),
        )
        answers.append(Answer(seen, [call.id for call in calls], message.model_dump()))
    return answers


def _logprobs(choice: Any) -> int:
    """For how many tokens a choice tells the logprob."""
    told = getattr(choice, "logprobs", None)
    return len(_get(told, "content") or ()) if told else 0


_CLIENTS: dict[type, Any] = {}


def client_of(kind: Any, base_url: str, key: str) -> Any:
    """A client. Those of a kind share their connections, since each would read all certificates again."""
    if kind not in _CLIENTS:
        _CLIENTS[kind] = kind(base_url=base_url, api_key=key)
    return _CLIENTS[kind].copy(base_url=base_url, api_key=key)


class _OpenAI(Player):
    sdk = "openai"

    def __init__(self, door: Door, mode: Mode, model: str) -> None:
        import openai

        super().__init__(door, mode, model)
        kind = openai.AsyncOpenAI if mode.asynchronous else openai.OpenAI
        self.client = client_of(kind, f"{door.url}/v1", door.key)


class _ChatHistory(Player):
    """Messages as in Chat Completions."""

    def system(self, text: str) -> None:
        self.history.append({"role": "system", "content": text})

    def developer(self, text: str) -> None:
        self.history.append({"role": "developer", "content": text})

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def image(self, text: str) -> None:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        self.history.append({"role": "user", "content": [{"type": "text", "text": text}, url]})

    def result(self, call_id: str, text: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": text})


class OpenAIChat(_ChatHistory, _OpenAI):
    """`openai`, Chat Completions."""

    dialect = "chat_completions"
    way = ""

    async def _asked(self, wishes: dict[str, Any], unknown: dict[str, Any]) -> list[Answer]:
        from openai.lib.streaming.chat import ChatCompletionStreamState

        create = self.client.chat.completions.create
        fields = self._fields(inspect.signature(create).parameters, chat_fields(wishes), unknown)
        fields |= {"model": self.model, "messages": self.history}
        if not self.mode.streamed:
            return chat_answers(await maybe(create(**fields)))
        state = ChatCompletionStreamState()
        async for chunk in each(await maybe(create(stream=True, **fields)), self.mode):
            state.handle_chunk(chunk)
        return chat_answers(state.current_completion_snapshot)  # the "final" one refuses cut answers


class _Prompt(Player):
    """A prompt that the author writes in the model's own markup."""

    dialect = "completions"
    prompt = ""
    ending = ""

    def system(self, text: str) -> None:
        self.prompt += f"<|im_start|>system\n{text}<|im_end|>\n"

    def user(self, text: str) -> None:
        self.prompt += f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    def _keep(self, answer: Answer) -> None:
        """A prompt repeats all that was sampled: what ended the answer too, which is not in its text."""
        self.prompt += answer.own + (f"{self.ending}<|im_end|>\n" if answer.seen.finish == "stop" else "")

    def _wishes(self, wishes: dict[str, Any]) -> dict[str, Any]:
        for name in ("tools", "schema"):
            if name in wishes:
                raise Lacking(name)
        self.ending = wishes["stop"][0] if "stop" in wishes else ""
        return wishes | ({"logprobs": 1} if wishes.get("logprobs") else {})


def text_answers(choices: Iterable[Any]) -> list[Answer]:
    """The choices of a completion, each maybe in pieces."""
    texts: dict[int, str] = {}
    finish: dict[int, str] = {}
    logprobs: dict[int, int] = {}
    for choice in choices:
        index = choice.index
        texts[index] = texts.get(index, "") + (choice.text or "")
        finish[index] = choice.finish_reason or finish.get(index, "")
        told = getattr(choice, "logprobs", None)
        told = told.get("tokens") if isinstance(told, dict) else getattr(told, "tokens", None)
        logprobs[index] = logprobs.get(index, 0) + len(told or ())
    return [Answer(Seen(texts[i], finish=finish[i], logprobs=logprobs[i]), [], texts[i]) for i in sorted(texts)]


class OpenAICompletions(_Prompt, _OpenAI):
    """`openai`, Completions."""

    way = ""

    async def _asked(self, wishes: dict[str, Any], unknown: dict[str, Any]) -> list[Answer]:
        create = self.client.completions.create
        fields = self._fields(inspect.signature(create).parameters, self._wishes(wishes), unknown)
        fields |= {"model": self.model, "prompt": self.prompt}
        if not self.mode.streamed:
            return text_answers((await maybe(create(**fields))).choices)
        chunks = [chunk async for chunk in each(await maybe(create(stream=True, **fields)), self.mode)]
        return text_answers(choice for chunk in chunks for choice in chunk.choices)


def responses_fields(wishes: dict[str, Any]) -> dict[str, Any]:
    """The wishes in the words of Responses."""
    fields = dict(wishes)
    fields["max_output_tokens"] = fields.pop("max_tokens")
    if "tools" in fields:
        fields["tools"] = [
            {"type": "function", "name": name, "description": says, "parameters": takes}
            for name, says, takes in fields["tools"]
        ]
    if fields.get("tool_choice") not in (None, "required"):
        fields["tool_choice"] = {"type": "function", "name": fields["tool_choice"]}
    if schema := fields.pop("schema", None):
        fields["text"] = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    if fields.pop("logprobs", None):
        fields["include"] = ["message.output_text.logprobs"]
    return fields


def response_answer(response: Any) -> Answer:
    """The answer in a response's items."""
    text, calls, ids, reasoning, logprobs = "", [], [], "", 0
    for item in response.output:
        if item.type == "message":
            text += "".join(part.text for part in item.content)
            logprobs += sum(len(getattr(part, "logprobs", None) or ()) for part in item.content)
        elif item.type == "function_call":
            calls.append((item.name, same(item.arguments)))
            ids.append(item.call_id)
        elif item.type == "reasoning":
            reasoning += "".join(_get(part, "text") for part in item.content or ())
    finish = "tool_calls" if calls else "stop"
    if response.status == "incomplete":
        reason = _get(response.incomplete_details, "reason")
        finish = {"max_output_tokens": "length"}.get(reason, reason)
    return Answer(Seen(text, tuple(calls), finish, reasoning, logprobs), ids, response)


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


class _Items(Player):
    """Input items, sent whole with every request."""

    dialect = "responses"
    instructions: str | None = None

    def system(self, text: str) -> None:
        self.instructions = text

    def developer(self, text: str) -> None:
        self.history.append({"role": "developer", "content": text})

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def image(self, text: str) -> None:
        url = {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{PIXEL}"}
        self.history.append({"role": "user", "content": [{"type": "input_text", "text": text}, url]})

    def result(self, call_id: str, text: str) -> None:
        self.history.append({"type": "function_call_output", "call_id": call_id, "output": text})

    def _keep(self, answer: Answer) -> None:
        self.history += answer.own.output

    def _continued(self) -> dict[str, Any]:
        instructed = {"instructions": self.instructions} if self.instructions else {}
        return {"model": self.model, "input": self.history} | instructed


async def last_response(stream: Any, mode: Mode) -> Any:
    """The response that a stream ends with."""
    response = None
    async for event in each(stream, mode):
        if event.type in ("response.completed", "response.incomplete"):
            response = event.response
    assert response is not None, "the stream ended without its response"
    return response


class OpenAIResponses(_Items, _OpenAI):
    """`openai`, Responses, with the history sent whole."""

    way = ""

    async def _asked(self, wishes: dict[str, Any], unknown: dict[str, Any]) -> list[Answer]:
        create = self.client.responses.create
        fields = self._fields(inspect.signature(create).parameters, responses_fields(wishes), unknown)
        fields |= self._continued()
        if not self.mode.streamed:
            return [response_answer(await maybe(create(**fields)))]
        return [response_answer(await last_response(await maybe(create(stream=True, **fields)), self.mode))]


class _Previous(_Items):
    """The service keeps the history: only what is new is sent."""

    previous: str | None = None

    def _keep(self, answer: Answer) -> None:
        self.previous = answer.own.id
        self.history = []

    def _continued(self) -> dict[str, Any]:
        return super()._continued() | ({"previous_response_id": self.previous} if self.previous else {})


class OpenAIPrevious(_Previous, OpenAIResponses):
    """`openai`, Responses, continued by id."""

    way = ", `previous_response_id`"


class Anthropic(Player):
    """`anthropic`, Messages."""

    sdk = "anthropic"
    dialect = "messages"
    way = ""

    def __init__(self, door: Door, mode: Mode, model: str) -> None:
        import anthropic

        super().__init__(door, mode, model)
        kind = anthropic.AsyncAnthropic if mode.asynchronous else anthropic.Anthropic
        self.client = client_of(kind, door.url, door.key)
        self.instructions: str | None = None

    def system(self, text: str) -> None:
        self.instructions = text

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def image(self, text: str) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        parts = [{"type": "text", "text": text}, {"type": "image", "source": source}]
        self.history.append({"role": "user", "content": parts})

    def result(self, call_id: str, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        last = self.history[-1]
        if last["role"] == "user" and isinstance(last["content"], list):
            last["content"].append(block)
        else:
            self.history.append({"role": "user", "content": [block]})

    def _keep(self, answer: Answer) -> None:
        self.history.append({"role": "assistant", "content": answer.own.content})

    async def _asked(self, wishes: dict[str, Any], unknown: dict[str, Any]) -> list[Answer]:
        messages = self.client.messages
        known = inspect.signature(messages.create).parameters
        fields = self._fields(known, self._words(wishes), unknown) | {"model": self.model, "messages": self.history}
        if self.instructions:
            fields["system"] = self.instructions
        if not self.mode.streamed:
            return [self._answer(await maybe(messages.create(**fields)))]
        manager = messages.stream(**fields)
        if self.mode.asynchronous:
            async with manager as stream:
                return [self._answer(await stream.get_final_message())]
        with manager as stream:
            return [self._answer(stream.get_final_message())]

    def _words(self, wishes: dict[str, Any]) -> dict[str, Any]:
        fields = dict(wishes)
        if "tools" in fields:
            fields["tools"] = [
                {"name": name, "description": says, "input_schema": takes} for name, says, takes in fields["tools"]
            ]
        choice = fields.pop("tool_choice", None)
        if choice is not None:
            fields["tool_choice"] = {"type": "any"} if choice == "required" else {"type": "tool", "name": choice}
        if fields.pop("parallel_tool_calls", None) is False:
            fields["tool_choice"] = fields.get("tool_choice", {"type": "auto"}) | {"disable_parallel_tool_use": True}
        if "stop" in fields:
            fields["stop_sequences"] = fields.pop("stop")
        if schema := fields.pop("schema", None):
            fields["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        return fields

    def _answer(self, message: Any) -> Answer:
        uses = [block for block in message.content if block.type == "tool_use"]
        finish = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        seen = Seen(
            "".join(block.text for block in message.content if block.type == "text"),
            tuple((use.name, same(use.input)) for use in uses),
            finish[message.stop_reason],
            "".join(block.thinking for block in message.content if block.type == "thinking"),
        )
        return Answer(seen, [use.id for use in uses], message)


def litellm() -> Any:
    """The package, made quiet."""
    import litellm

    litellm.suppress_debug_info = True
    litellm.disable_aiohttp_transport = True  # whose sessions nobody closes
    return litellm


# Without the package mcp, which litellm does not ask for, calls with tools need this.
_NO_MCP = {"_skip_mcp_handler": True}


class _LiteLLM(_ChatHistory):
    """`litellm.completion`, which speaks the dialect of the provider that the model's name begins with."""

    sdk = "litellm"
    provider: ClassVar[str]

    async def _asked(self, wishes: dict[str, Any], unknown: dict[str, Any]) -> list[Answer]:
        known = litellm().get_supported_openai_params(model=self.model, custom_llm_provider=self.provider) or []
        create: Any = litellm().acompletion if self.mode.asynchronous else litellm().completion
        fields = self._fields(known, chat_fields(wishes), unknown)
        fields |= {"model": f"{self.provider}/{self.model}", "messages": self.history}
        fields |= {"api_base": self._base(), "api_key": self.door.key} | _NO_MCP
        if not self.mode.streamed:
            return chat_answers(await maybe(create(**fields)))
        chunks = [chunk async for chunk in each(await maybe(create(stream=True, **fields)), self.mode)]
        answers = []
        for index in range(wishes.get("n", 1)):
            own = [chunk for chunk in chunks if any(choice.index == index for choice in chunk.choices)]
            if not own:
                continue
            [answer] = chat_answers(litellm().stream_chunk_builder(own))
            logprobs = sum(_logprobs(choice) for chunk in own for choice in chunk.choices)  # the builder drops them
            answers.append(answer._replace(seen=answer.seen._replace(logprobs=logprobs)))
        return answers

    def _base(self) -> str:
        return f"{self.door.url}/v1"


class LiteLLMChat(_LiteLLM):
    """`litellm` to an OpenAI-compatible service."""

    dialect = "chat_completions"
    provider = "openai"
    way = ", `openai/`"


class LiteLLMMessages(_LiteLLM):
    """`litellm` to an Anthropic-compatible service."""

    dialect = "messages"
    provider = "anthropic"
    way = ", `anthropic/`"

    def _base(self) -> str:
        return self.door.url

    def _fields(self, known: Iterable[str], fields: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
        """Arguments that litellm does not know are fields of the request; of an `extra_body` it would make a field."""
        if "response_format" in fields:
            raise Lacking("a schema: litellm asks for a tool instead, which is another request")
        self.extra |= {name for name in fields if name not in set(known)}
        return fields | unknown


class LiteLLMCompletions(_Prompt):
    """`litellm.text_completion`."""

    sdk = "litellm"
    way = ""

    async def _asked(self, wishes: dict[str, Any], unknown: dict[str, Any]) -> list[Answer]:
        provider = "text-completion-openai"
        known = litellm().get_supported_openai_params(model=self.model, custom_llm_provider=provider) or []
        create: Any = litellm().atext_completion if self.mode.asynchronous else litellm().text_completion
        fields = self._fields(known, self._wishes(wishes), unknown)
        fields |= {"model": f"{provider}/{self.model}", "prompt": self.prompt}
        fields |= {"api_base": f"{self.door.url}/v1", "api_key": self.door.key} | _NO_MCP
        if not self.mode.streamed:
            return text_answers((await maybe(create(**fields))).choices)
        chunks = [chunk async for chunk in each(await maybe(create(stream=True, **fields)), self.mode)]
        answers = text_answers(choice for chunk in chunks for choice in chunk.choices)
        if "logprobs" in wishes and not any(answer.seen.logprobs for answer in answers):
            raise Lacking("logprobs in streams: the SDK drops them")
        return answers


class LiteLLMResponses(_Items):
    """`litellm.responses`, with the history sent whole."""

    sdk = "litellm"
    way = ""

    async def _asked(self, wishes: dict[str, Any], unknown: dict[str, Any]) -> list[Answer]:
        create: Any = litellm().aresponses if self.mode.asynchronous else litellm().responses
        known = inspect.signature(litellm().responses).parameters
        fields = self._fields(known, responses_fields(wishes), unknown) | self._continued()
        fields |= {
            "model": f"openai/{self.model}",
            "api_base": f"{self.door.url}/v1",
            "api_key": self.door.key,
        } | _NO_MCP
        if not self.mode.streamed:
            return [response_answer(await maybe(create(**fields)))]
        return [response_answer(await last_response(await maybe(create(stream=True, **fields)), self.mode))]


class LiteLLMPrevious(_Previous, LiteLLMResponses):
    """`litellm.responses`, continued by id."""

    way = ", `previous_response_id`"


PLAYERS: dict[str, type[Player]] = {
    "openai-chat": OpenAIChat,
    "litellm-chat": LiteLLMChat,
    "openai-responses": OpenAIResponses,
    "openai-previous": OpenAIPrevious,
    "litellm-responses": LiteLLMResponses,
    "litellm-previous": LiteLLMPrevious,
    "anthropic-messages": Anthropic,
    "litellm-messages": LiteLLMMessages,
    "openai-completions": OpenAICompletions,
    "litellm-completions": LiteLLMCompletions,
}


class Conversation(NamedTuple):
    """A feature as a conversation: what the model says, in order, and what the author must see of each answer.

    `parents`: for each call, the number of the call that it continues. `refused`: words of the error that is the right
    answer, and `status` its status. `abilities`: what the engine must honour for it. `wished`: the sampling parameters
    that must be recorded as requested.
    """

    title: str
    play: Callable[[Player], Awaitable[Any]]
    said: list[str]
    seen: Sequence[Seen] = ()
    parents: Sequence[int | None] = ()
    refused: tuple[str, ...] = ()
    status: int = 400
    model: str = "policy"
    abilities: tuple[str, ...] = ()
    wished: Mapping[str, Any] = {"max_tokens": 64}


def tool_call(name: str, what: str) -> str:
    """A call in the scripted model's markup."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"what": "{what}"}}}}\n</tool_call>'


def called(*calls: tuple[str, str], text: str = "") -> Seen:
    """An answer of calls: name, and what for."""
    return Seen(text, tuple((name, same({"what": what})) for name, what in calls), "tool_calls")


def begin(player: Player) -> None:
    """The first words of most conversations."""
    player.system("You count animals.")
    player.user("How many cats are there?")


async def talk(player: Player, **wishes: Any) -> None:
    begin(player)
    await player.ask(**wishes)
    player.user("And dogs?")
    await player.ask(**wishes)


async def reasoning(player: Player) -> None:
    if player.dialect == "completions":
        raise Lacking("reasoning, which is text there")
    await talk(player)


async def developer(player: Player) -> None:
    player.developer("You count animals.")
    player.user("How many cats are there?")
    await player.ask()


async def tools(player: Player) -> None:
    begin(player)
    asked = await player.ask(tools=[LOOK_UP])
    player.result(asked.call_ids[0], "three")
    await player.ask(tools=[LOOK_UP])
    player.user("And dogs?")
    await player.ask(tools=[LOOK_UP])


async def parallel(player: Player) -> None:
    begin(player)
    asked = await player.ask(tools=[LOOK_UP, COUNT])
    for call_id, text in zip(asked.call_ids, ("three", "four"), strict=True):
        player.result(call_id, text)
    await player.ask(tools=[LOOK_UP, COUNT])


async def one_call(player: Player) -> None:
    begin(player)
    asked = await player.ask(tools=[LOOK_UP, COUNT], parallel_tool_calls=False)
    player.result(asked.call_ids[0], "three")
    await player.ask(tools=[LOOK_UP, COUNT], parallel_tool_calls=False)


async def forced(player: Player, choice: str) -> None:
    begin(player)
    asked = await player.ask(tools=[LOOK_UP, COUNT], tool_choice=choice)
    player.result(asked.call_ids[0], "three")
    await player.ask(tools=[LOOK_UP, COUNT])


async def choices(player: Player) -> None:
    begin(player)
    await player.ask(n=3, keep=1)
    player.user("And dogs?")
    await player.ask()


async def image(player: Player) -> None:
    player.image("What is this?")
    await player.ask()


async def once(player: Player, **wishes: Any) -> None:
    begin(player)
    await player.ask(**wishes)


def wishing(play: Callable[..., Awaitable[Any]], *args: Any, **wishes: Any) -> Callable[[Player], Awaitable[Any]]:
    """A conversation with some wishes more."""
    return lambda player: play(player, *args, **wishes)


_TWO_SAID, _TWO_SEEN = ["Three.", "Four."], [Seen("Three."), Seen("Four.")]
_FOREIGN = {"model": "gpt-4o"}
CONVERSATIONS: dict[str, Conversation] = {
    "talk": Conversation("system prompt, several turns", talk, _TWO_SAID, _TWO_SEEN, [None, 0]),
    "developer": Conversation("developer role", developer, ["Three."], [Seen("Three.")], [None]),
    "tools": Conversation(
        "tool call, result, more turns",
        tools,
        [tool_call("look_up", "cats"), "Three.", "Four."],
        [called(("look_up", "cats")), Seen("Three."), Seen("Four.")],
        [None, 0, 1],
    ),
    "parallel": Conversation(
        "parallel tool calls",
        parallel,
        [f"Let me see.\n{tool_call('look_up', 'cats')}\n{tool_call('count', 'dogs')}", "Seven."],
        [called(("look_up", "cats"), ("count", "dogs"), text="Let me see."), Seen("Seven.")],
        [None, 0],
    ),
    "one_call": Conversation(
        "one tool call at a time",
        one_call,
        [f"{tool_call('look_up', 'cats')}\n{tool_call('count', 'dogs')}", "Seven."],
        [called(("look_up", "cats")), Seen("Seven.")],
        [None, 0],
    ),
    "forced": Conversation(
        "forced: any tool",
        wishing(forced, "required"),
        ['count", "arguments": {"what": "cats"}}\n</tool_call>', "Seven."],
        [called(("count", "cats")), Seen("Seven.")],
        [None, 0],
    ),
    "forced_named": Conversation(
        "forced: this tool",
        wishing(forced, "count"),
        ['{"what": "cats"}}\n</tool_call>', "Seven."],
        [called(("count", "cats")), Seen("Seven.")],
        [None, 0],
    ),
    "choices": Conversation(
        "n > 1, any choice continued",
        choices,
        ["One.", "Two.", "Three.", "Four."],
        [Seen("One."), Seen("Two."), Seen("Three."), Seen("Four.")],
        [None, None, None, 1],
    ),
    "stop": Conversation(
        "stop strings",
        wishing(talk, stop=["; and"]),
        ["Three; and a lot that nobody asked for", "Four."],
        [Seen("Three"), Seen("Four.")],
        [None, 0],
        wished={"stop": ["; and"]},
    ),
    "length": Conversation(
        "cut by max tokens",
        wishing(talk, max_tokens=20),
        ["There are three...", "Four."],
        [Seen("There are three...", finish="length"), Seen("Four.")],
        [None, 0],
        wished={"max_tokens": 20},
    ),
    "seed": Conversation("seed", wishing(talk, seed=42), _TWO_SAID, _TWO_SEEN, [None, 0], wished={"seed": 42}),
    "logprobs": Conversation(
        "logprobs of the sampled tokens",
        wishing(once, logprobs=True),
        ["Three."],
        [Seen("Three.", logprobs=-1)],
        [None],
    ),
    "reasoning": Conversation(
        "reasoning, sent back",
        reasoning,
        ["<think>\nI count.\n</think>\n\nThree.", "Four."],
        [Seen("Three.", reasoning="I count."), Seen("Four.")],
        [None, 0],
    ),
    "image": Conversation("image, on a text model", image, ["Three."], refused=("image", "this model takes text")),
    "schema": Conversation(
        "JSON schema, where the engine can",
        wishing(once, schema=SCHEMA),
        ['{"n": 3}'],
        [Seen('{"n": 3}')],
        [None],
        abilities=("json_schema",),
        wished={"json_schema": SCHEMA},
    ),
    "schema_lacking": Conversation(
        "JSON schema, where it cannot",
        wishing(once, schema=SCHEMA),
        ['{"n": 3}'],
        refused=("not supported by the engine",),
    ),
    "gpt": Conversation("asks for `gpt-4o`", talk, _TWO_SAID, _TWO_SEEN, [None, 0], model="gpt-4o"),
    "claude": Conversation(
        "asks for `claude-sonnet-4-5`", talk, _TWO_SAID, _TWO_SEEN, [None, 0], model="claude-sonnet-4-5"
    ),
    "unknown": Conversation(
        "an unknown field, recorded",
        wishing(once, unknown={"made_up": 1}),
        ["Three."],
        [Seen("Three.")],
        [None],
    ),
    "closed": Conversation("closed attempt, asked once", once, [], refused=("is closed",), status=409),
    "too_long": Conversation("prompt too long, in the client's words", once, [], refused=()),
}


class Played(NamedTuple):
    """What came of a conversation: the answers seen, or the error that the SDK raised, or what the API lacks.

    `extra` names what the SDK has no parameter for.
    """

    seen: Sequence[Seen] = ()
    error: dict[str, Any] | None = None
    lacks: str | None = None
    extra: Sequence[str] = ()


_LOOP: list[asyncio.Runner] = []


def play(player: str, mode: Mode, conversation: str, door: Door) -> Played:
    """Play a conversation to its end or its first error."""
    work = _play(player, mode, conversation, door)
    if not mode.asynchronous:
        try:
            work.send(None)  # plain clients never wait
        except StopIteration as ended:
            played: Played = ended.value
            return played
        raise RuntimeError(f"{player} waited, although its client is a plain one")
    if not _LOOP:
        _LOOP.append(asyncio.Runner())  # one for all: litellm keeps its clients
    return _LOOP[0].run(work)


async def _play(name: str, mode: Mode, conversation: str, door: Door) -> Played:
    player = PLAYERS[name](door, mode, CONVERSATIONS[conversation].model)
    errors = _errors(player.sdk)
    try:
        await CONVERSATIONS[conversation].play(player)
    except Lacking as lacking:
        return Played(lacks=str(lacking))
    except errors as error:
        return Played(player.seen, _described(error), None, sorted(player.extra))
    return Played(player.seen, None, None, sorted(player.extra))


def _errors(sdk: str) -> tuple[type[Exception], ...]:
    if sdk == "anthropic":
        import anthropic

        return (anthropic.APIError,)
    import openai

    return (openai.APIError,)  # litellm's errors are of these


def _described(error: Any) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "status": getattr(error, "status_code", None),
        "code": getattr(error, "code", None),
        "param": getattr(error, "param", None),
        "message": str(error),
    }


def version(player: str) -> str:
    """The version of a player's SDK."""
    return importlib.metadata.version(PLAYERS[player].sdk)


def main() -> None:
    """Play what each line of input asks for: `[player, asynchronous, streamed, conversation, url, key]`.

    A line with nothing but a player asks for the version of its SDK.
    """
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            player, *asked = json.loads(line)
            told: Any = version(player)
            if asked:
                asynchronous, streamed, conversation, url, key = asked
                told = play(player, Mode(asynchronous, streamed), conversation, Door(url, key))
            out.write(json.dumps(told) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
