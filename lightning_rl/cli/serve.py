"""`lightning-rl serve`: store, control plane and gateway in one process, for agents that run wherever they like.

Invariant: beyond the loopback nobody serves with a key that is not their own, and no key stands on a command line.
"""

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lightning_rl.errors import Explained
from lightning_rl.processes.service_keys import ADMIN_KEY, RUNNER_KEY, SHORTEST, is_loopback, pop_from_environment

if TYPE_CHECKING:
    from lightning_rl.control_plane.gateways.engines import EngineRequest
    from lightning_rl.control_plane.process import ServerSettings
    from lightning_rl_proxy.http.limits import RequestLimits

W = TypeVar("W", bound=str)

ENGINE_KEY = "OPENAI_API_KEY"  # of engines of kind openai
LOG, ENGINE_LOG = "server.log", "engine.log"
_EMBEDDED = "embedded"  # of a URL that is not given: started here
_SQLITE = "sqlite:///"
_POSTGRESQL = ("postgresql://", "postgresql+psycopg://")


class ServeRefused(Explained, ValueError):
    """What was asked for cannot be served, or not safely."""


Model = Annotated[
    str,
    typer.Option(help="The name that agents ask for; for `--engine embedded` the model itself, a folder or hub id."),
]
EngineWords = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND[:MODEL][=URL]",
        help="What answers: embedded, vllm or sglang (token engines of --model), openai or litellm (frozen chat "
        "models, of a MODEL name of their own or of --model). May repeat. embedded without a URL is started here "
        "and samples --model. The key of openai is OPENAI_API_KEY's, litellm's that of its provider's variable "
        "(ANTHROPIC_API_KEY, ...).",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="TOKENS",
        help="Of --engine embedded: tokens of prompt and answer together; by default 2048, or what the model allows "
        "where that is less.",
    ),
]
TokenizerPath = Annotated[
    str | None, typer.Option(help="A folder with tokenizer.json, or an id of the hub; token engines need it.")
]
RendererName = Annotated[str, typer.Option(help="How the model's chats are written: qwen3, llama-3, ...")]
TemplateKwargs = Annotated[
    str,
    typer.Option(metavar="JSON", help='What that format is told besides the messages: {"enable_thinking": false}'),
]
HistoryWord = Annotated[
    str,
    typer.Option(
        metavar="keep|template",
        help="The reasoning of earlier turns: kept, or dropped where the chat format drops it.",
    ),
]
UnknownModelWord = Annotated[
    str,
    typer.Option(metavar="policy|refuse", help="Whether a model name that nothing serves means the policy."),
]
SpecialTokensWord = Annotated[
    str,
    typer.Option(
        metavar="text|control",
        help="What a special token (<|im_end|>) is where a message spells it: its letters, or the token itself.",
    ),
]
StoreUrl = Annotated[
    str,
    typer.Option(help="What keeps everything: sqlite:///FILE, or postgresql+psycopg://USER@HOST/DATABASE."),
]
RunDir = Annotated[
    Path | None,
    typer.Option(help="Where journal and log are; by default NAME-server beside the file, or here for a database."),
]
Host = Annotated[str, typer.Option(help="Where to listen; beyond the loopback with your own keys.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
PublicUrl = Annotated[
    str | None, typer.Option(help="Where agents reach it, behind a proxy or on another name; by default HOST:PORT.")
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="An OTLP/HTTP endpoint, http://127.0.0.1:4318, that gets every recorded span, too; its key comes from "
        "OTEL_EXPORTER_OTLP_HEADERS.",
    ),
]
MediaDomains = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST[:PORT]",
        help="A host from which images are fetched that agents name by an http(s) URL; every other URL is refused. May "
        "repeat.",
    ),
]
HousekeepingRules = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PROGRAM=TEXT",
        help="A text of the requests that a program makes for itself (a title, a summary): their calls are tagged "
        "housekeeping and are not trained. An empty text takes a known program's rules away. May repeat.",
    ),
]
LimitWords = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=NUMBER",
        help="What is over a limit is refused: body_bytes, control_body_bytes, header_bytes, messages (of a "
        "request), calls_in_flight (of an attempt), open_attempts, head_seconds, body_seconds (of a request that "
        "comes slowly). May repeat.",
    ),
]


