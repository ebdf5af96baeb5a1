"""Frozen chat models: messages in, messages out, through whatever service has them. Never trained.

A request goes on as the agent wrote it and its answer comes back as the service gave it; what the service tells of
tokens is kept beside the answer. A backend asks for one choice at a time.
"""

import asyncio
import importlib.util
import os
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import aiohttp
import msgspec

from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable

# vLLM's and SGLang's field for the ids of prompt and answer; logprobs are OpenAI's own.
_ASKED_FOR_TOKENS = {"return_token_ids": True, "logprobs": True}
_KEPT_STATUS = frozenset({400, 401, 403, 404, 422})
_CONNECT_SECONDS = 10
_CONNECTIONS = 1024
# The fields of an agent's request that may reach litellm: its other arguments (api_base, mock_response, ...) say where
# a request goes and with which key, which is not the agent's to say.
_LITELLM_FIELDS = frozenset(
    {
        "messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "temperature", "top_p",
        "top_k", "max_tokens", "max_completion_tokens", "stop", "seed", "presence_penalty", "frequency_penalty",
        "logit_bias", "logprobs", "top_logprobs", "response_format", "reasoning_effort", "thinking", "verbosity",
        "modalities", "audio", "prediction", "user", "service_tier", "store", "web_search_options", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier",
    }
)  # fmt: skip

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. `body` is the service's answer as the agent gets it; ids and logprobs are None where none were told.

    `logprobs` are natural logs, one per response id. `ignored_fields` of the request were not handed on.
    """

    body: dict[str, Any]
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    logprobs: list[float] | None = None
    ignored_fields: list[str] = []


class ChatBackend(Protocol):
    """A chat model behind the gateway."""

    model: str

    async def complete(self, body: dict[str, Any]) -> ChatAnswer:
        """The answer to a chat request without `n` and `stream`. Raises EngineUnavailable or EngineRefused."""
        ...

    async def embed(self, body: dict[str, Any]) -> bytes:
        """The answer to an embeddings request, as the service gave it. Raises as `complete` does."""
        ...

    async def close(self) -> None:
        """Free the connections."""
        ...


class OpenAIBackend:
    """An OpenAI-compatible service; `url` is its base URL, to which `/chat/completions` is added.

    It is asked for token ids and logprobs until it refuses, or answers without ids.
    """

    def __init__(self, model: str, url: str, api_key: str | None = None, remote_model: str | None = None) -> None:
        self.model = model
        self.url = url.rstrip("/")
        self.remote_model = remote_model or model
        self._api_key = api_key
        self._asks_for_tokens = True
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, body: dict[str, Any]) -> ChatAnswer:
        """See `ChatBackend`."""
        plain = body | {"model": self.remote_model}
        if not self._asks_for_tokens:
            return _told(await self._post(plain), body)
        try:
            answer = _told(await self._post(plain | _ASKED_FOR_TOKENS), body)
        except EngineRefused as refused:
            if refused.status not in (400, 422):
                raise
            answer = _told(await self._post(plain), body)  # where this is refused too, it was not for what we added
            self._asks_for_tokens = False
        else:
            self._asks_for_tokens = answer.response_ids is not None
        return answer

    async def embed(self, body: dict[str, Any]) -> bytes:
        """See `ChatBackend`."""
        return await self._send("embeddings", body | {"model": self.remote_model})

    async def close(self) -> None:
        """See `ChatBackend`."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        raw = await self._send("chat/completions", body)
        return _chat_completion(f"the service at {self.url}", _decoded(raw))

    async def _send(self, path: str, body: dict[str, Any]) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                headers={"content-type": "application/json"}
                | ({"authorization": f"Bearer {self._api_key}"} if self._api_key else {}),
            )
        service = f"the service at {self.url}"
        try:
            async with self._session.post(
                f"{self.url}/{path}", data=msgspec.json.encode(body), allow_redirects=False
            ) as response:
                raw = await response.read()
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{service} cannot be reached: {error!r}") from error
        if response.status != 200:
            said = _without(self._api_key, _message_of(raw))
            raise _failure(f"{service}, asked for {self.remote_model!r},", response.status, said, response.headers)
        return raw


