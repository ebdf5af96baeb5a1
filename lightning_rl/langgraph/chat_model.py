"""`ChatModel`: LangChain's chat model for OpenAI, whose endpoint is found anew for each call.

Messages, streams, tools and errors are those of `langchain_openai`. What is ours: within a rollout a call goes to its
gateway, and within a graph through the door of its node; a message goes out as it came in, with its reasoning, so that
the gateway finds the call that it continues (`wire.py`).
"""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Self

import openai
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ensure_config
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import Field, SecretStr, model_validator

from lightning_rl.agents.clients import async_openai_client, openai_client
from lightning_rl.agents.resources import LLM
from lightning_rl.langgraph.endpoint import endpoint_of, node_of, tagged
from lightning_rl.langgraph.wire import REASONING, to_wire

_FIELDS = frozenset(inspect.signature(openai.resources.chat.completions.Completions.create).parameters)
_CHOICES = ("any", "auto", "none", "required")
# Fields of the base class that clients shared by all models, or Chat Completions, have no place for.
_WITHOUT_EFFECT = ("openai_proxy", "http_socket_options", "use_responses_api", "use_previous_response_id")


class ChatModel(BaseChatOpenAI):
    """A chat model that asks the rollout's `llm` while one runs, and elsewhere what its fields name.

    Fields that are None are not sent; any may be given per call or per node: `model.bind(temperature=0.2)`. Other
    parameters of a request go the same way, `top_k` and the like in its body. Without `model`, `base_url` or `api_key`,
    OPENAI_MODEL, OPENAI_BASE_URL and OPENAI_API_KEY are taken outside of rollouts.
    """

    model_name: str | None = Field(default=None, alias="model")  # type: ignore[assignment]
    openai_api_key: SecretStr | None = Field(default=None, alias="api_key")
    max_retries: int | None = 2
    stream_usage: bool | None = True
    stream_chunk_timeout: float | None = None  # a call that waits for new weights has no chunks, and goes on after
    openai_proxy: str | None = None

    @classmethod
    def of(cls, llm: LLM, **fields: Any) -> "ChatModel":
        """The model behind `llm`, an agent's argument; `fields` are those of the class."""
        return cls(model=llm.model, base_url=llm.base_url, api_key=SecretStr(llm.api_key), **fields)

    @property
    def base_url(self) -> str | None:
        """The endpoint, where the model has one of its own."""
        return self.openai_api_base

    @property
    def api_key(self) -> SecretStr | None:
        """The endpoint's key, where the model has one of its own."""
        return self.openai_api_key

    @property
    def timeout(self) -> Any:
        """Seconds for one request; None: those of the `openai` SDK."""
        return self.request_timeout

    @property
    def _llm_type(self) -> str:
        return "lightning-rl"

    def get_num_tokens(self, text: str) -> int:
        """About as many as the text has: which tokenizer the model has is not known here."""
        return count_tokens_approximately([text])

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None, **_: Any
    ) -> int:
        """About as many as the messages have, so that `trim_messages(..., token_counter=model)` can cut a history."""
        return count_tokens_approximately(messages, tools=None if tools is None else list(tools))

    @model_validator(mode="before")
    @classmethod
    def validate_temperature(cls, values: dict[str, Any]) -> Any:
        """Leave the temperature as it is: in training a model of any name is the policy."""
        return values

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        """Make no client yet: the endpoint is known when a call begins. Raises ValueError for a field of no effect."""
        for name in _WITHOUT_EFFECT:
            if getattr(self, name):
                raise ValueError(f"{name} has no effect in ChatModel; use http_client, or langchain_openai.ChatOpenAI")
        return self

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools. `tool_choice`: auto, none, any (or required, or True), or the name of one of them."""
        if isinstance(tool_choice, str) and tool_choice not in _CHOICES:
            sent = [convert_to_openai_tool(tool) for tool in tools]
            names = [tool["function"]["name"] for tool in sent if "function" in tool]
            if tool_choice not in names:
                raise ValueError(
                    f"tool_choice names {tool_choice!r}, but the tools are {names}; it may be auto, none and any too"
                )
        return super().bind_tools(tools, tool_choice=tool_choice, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return BaseChatOpenAI._generate(self._with_client(run_manager), messages, stop, run_manager, **kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        located = self._with_async_client(run_manager)
        return await BaseChatOpenAI._agenerate(located, messages, stop, run_manager, **kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        yield from BaseChatOpenAI._stream(self._with_client(run_manager), messages, stop, run_manager, **kwargs)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        located = self._with_async_client(run_manager)
        async for chunk in BaseChatOpenAI._astream(located, messages, stop, run_manager, **kwargs):
            yield chunk

    def _with_client(self, run_manager: CallbackManagerForLLMRun | None) -> Self:
        """The model with the name and the client of one call."""
        model, options = self._endpoint(run_manager, self.http_client)
        client = openai_client().with_options(**options)
        return self.model_copy(update={"model_name": model, "root_client": client, "client": client.chat.completions})

    def _with_async_client(self, run_manager: AsyncCallbackManagerForLLMRun | None) -> Self:
        model, options = self._endpoint(run_manager, self.http_async_client)
        client = async_openai_client().with_options(**options)
        return self.model_copy(
            update={"model_name": model, "root_async_client": client, "async_client": client.chat.completions}
        )

    def _endpoint(
        self, run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None, http_client: Any
    ) -> tuple[str, dict[str, Any]]:
        """The model that is asked for, and the options of a client."""
        key = None if self.openai_api_key is None else self.openai_api_key.get_secret_value()
        where = endpoint_of(self.model_name, self.openai_api_base, key)
        # `stream` and `astream` of the base class give no run manager; what runs around the call has the same metadata.
        metadata = ensure_config().get("metadata") if run_manager is None else run_manager.metadata
        options = {
            "base_url": tagged(where.base_url, node_of(metadata or {})),
            "api_key": where.api_key,
            "max_retries": self.max_retries,
            "timeout": self.request_timeout,
            "organization": self.openai_organization,
            "default_headers": self.default_headers,
            "default_query": self.default_query,
            "http_client": http_client,
        }
        return where.model, {name: value for name, value in options.items() if value is not None}

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        fields = {**self._default_params, **kwargs} | ({} if stop is None else {"stop": stop})
        if fields["stream"] and (fields.get("n") or 1) > 1:
            raise ValueError(f"n={fields['n']}: a stream has one answer; call `generate`, or ask several times")
        body = {**(self.extra_body or {}), **(fields.pop("extra_body", None) or {})}
        body |= {name: fields.pop(name) for name in list(fields) if name not in _FIELDS}
        if not fields["stream"] and "response_format" not in fields:  # with which the base class takes it out itself
            fields["stream"] = None
        payload = {name: value for name, value in fields.items() if value is not None}
        messages = to_wire(self._convert_input(input_).to_messages())
        return payload | {"messages": messages} | ({"extra_body": body} if body else {})

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        answer: Any = response if isinstance(response, dict) else response.model_dump(warnings=False)
        for index, (choice, generation) in enumerate(zip(answer["choices"], result.generations, strict=True)):
            message = generation.message
            assert isinstance(message, AIMessage)
            _add_reasoning(message, choice["message"])
            generation.generation_info = {
                **(generation.generation_info or {}),
                "finish_reason": choice["finish_reason"],
            }
            # Of several choices only the first may have it: messages of one id replace each other in a graph's state,
            # and the tokens would be counted for each.
            message.id = answer["id"] if index == 0 else None
            message.usage_metadata = message.usage_metadata if index == 0 else None
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        generation = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        answer = chunk.get("chunk") or chunk  # of a stream with `response_format` it is an event
        if generation is not None and isinstance(generation.message, AIMessage) and answer.get("id"):
            generation.message.id = answer["id"]
            for choice in answer["choices"]:
                _add_reasoning(generation.message, choice["delta"] or {})
        return generation


def _add_reasoning(message: AIMessage, answered: dict[str, Any]) -> None:
    message.additional_kwargs = {name: value for name, value in message.additional_kwargs.items() if value is not None}
    if answered.get(REASONING):
        message.additional_kwargs[REASONING] = answered[REASONING]