def run(
    model: Model,
    engine: EngineWords = None,
    max_model_len: MaxModelLen = None,
    tokenizer: TokenizerPath = None,
    renderer: RendererName = "auto",
    chat_template_kwargs: TemplateKwargs = "{}",
    special_tokens_in_text: SpecialTokensWord = "text",
    history: HistoryWord = "keep",
    unknown_model: UnknownModelWord = "policy",
    store: StoreUrl = "sqlite:///run.db",
    run_dir: RunDir = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    url: PublicUrl = None,
    otlp_endpoint: OtlpEndpoint = None,
    allowed_media_domain: MediaDomains = None,
    housekeeping: HousekeepingRules = None,
    limit: LimitWords = None,
) -> None:
    """Serve a model to agents anywhere, and record their calls token by token. Ctrl-C ends it.

    ```
    lightning-rl serve --model path/to/model --engine embedded
    lightning-rl serve --model policy --tokenizer Qwen/Qwen3-0.6B --engine vllm=http://127.0.0.1:8000
    ```

    An agent joins with what `POST /api/v1/rollouts/start` answers: a base URL and a key. `LIGHTNING_RL_ADMIN_KEY` is
    the key of that request; without one it is made, and printed. `LIGHTNING_RL_RUNNER_KEY` is that of runners.

    A trainer attaches with `lightning-rl train --server URL`; the engines of its model are then the trainer's to name.
    """
    from lightning_rl.config.otlp_endpoint import traces_url
    from lightning_rl.control_plane.process import ServerSettings, listen_and_serve, listening_at
    from lightning_rl.files import owned

    admin_key, runner_key = _keys(host)
    folder = _run_dir(store, run_dir)
    words = list(engine or ())
    path = model if _EMBEDDED in words else None
    if path is not None:
        words.remove(_EMBEDDED)
        model, tokenizer = _name_of(path), tokenizer or path
    elif max_model_len is not None:
        raise ServeRefused(f"--max-model-len {max_model_len} is of --engine embedded: other engines have their own")
    settings = ServerSettings(
        store=store,
        run_dir=str(folder),
        admin_key=admin_key or secrets.token_urlsafe(24),
        runner_key=runner_key,
        model=model,
        tokenizer=None if tokenizer is None else str(tokenizer_folder(tokenizer)),
        renderer=renderer,
        chat_template_kwargs=template_kwargs(chat_template_kwargs),
        special_tokens_in_text=one_of("--special-tokens-in-text", special_tokens_in_text, ("text", "control")),
        history=one_of("--history", history, ("keep", "template")),
        unknown_model=one_of("--unknown-model", unknown_model, ("policy", "refuse")),
        engines=tuple(engine_request(word, model) for word in words),
        host=host,
        port=port,
        url=_url(url, host, port),
        otlp_endpoint=None if otlp_endpoint is None else traces_url(otlp_endpoint, "--otlp-endpoint"),
        allowed_media_domains=media_domains(allowed_media_domain or []),
        housekeeping=housekeeping_rules(housekeeping or []),
        limits=limits(limit or ()),
    )
    listening_at(host, port).close()  # where that cannot be, it is said before a model is loaded
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with owned(folder):
        _log_to(folder / LOG)
        with contextlib.ExitStack() as started:
            if path is not None:
                settings = _with_embedded(settings, started, path, folder, max_model_len)
            listen_and_serve(settings, lambda at: _tell(settings, at, made_key=not admin_key), foreground=True)
    typer.echo("Stopped.")


def _name_of(path: str) -> str:
    """The name of the model at `path`: its folder's, or the hub's id, by which its renderer is found."""
    return Path(path).resolve().name if Path(path).is_dir() else path