class LitellmBackend:
    """A model that litellm reaches, by litellm's name for it (`anthropic/...`). Tells of no tokens."""

    def __init__(self, model: str, litellm_model: str, api_base: str | None = None, api_key: str | None = None) -> None:
        if importlib.util.find_spec("litellm") is None:
            raise ModuleNotFoundError(
                f"model {model!r} needs litellm, which is not installed here: pip install 'lightning-rl[litellm]'"
            )
        self.model = model
        self.litellm_model = litellm_model
        self._service = f"litellm's {litellm_model}{f' at {api_base}' if api_base else ''}"
        self._api_base = api_base
        self._api_key = api_key

    async def complete(self, body: dict[str, Any]) -> ChatAnswer:
        """See `ChatBackend`."""
        fields = {name: value for name, value in body.items() if name in _LITELLM_FIELDS and value is not None}
        # Tools are the agent's; without the second flag they need the package mcp.
        answer = await self._ask("acompletion", fields | {"no-log": True, "_skip_mcp_handler": True})
        ignored = [name for name in body if name not in _LITELLM_FIELDS and name != "model"]
        told = _chat_completion(self._service, answer.model_dump(mode="json"))
        return ChatAnswer(body=told, ignored_fields=ignored)

    async def embed(self, body: dict[str, Any]) -> bytes:
        """See `ChatBackend`."""
        fields = {name: body[name] for name in ("input", "dimensions", "encoding_format") if body.get(name) is not None}
        answer = await self._ask("aembedding", fields)
        return msgspec.json.encode(answer.model_dump(mode="json"))

    async def _ask(self, function: str, fields: dict[str, Any]) -> Any:
        litellm = await asyncio.to_thread(_litellm)  # its import takes seconds
        import openai  # litellm's errors are kinds of openai's

        try:
            return await getattr(litellm, function)(
                model=self.litellm_model,
                api_base=self._api_base,
                api_key=self._api_key,
                num_retries=0,  # the agent's SDK retries
                **fields,
            )
        except openai.OpenAIError as error:
            said = _without(self._api_key, str(error))
            raise _failure(self._service, getattr(error, "status_code", 500), said, {}) from error

    async def close(self) -> None:
        """See `ChatBackend`: litellm's clients are the process's, and end with it."""


def _litellm() -> Any:
    # Without it the import asks GitHub for a price list, three times.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True
    litellm.turn_off_message_logging = True
    return litellm


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


def _told(body: dict[str, Any], asked: Mapping[str, Any]) -> ChatAnswer:
    """The answer with what it tells of tokens; what the agent did not ask for is taken out of the body."""
    choice = body["choices"][0]
    prompt_ids = _ids(body.get("prompt_token_ids", choice.get("prompt_token_ids")))
    response_ids = _ids(choice.get("token_ids"))
    if prompt_ids is None or response_ids is None:
        prompt_ids = response_ids = None
    logprobs = None if response_ids is None else _logprobs(choice.get("logprobs"), len(response_ids))
    dropped = set() if asked.get("return_token_ids") else {"prompt_token_ids", "token_ids"}
    shown = {name: value for name, value in choice.items() if name not in dropped}
    if not asked.get("logprobs") and "logprobs" in shown:
        shown["logprobs"] = None
    body = {name: value for name, value in body.items() if name not in dropped} | {"choices": [shown]}
    return ChatAnswer(body=body, prompt_ids=prompt_ids, response_ids=response_ids, logprobs=logprobs)


def _ids(value: Any) -> list[int] | None:
    try:
        return msgspec.convert(value, list[_TokenId])
    except msgspec.ValidationError:
        return None


def _logprobs(value: Any, n: int) -> list[float] | None:
    try:
        found = [entry.logprob for entry in msgspec.convert(value, _Logprobs).content]
    except msgspec.ValidationError:
        return None
    return found if len(found) == n else None


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw.decode(errors="replace")


def _chat_completion(service: str, body: Any) -> dict[str, Any]:
    """The answer, if it is one. Raises EngineRefused otherwise: a wrong URL often answers 200 with a page."""
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(body, dict) and isinstance(first, dict) and isinstance(first.get("message"), dict):
        return body
    raise EngineRefused(
        f"{service} answered 200 with what is no chat completion: {str(body)[:200]!r}; "
        "its url must be the one to which /chat/completions is added (it mostly ends in /v1)",
        status=502,
    )


def _failure(service: str, status: int, said: str, headers: Mapping[str, str]) -> EngineUnavailable | EngineRefused:
    """What an answer that is no 200 means: 408, 429 and 5xx may be tried again, the others not."""
    if status in (408, 429) or status >= 500:
        seconds = headers.get("retry-after", "")
        wait = min(max(int(seconds), 1), 60) if seconds.isdigit() else 1
        return EngineUnavailable(f"{service} answered {status}: {said}", retry_after=wait)
    hint = {
        401: "; check the api_key",
        403: "; check the api_key and what it may do",
        404: "; check the url (it mostly ends in /v1) and the model's name",
    }.get(status, "; give the url that it redirects to" if status < 400 else "")
    return EngineRefused(f"{service} answered {status}: {said}{hint}", status=status if status in _KEPT_STATUS else 400)


def _message_of(raw: bytes) -> str:
    """The service's own words: OpenAI's error message, else the beginning of what it sent."""
    body = _decoded(raw)
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else raw[:500].decode(errors="replace")


def _without(key: str | None, text: str) -> str:
    """Services may repeat the key they were sent; short ones are no secrets, and would blot out words."""
    return text.replace(key, "***") if key and len(key) >= 8 else text
