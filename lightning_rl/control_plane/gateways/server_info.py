"""What a server says of itself, so that who attaches to it knows whether both mean the same tokens."""

import hmac
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from lightning_rl_proxy.rendering.base import Renderer

VERSION = version("lightning-rl")


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a server was started: the model that it serves, and how chats are written.

    `vocabulary`, `chats` and `settings` are digests: of its tokenizer, of conversations in its chat format, and of
    where the model's answers end and how it sees images; None where it has no tokenizer. `store_id` is the same for all
    servers of one store.
    """

    model: str
    version: str = VERSION
    vocabulary: str | None = None
    chats: str | None = None
    settings: str | None = None
    history: str = "keep"
    chat_template_kwargs: dict[str, Any] = {}
    special_tokens_in_text: str = "text"
    unknown_model: str = "policy"
    otlp_endpoint: str | None = None
    allowed_media_domains: list[str] = []
    housekeeping: dict[str, list[str]] = {}
    store_id: str | None = None


def store_id(secret: bytes) -> str:
    """By what a store is known: a digest of its secret, which does not tell the secret."""
    return hmac.digest(secret, b"lightning_rl store", "sha256").hex()[:32]


class Served(Protocol):
    """What `info_of` reads: the settings of a server, or what a run needs of one."""

    @property
    def model(self) -> str: ...

    @property
    def history(self) -> Any: ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...

    @property
    def special_tokens_in_text(self) -> Any: ...

    @property
    def unknown_model(self) -> Any: ...

    @property
    def otlp_endpoint(self) -> str | None: ...

    @property
    def allowed_media_domains(self) -> list[str]: ...

    @property
    def housekeeping(self) -> dict[str, list[str]]: ...


def info_of(served: Served, renderer: "Renderer | None") -> ServerInfo:
    """What a server with these settings, and this renderer, says of itself."""
    from lightning_rl_proxy.rendering.fingerprint import fingerprint_of

    prints = None if renderer is None else fingerprint_of(renderer)
    return ServerInfo(
        model=served.model,
        vocabulary=None if prints is None else prints.vocabulary,
        chats=None if prints is None else prints.chats,
        settings=None if prints is None else prints.settings,
        history=served.history,
        chat_template_kwargs=served.chat_template_kwargs,
        special_tokens_in_text=served.special_tokens_in_text,
        unknown_model=served.unknown_model,
        otlp_endpoint=served.otlp_endpoint,
        allowed_media_domains=sorted(served.allowed_media_domains),
        housekeeping=served.housekeeping,
    )
