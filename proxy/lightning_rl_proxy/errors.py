"""Errors that reach a client: each says its status, what to do, and whether a retry can help.

SDKs retry 408, 409, 429 and 5xx by themselves unless `x-should-retry` says otherwise, so every error says it.
"""


class GatewayError(Exception):
    """An answer that is an error. `param` names the request field at fault, `kind` is the dialect's error type.

    `code` is the name that clients look for, where there is one. `retry_after`: the seconds after which to `retry`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
        retry_after: int = 1,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry = retry
        self.retry_after = retry_after

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that tell an SDK whether to try again, and after how many seconds."""
        headers = [(b"x-should-retry", b"true" if self.retry else b"false")]
        if self.retry:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        return headers


class PromptTooLong(GatewayError):
    """A prompt that does not fit the model's context of `limit` tokens; each dialect says so in its clients' words.

    `at_least`: it was counted no further, so that it may have more tokens than these.
    The code stands in the text too: LangChain looks for it there, and the `openai` SDK (3.57) shows the text alone.
    """

    def __init__(self, prompt_tokens: int, limit: int, *, at_least: bool = False) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens{' or more' if at_least else ''}. Please reduce the length of the messages, or "
            "raise actor_rollout_ref.rollout.max_model_len, or --max-model-len of `lightning-rl serve`, where the "
            "model allows it. (context_length_exceeded)",
            param="messages",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.at_least = at_least


class UnknownModel(GatewayError):
    """A model name that nothing serves, where the policy does not answer for such."""

    def __init__(self, requested: str, served: list[str]) -> None:
        super().__init__(
            404,
            f"there is no model {requested!r}; there are {sorted(served)} "
            "(gateway.unknown_model: policy lets the policy answer for any name)",
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )


def closed(attempt_id: str, ended: str | None = None) -> GatewayError:
    """The attempt has ended, as `ended` says: whatever still calls is a zombie."""
    why = ended or "its rollout has ended or was retried"
    return GatewayError(409, f"attempt {attempt_id} is closed: {why}", kind="conflict")


def elsewhere(attempt_id: str, url: str) -> GatewayError:
    """Another gateway has the attempt, or had it until a moment ago."""
    return GatewayError(503, f"attempt {attempt_id} is at the gateway {url}: ask there", kind="api_error", retry=True)