def _with_embedded(
    settings: "ServerSettings", started: contextlib.ExitStack, path: str, folder: Path, max_model_len: int | None
) -> "ServerSettings":
    """The settings with the engine that is started here."""
    import msgspec

    from lightning_rl.inference.process import launch

    typer.echo(f"Loading {path} ...")
    url = started.enter_context(launch(path, folder / ENGINE_LOG, max_model_len))
    request = engine_request(f"{_EMBEDDED}={url}", settings.model)
    return msgspec.structs.replace(settings, engines=(request, *settings.engines))


def engine_request(word: str, model: str) -> "EngineRequest":
    """The engine that a word of the command line names. Raises ServeRefused."""
    import msgspec

    from lightning_rl.control_plane.gateways.engines import EngineRequest

    kind_and_name, _, url = word.partition("=")
    kind, _, name = kind_and_name.partition(":")
    fields = {"kind": kind, "model": name or model, "url": url or None}
    if kind == "openai":
        fields["api_key"] = os.environ.get(ENGINE_KEY)
    try:
        return msgspec.convert(fields, EngineRequest)
    except msgspec.ValidationError as error:
        kinds = "embedded[=URL], vllm=URL, sglang=URL, openai[:MODEL]=URL or litellm:MODEL[=URL]"
        raise ServeRefused(f"--engine {word}: {error}; give {kinds}") from error


def template_kwargs(text: str) -> dict[str, Any]:
    """The chat template's kwargs that a JSON text of the command line gives. Raises ServeRefused."""
    import msgspec

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ServeRefused(
            f"--chat-template-kwargs {text}: {error}; give a JSON object, '{{\"enable_thinking\": false}}'"
        ) from error


def one_of(option: str, word: str, words: Sequence[W]) -> W:
    """The one of `words` that an option names. Raises ServeRefused."""
    for choice in words:
        if word == choice:
            return choice
    raise ServeRefused(f"{option} {word}: give {' or '.join(words)}")


def media_domains(words: list[str]) -> list[str]:
    """Hosts that images are fetched from. Raises ServeRefused."""
    from lightning_rl_proxy.rendering.image_fetcher import ImageFetcher

    try:
        ImageFetcher(words)
    except ValueError as error:
        raise ServeRefused(f"--allowed-media-domain: {error}") from error
    return words


def housekeeping_rules(words: list[str]) -> dict[str, list[str]]:
    """The texts by program. Raises ServeRefused."""
    rules: dict[str, list[str]] = {}
    for word in words:
        program, separator, text = word.partition("=")
        if not separator or not program:
            raise ServeRefused(f"--housekeeping is PROGRAM=TEXT, not {word!r}")
        rules.setdefault(program, []).extend([text] if text else [])
    return rules


