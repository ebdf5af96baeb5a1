"""Frozen chat models: messages in, messages out, through whatever service has them. Never trained.

A request goes on as the agent wrote it, and its answer or its error comes back as the service gave it; what the service
tells of tokens is kept beside the answer. A backend asks for one choice at a time.
"""

import asyncio
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.errors import GatewayError

# vLLM's and SGLang's field for the ids of prompt and answer; logprobs are OpenAI's own.
_ASKED_FOR_TOKENS = {"return_token_ids": True, "logprobs": True}
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_KEY_NAME = re.compile(r"(KEY|TOKEN|SECRET)(_\w+)?$")  # of variables
_TRACEBACK = re.compile(r"\s*Traceback \(most recent call last\)")  # behind what litellm says
_SAYS_NOTHING_OF_FIELDS = (401, 404, 408, 429)
_SHORTEST_KEY = 8
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


class BackendAnswer(msgspec.Struct, frozen=True, kw_only=True):
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

    async def complete(self, body: dict[str, Any]) -> BackendAnswer:
        """The answer to a chat request without `n` and `stream`.

        Raises GatewayError, with the service's own status, where it answers with an error; EngineUnavailable where it
        cannot be reached or breaks off; EngineRefused where it answers with what is no answer.
        """
        ...

    async def embed(self, body: dict[str, Any]) -> bytes:
        """The answer to an embeddings request, as the service gave it. Raises as `complete` does."""
        ...

    async def close(self) -> None:
        """Free the connections."""
        ...


class OpenAIBackend:
    """An OpenAI-compatible service; `url` is its base URL, to which `/chat/completions` is added.

    It is asked for token ids and logprobs until it refuses, or answers without ids. Raises ValueError for a URL that
    may hold a key.
    """

    def __init__(self, model: str, url: str, api_key: str | None = None, remote_model: str | None = None) -> None:
        self.model = model
        self.url = _bare(url, model).rstrip("/")
        self.remote_model = remote_model or model
        self._api_key = _checked(api_key, model)
        self._keys = [api_key or ""]
        self._asks_for_tokens = True
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, body: dict[str, Any]) -> BackendAnswer:
        """See `ChatBackend`."""
        plain = body | {"model": self.remote_model}
        if not self._asks_for_tokens:
            return _backend_answer(await self._post(plain), body)
        try:
            answer = _backend_answer(await self._post(plain | _ASKED_FOR_TOKENS), body)
        except GatewayError as refused:
            if refused.status in _SAYS_NOTHING_OF_FIELDS or refused.status >= 500:
                raise
            answer = _backend_answer(
                await self._post(plain), body
            )  # where this is refused too, it was not for what we added
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
            detail = _without(self._keys, repr(error))
            raise EngineUnavailable(f"{service} cannot be reached, or broke off: {detail}") from error
        if response.status != 200:
            detail = _decoded(raw)
            if not _error_in(detail):
                detail = raw[:500].decode(errors="replace")
            service = f"{service}, asked for {self.remote_model!r},"
            raise _failure(service, response.status, detail, response.headers, self._keys)
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
        self._api_base = api_base and _bare(api_base, model)
        self._service = f"litellm's {litellm_model}{f' at {api_base}' if api_base else ''}"
        self._api_key = _checked(api_key, model)
        # Where it is given no key, litellm takes one of the environment, by a name that it knows.
        self._keys = [api_key] if api_key else [value for name, value in os.environ.items() if _KEY_NAME.search(name)]

    async def complete(self, body: dict[str, Any]) -> BackendAnswer:
        """See `ChatBackend`."""
        fields = {name: value for name, value in body.items() if name in _LITELLM_FIELDS and value is not None}
        # Tools are the agent's; without the second flag they need the package mcp.
        answer = await self._ask("acompletion", fields | {"no-log": True, "_skip_mcp_handler": True})
        ignored = [name for name in body if name not in _LITELLM_FIELDS and name != "model"]
        completion = _chat_completion(self._service, answer.model_dump(mode="json"))
        try:
            msgspec.json.encode(completion)
        except UnicodeEncodeError as error:
            raise EngineRefused(
                f"{self._service} answered with text that is no Unicode, half a surrogate pair: {error}", status=502
            ) from error
        return BackendAnswer(body=completion, ignored_fields=ignored)

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
            detail = _TRACEBACK.split(str(error))[0]
            headers = getattr(error, "litellm_response_headers", None)
            status = getattr(error, "status_code", 500)
            # Without headers there was no answer: litellm calls a service that is not there a 500.
            if isinstance(error, openai.APIConnectionError) or (headers is None and status >= 500):
                detail = _without(self._keys, detail)
                raise EngineUnavailable(f"{self._service} cannot be reached, or broke off: {detail}") from error
            raise _failure(self._service, status, detail, headers or {}, self._keys) from error

    async def close(self) -> None:
        """See `ChatBackend`: litellm's clients are the process's, and end with it."""


