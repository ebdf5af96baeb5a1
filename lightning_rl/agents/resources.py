"""Resources: the named, versioned things that an algorithm gives an agent.

An agent only ever holds an `LLM`: a plain base URL and a key of its own. `ProxyLLM` is what the algorithm publishes; it
becomes an `LLM` per rollout and attempt.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

_OF_AN_LLM = frozenset(
    {
        "base_url", "anthropic_base_url", "api_key", "endpoint", "env", "for_agent", "openai", "async_openai",
        "anthropic", "async_anthropic", "http_client", "async_http_client", "claude_code_env", "codex_config",
    }
)  # fmt: skip
_ATTEMPT = re.compile(r"/rollout/[^/]+/attempt/[^/]+")


@dataclass(frozen=True, init=False)
class LLM:
    """An endpoint that any SDK can be pointed at.

    `base_url` ends in `/v1` (OpenAI SDKs), `anthropic_base_url` does not (Anthropic SDKs). `sampling_parameters` are
    the algorithm's: the gateway applies them by itself, they are here to be read. `LLM(endpoint=..., model=...)`, as
    Agent-lightning's scripts make one, is the same as `base_url=...`.

    `openai()` and its like give clients of this endpoint that share connections with those of other rollouts: making
    one from nothing loads certificates, which costs more than a call. Closing one of them closes nothing.
    """

    model: str
    base_url: str
    api_key: str = field(repr=False)
    anthropic_base_url: str
    sampling_parameters: dict[str, Any]

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        anthropic_base_url: str = "",
        sampling_parameters: Mapping[str, Any] | None = None,
        *,
        endpoint: str | None = None,
    ) -> None:
        if (base_url is None) == (endpoint is None):
            raise TypeError(f"LLM(model={model!r}) takes base_url, or endpoint, which is the same; give one")
        fields = {
            "model": model,
            "base_url": base_url or endpoint,
            "api_key": api_key or "",
            "anthropic_base_url": anthropic_base_url,
            "sampling_parameters": dict(sampling_parameters or {}),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # it is frozen

    @property
    def endpoint(self) -> str:
        """A base URL for programs that take no key: the attempt's stands in its path, and what they send is ignored.

        Where the gateway has no part in this endpoint, it is `base_url`. Agent-lightning has the name.
        """
        return _ATTEMPT.sub("/key/" + quote(self.api_key, safe=":"), self.base_url, count=1)

    def openai(self, **options: Any) -> "OpenAI":
        """A client of this endpoint; `options` are those of `openai.OpenAI.with_options` (`timeout`, `max_retries`)."""
        from lightning_rl.agents.clients import openai_client

        return openai_client().with_options(base_url=self.base_url, api_key=self.api_key, **options)

    def async_openai(self, **options: Any) -> "AsyncOpenAI":
        """As `openai`, a client for the running event loop; outside of one, as in a sync agent whose framework runs a
        loop for each call, a new one for the caller alone."""
        from lightning_rl.agents.clients import async_openai_client

        return async_openai_client().with_options(base_url=self.base_url, api_key=self.api_key, **options)

    def anthropic(self, **options: Any) -> "Anthropic":
        """As `openai`, a client of Anthropic's SDK, which must be installed."""
        from lightning_rl.agents.clients import anthropic_client

        return anthropic_client().with_options(base_url=self.anthropic_base_url, api_key=self.api_key, **options)

    def async_anthropic(self, **options: Any) -> "AsyncAnthropic":
        """As `async_openai`, a client of Anthropic's SDK, which must be installed."""
        from lightning_rl.agents.clients import async_anthropic_client

        return async_anthropic_client().with_options(base_url=self.anthropic_base_url, api_key=self.api_key, **options)

    @property
    def http_client(self) -> Any:
        """The `httpx.Client` of this process, for SDKs and frameworks that take one (`http_client=`)."""
        from lightning_rl.agents.clients import http_client

        return http_client()

    @property
    def async_http_client(self) -> Any:
        """The `httpx.AsyncClient` of the running event loop; outside of one, a new one."""
        from lightning_rl.agents.clients import async_http_client

        return async_http_client()

    def env(self) -> dict[str, str]:
        """The environment variables that point OpenAI's and Anthropic's SDKs at this endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,  # what litellm and aider read
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }

    def claude_code_env(self, model_context_window: int | None = None) -> dict[str, str]:
        """`env()` with what makes Claude Code ask this model for everything, and nobody else for anything.

        `model_context_window` is in tokens: the program shortens its conversation before that. Without it, it assumes
        a window of its own.
        """
        window = {} if model_context_window is None else {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(model_context_window)}
        return (
            self.env()
            | window
            | {
                "ANTHROPIC_AUTH_TOKEN": self.api_key,
                "ANTHROPIC_API_KEY": "",  # in a terminal it asks whether to use one
                "ANTHROPIC_DEFAULT_OPUS_MODEL": self.model,
                "ANTHROPIC_DEFAULT_SONNET_MODEL": self.model,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": self.model,
                "CLAUDE_CODE_SUBAGENT_MODEL": self.model,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
            }
        )

    def codex_config(self, model_context_window: int | None = None) -> str:
        """The `config.toml` with which Codex asks this endpoint; its key comes from `env()` (`OPENAI_API_KEY`).

        Codex reads it from the folder that `CODEX_HOME` names. `model_context_window` is in tokens; without it, it
        assumes one of its own. OpenAI's web search is off: nothing here runs it.
        """
        window = "" if model_context_window is None else f"model_context_window = {model_context_window}\n"
        return (
            f"model = {json.dumps(self.model)}\n"
            'model_provider = "lightning_rl"\n'
            f"{window}"
            'web_search = "disabled"\n\n'
            "[model_providers.lightning_rl]\n"
            'name = "lightning_rl"\n'
            f"base_url = {json.dumps(self.base_url)}\n"
            'env_key = "OPENAI_API_KEY"\n'
            'wire_api = "responses"\n'
            "stream_idle_timeout_ms = 3600000\n"
        )

    def for_agent(self, name: str) -> "LLM":
        """The same endpoint behind the door that names the calling agent; its calls carry the tag `name`."""
        root = self.anthropic_base_url.rstrip("/")
        if "/agent/" in root:
            root = root[: root.index("/agent/")]
        tagged = f"{root}/agent/{name}"
        return replace(self, base_url=f"{tagged}/v1", anthropic_base_url=tagged)


@dataclass(frozen=True)
class ProxyLLM:
    """The policy behind the gateway, as the algorithm publishes it and as class agents receive it.

    `sampling_parameters` replace the agent's in training rollouts, `val_sampling_parameters` in validation.
    """

    model: str
    sampling_parameters: dict[str, Any] = field(default_factory=dict)
    val_sampling_parameters: dict[str, Any] = field(default_factory=dict)
    claimed: LLM | None = None

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which for what an `LLM` has says how to come by one."""
        if name in _OF_AN_LLM:
            raise AttributeError(
                f"a ProxyLLM has no {name} of its own, since each rollout has another: take that of the rollout's LLM, "
                f'resources["main_llm"].resolve(rollout).{name}'
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_base_url(self, rollout_id: str, attempt_id: str) -> str:
        """Agent-lightning's `resolve`: the `endpoint` of the attempt, which must be the one that runs."""
        llm = self.resolve(rollout_id)
        if f"/rollout/{rollout_id}/attempt/{attempt_id}/" not in llm.base_url:
            raise ValueError(
                f"attempt {attempt_id!r} of rollout {rollout_id!r} is not the one that runs here: {llm.base_url}"
            )
        return llm.endpoint

    def resolve(self, rollout: Any) -> LLM:
        """The plain `LLM` of the rollout's present attempt. Raises RuntimeError outside a claimed rollout."""
        if self.claimed is None:
            raise RuntimeError(
                f"rollout {getattr(rollout, 'rollout_id', rollout)!r} is not claimed: "
                "a ProxyLLM has a URL only inside a runner"
            )
        return self.claimed


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with places to fill, which an algorithm may change: `format(**values)` fills them.

    `engine` is `f-string`, whose places are `{name}`, or `jinja`, run in Jinja's sandbox. Raises ValueError for
    another.
    """

    template: str
    engine: str = "f-string"

    def __post_init__(self) -> None:
        if self.engine not in ("f-string", "jinja"):
            raise ValueError(
                f"PromptTemplate has no engine {self.engine!r}: write places as {{name}} (f-string) or {{{{ name }}}} "
                "(jinja)"
            )

    def format(self, **values: Any) -> str:
        """The prompt with its places filled. Raises KeyError (f-string) or UndefinedError (jinja) for one without a
        value."""
        if self.engine == "f-string":
            return self.template.format(**values)
        from jinja2 import StrictUndefined
        from jinja2.sandbox import SandboxedEnvironment

        return SandboxedEnvironment(undefined=StrictUndefined).from_string(self.template).render(**values)

    def published(self) -> dict[str, Any]:
        """The resource as the store keeps it."""
        return {"type": "prompt_template", "template": self.template, "engine": self.engine}