def limits(words: Sequence[str]) -> "RequestLimits":
    """The limits that words of the command line set, the others as they are by default. Raises ServeRefused."""
    import msgspec

    from lightning_rl_proxy.http.limits import RequestLimits

    try:
        return msgspec.convert(dict(word.split("=", 1) for word in words), RequestLimits, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        names = ", ".join(RequestLimits.__struct_fields__)
        raise ServeRefused(f"--limit {' '.join(words)}: {error}; give NAME=NUMBER, of {names}") from error


def tokenizer_folder(path: str) -> Path:
    """The folder of a tokenizer: `path` itself, or of a model id its copy from the hub, without the weights.

    Raises FileNotFoundError for what is neither a folder nor an id; what the hub raises carries a note.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if path.count("/") != 1 or path.startswith((".", "/")):
        raise FileNotFoundError(f"tokenizer {path!r} is neither a folder nor a model id (owner/name)")
    import huggingface_hub

    from lightning_rl_proxy.rendering.load import FILES

    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:
        error.add_note(f"tokenizer {path!r} is no folder here, and could not be taken from the hub")
        raise


def _keys(host: str) -> tuple[str, str]:
    """The admin's and the runners' key, "" where none is set. Raises ServeRefused for such as cannot be used at
    `host`."""
    keys = {name: pop_from_environment(name) for name in (ADMIN_KEY, RUNNER_KEY)}
    for name, key in keys.items():
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ServeRefused(f"{name} holds what no header can: use letters, digits and punctuation")
        if key and len(key) < SHORTEST and not is_loopback(host):
            raise ServeRefused(f"{name} has {len(key)} characters; on {host} it needs at least {SHORTEST}")
    admin, runner = keys.values()
    if not admin and not is_loopback(host):
        raise ServeRefused(f"on {host}, which others can reach, set a key of your own: {ADMIN_KEY}, in the environment")
    if admin and admin == runner:
        raise ServeRefused(f"{ADMIN_KEY} and {RUNNER_KEY} are the same: every runner would be an admin")
    return admin, runner


def _run_dir(store: str, run_dir: Path | None) -> Path:
    """The run folder; by default beside the store, so that the journal of one is replayed into no other."""
    if store.startswith(_POSTGRESQL):
        return (run_dir or Path(f"{_database(store)}-server")).resolve()
    from lightning_rl.store.databases import shown

    database = Path(store.removeprefix(_SQLITE))
    if not store.startswith(_SQLITE) or not database.name or "?" in store:
        raise ServeRefused(
            f"--store {shown(store)} is neither a SQLite file nor a PostgreSQL database; give "
            f"{_SQLITE}path/to/file.db, or postgresql+psycopg://user@host/database"
        )
    if not database.parent.is_dir():
        raise ServeRefused(f"--store {store}: there is no folder {database.parent.resolve()}; make it, or name another")
    return (run_dir or database.with_name(f"{database.stem}-server")).resolve()


def _database(store: str) -> str:
    """The name of a PostgreSQL database. Raises ServeRefused where the URL is invalid or names no database."""
    import sqlalchemy as sa

    from lightning_rl.store.databases import shown

    try:
        url = sa.make_url(store)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ServeRefused("--store is no URL; give postgresql+psycopg://user@host/database") from error
    if not url.database:
        raise ServeRefused(f"--store {shown(store)} names no database; give postgresql+psycopg://user@host/database")
    return url.database


def _url(url: str | None, host: str, port: int) -> str | None:
    """Where agents reach the server; None: where it listens."""
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ServeRefused(f"--url {url} is no URL; give http://... or https://...")
        return url.rstrip("/")
    if host in ("0.0.0.0", "::"):  # which is no place to go to
        if port == 0:
            raise ServeRefused(f"name a --port, or a --url: agents cannot be sent to a free port of {host}")
        return f"http://{socket.gethostname()}:{port}"
    return None


def _log_to(path: Path) -> None:
    """Log everything into the file; the terminal goes on with warnings alone."""
    import logging

    from lightning_rl.processes import logs

    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    logs.begin(logs.LogFile(path))


def _tell(settings: "ServerSettings", url: str, *, made_key: bool) -> None:
    from lightning_rl.control_plane.process import JOURNAL
    from lightning_rl.store.databases import shown

    folder = Path(settings.run_dir)
    engines = [" ".join(filter(None, (engine.kind, engine.model, engine.url))) for engine in settings.engines]
    none_yet = f"none: calls get 503 until lightning-rl train --server {url} brings its own; --engine names one"
    lines = [
        f"lightning-rl serves {settings.model} at {url}",
        f"engines     {', '.join(engines) or none_yet}",
        f"store       {shown(settings.store)}",
        f"journal     {folder / JOURNAL}",
        f"log         {folder / LOG}",
        "",
    ]
    if made_key:
        lines += [f"The admin key, made for this run and told only here: export {ADMIN_KEY}={settings.admin_key}", ""]
    lines += [
        "An agent joins with the base URL and the key that this answers:",
        f'    curl {url}/api/v1/rollouts/start -H "Authorization: Bearer ${ADMIN_KEY}" -d \'{{"task": "any JSON"}}\'',
        "",
        "Ctrl-C ends it.",
    ]
    typer.echo("\n".join(lines))