def _litellm() -> Any:
    # Without it the import asks GitHub for a price list, three times.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True
    litellm.turn_off_message_logging = True
    return litellm


class _ServiceLogprob(msgspec.Struct):
    logprob: float


class _ServiceLogprobs(msgspec.Struct):
    content: list[_ServiceLogprob]


def _backend_answer(body: dict[str, Any], request: Mapping[str, Any]) -> BackendAnswer:
    """The answer with what it tells of tokens; what the agent did not ask for is taken out of the body."""
    choice = body["choices"][0]
    prompt_ids = _ids(body.get("prompt_token_ids", choice.get("prompt_token_ids")))
    response_ids = _ids(choice.get("token_ids"))
    if prompt_ids is None or response_ids is None:
        prompt_ids = response_ids = None
    logprobs = None if response_ids is None else _logprobs(choice.get("logprobs"), len(response_ids))
    dropped = set() if request.get("return_token_ids") else {"prompt_token_ids", "token_ids"}
    shown = {name: value for name, value in choice.items() if name not in dropped}
    if not request.get("logprobs") and "logprobs" in shown:
        shown["logprobs"] = None
    body = {name: value for name, value in body.items() if name not in dropped} | {"choices": [shown]}
    return BackendAnswer(body=body, prompt_ids=prompt_ids, response_ids=response_ids, logprobs=logprobs)


def _ids(value: Any) -> list[int] | None:
    try:
        return msgspec.convert(value, list[_TokenId])
    except msgspec.ValidationError:
        return None


def _logprobs(value: Any, n: int) -> list[float] | None:
    try:
        logprobs = [entry.logprob for entry in msgspec.convert(value, _ServiceLogprobs).content]
    except msgspec.ValidationError:
        return None
    return logprobs if len(logprobs) == n else None


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
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


def _failure(service: str, status: int, detail: Any, headers: Mapping[str, str], keys: Sequence[str]) -> GatewayError:
    """The service's error as the agent gets it: 408, 429 and 5xx may be tried again, the others not.

    `detail` is what the service said, in words or as OpenAI's body of an error. A 409 would say that the attempt is
    closed, and a redirect is nothing that an SDK follows with a key: both are a 400.
    """
    error = _error_in(detail)
    words = _without(keys, error.get("message") or str(detail))
    hint = {
        401: "; check the api_key that the gateway has for it",
        403: "; check the api_key that the gateway has for it, and what it may do",
        404: "; check the url (it mostly ends in /v1) and the model's name",
    }.get(status, "; give the url that it redirects to" if 300 <= status < 400 else "")
    agent_status = status if status >= 400 and status != 409 else 400
    return GatewayError(
        agent_status,
        f"{service} answered {status}: {words}{hint}",
        kind=error.get("type")
        or _KINDS.get(agent_status, "api_error" if agent_status >= 500 else "invalid_request_error"),
        param=error.get("param"),
        code=error.get("code"),
        retry=(agent_status in (408, 429) or agent_status >= 500) and headers.get("x-should-retry") != "false",
        retry_after=_seconds(headers.get("retry-after", "")),
    )


def _error_in(body: Any) -> dict[str, str]:
    """The texts of an error in OpenAI's or Anthropic's shape; none where it is no such error."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):
        return {"message": error}
    fields = error if isinstance(error, dict) else {}
    return {name: value for name, value in fields.items() if isinstance(value, str)}


def _seconds(retry_after: str) -> int:
    """From 1 to 60: what a service asks to wait, in seconds or until a date; 1 where it does not say."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            until = parsedate_to_datetime(retry_after)
        except ValueError:
            return 1
        seconds = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(math.ceil(seconds), 1), 60) if math.isfinite(seconds) else 60


def _bare(url: str, model: str) -> str:
    """The URL of a service. Raises ValueError for one that may hold a key: it stands in errors that agents read."""
    parts = urlsplit(url)
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            f"the url of model {model!r} holds a user, a query or a fragment, and agents would be told of it: give "
            "the bare base URL, and a key by its variable"
        )
    return url


def _checked(key: str | None, model: str) -> str | None:
    """The key. Raises ValueError, without it, where no header can hold it."""
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(
            f"the api_key of model {model!r} holds what no header can, such as a space or the end of a line: look at "
            "the variable or the file that it was taken from"
        )
    return key


def _without(keys: Sequence[str], text: str) -> str:
    """Services may repeat the key they were sent; short ones are no secrets, and would blot out words."""
    for key in keys:
        if len(key) >= _SHORTEST_KEY:
            text = text.replace(key, "***")
    return text
