"""`ChatModel`: a LangChain chat model over Chat Completions, of the gateway or of any service that speaks it.

Within a graph each call carries its node's name as the calling agent, through the door of that name. Errors are those
of the `openai` SDK, as with LangChain's own `ChatOpenAI`; a prompt that is too long is `ContextOverflowError` too.
"""

import asyncio
import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import openai
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import SecretStr

from lightning_rl.agents.resources import LLM
from lightning_rl.langgraph.endpoint import Endpoint, endpoint_of, node_of, tagged
from lightning_rl.langgraph.wire import chunk_from_wire, from_wire, to_wire

_FIELDS = frozenset(inspect.signature(openai.resources.chat.completions.Completions.create).parameters)
_CHOICES = {"any": "required", True: "required", "auto": "auto", "none": "none", "required": "required"}


class PromptTooLong(openai.BadRequestError, ContextOverflowError):
    """The prompt does not fit the model's context."""


class ChatModel(BaseChatModel):
    """A chat model that asks the rollout's `llm` while one runs, and elsewhere what its fields name.

    Fields that are None are not sent; any may be given per call or per node: `model.bind(temperature=0.2)`. Other
    parameters of a request go the same way, `top_k` and the like in its body. Without `model`, `base_url` or `api_key`,
    OPENAI_MODEL, OPENAI_BASE_URL and OPENAI_API_KEY are taken outside of rollouts.
    """

    model: str | None = None
    base_url: str | None = None
    api_key: SecretStr | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    timeout: float | None = None
    max_retries: int = 2
    extra_body: dict[str, Any] | None = None
    streaming: bool = False

    @classmethod
    def of(cls, llm: LLM, **fields: Any) -> "ChatModel":
        """The model behind `llm`, an agent's argument; `fields` are those of the class."""
        return cls(model=llm.model, base_url=llm.base_url, api_key=SecretStr(llm.api_key), **fields)

    @property
    def _llm_type(self) -> str:
        return "lightning-rl"

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools. `tool_choice`: auto, none, any (or required, or True), or the name of one of them."""
        strict = kwargs.pop("strict", None)
        sent = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if tool_choice:
            known = [tool["function"]["name"] for tool in sent if "function" in tool]
            kwargs["tool_choice"] = _tool_choice(tool_choice, known)
        return super().bind(tools=sent, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        where = self._endpoint(run_manager)
        client = _client().with_options(**self._options(where))
        with _explained():
            answer = client.chat.completions.create(**self._request(where, messages, stop, kwargs))
        return _result(answer)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        where = self._endpoint(run_manager)
        client = _async_client().with_options(**self._options(where))
        with _explained():
            answer = await client.chat.completions.create(**self._request(where, messages, stop, kwargs))
        return _result(answer)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        where = self._endpoint(run_manager)
        client = _client().with_options(**self._options(where))
        with _explained(), client.chat.completions.create(**self._streamed(where, messages, stop, kwargs)) as parts:
            for part in parts:
                if (chunk := _chunk(part)) is not None:
                    if run_manager is not None:
                        run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        where = self._endpoint(run_manager)
        client = _async_client().with_options(**self._options(where))
        with _explained():
            async with await client.chat.completions.create(**self._streamed(where, messages, stop, kwargs)) as parts:
                async for part in parts:
                    if (chunk := _chunk(part)) is not None:
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                        yield chunk

    def _endpoint(self, run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> Endpoint:
        key = None if self.api_key is None else self.api_key.get_secret_value()
        where = endpoint_of(self.model, self.base_url, key)
        metadata = {} if run_manager is None else run_manager.metadata
        return where._replace(base_url=tagged(where.base_url, node_of(metadata)))

    def _options(self, where: Endpoint) -> dict[str, Any]:
        timeout = {} if self.timeout is None else {"timeout": self.timeout}
        return {"base_url": where.base_url, "api_key": where.api_key, "max_retries": self.max_retries} | timeout

    def _request(
        self, where: Endpoint, messages: Sequence[BaseMessage], stop: list[str] | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "seed", "stop")}
        wished = {"model": where.model} | own | dict(given) | ({} if stop is None else {"stop": stop})
        body = (self.extra_body or {}) | (wished.pop("extra_body", None) or {})
        body |= {name: wished.pop(name) for name in list(wished) if name not in _FIELDS}
        request = {name: value for name, value in wished.items() if value is not None}
        return request | {"messages": to_wire(messages)} | ({"extra_body": body} if body else {})

    def _streamed(
        self, where: Endpoint, messages: Sequence[BaseMessage], stop: list[str] | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        request = self._request(where, messages, stop, given)
        if request.get("n", 1) > 1:
            raise ValueError(f"n={request['n']}: a stream has one answer; call `generate`, or ask several times")
        return {"stream_options": {"include_usage": True}} | request | {"stream": True}


def _tool_choice(choice: str | bool | dict[str, Any], known: list[str]) -> Any:
    if isinstance(choice, dict):
        return choice
    if choice in known:  # a tool may be called "any"
        return {"type": "function", "function": {"name": choice}}
    if choice in _CHOICES:
        return _CHOICES[choice]
    raise ValueError(f"tool_choice names {choice!r}, but the tools are {known}; it may be auto, none and any too")


def _result(answer: Any) -> ChatResult:
    told = answer.model_dump()
    choices = enumerate(told["choices"])
    generations = [
        ChatGeneration(message=from_wire(told, index), generation_info={"finish_reason": choice["finish_reason"]})
        for index, choice in choices
    ]
    return ChatResult(
        generations=generations, llm_output={"token_usage": told.get("usage"), "model_name": told["model"]}
    )


def _chunk(part: Any) -> ChatGenerationChunk | None:
    message = chunk_from_wire(part.model_dump())
    return None if message is None else ChatGenerationChunk(message=message)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except openai.BadRequestError as error:
        if error.code == "context_length_exceeded":
            raise PromptTooLong(error.message, response=error.response, body=error.body) from error
        raise


# Making a client costs more than a call, so they are shared; URL, key and the like come with each use.


@functools.cache
def _client() -> openai.OpenAI:
    return openai.OpenAI(base_url="http://unused.invalid/v1", api_key="unused")


_async_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, openai.AsyncOpenAI]" = weakref.WeakKeyDictionary()


def _async_client() -> openai.AsyncOpenAI:
    """The event loop's own: connections belong to the loop that opened them."""
    loop = asyncio.get_running_loop()
    if loop not in _async_clients:
        _async_clients[loop] = openai.AsyncOpenAI(base_url="http://unused.invalid/v1", api_key="unused")
    return _async_clients[loop]
