"""Attaching a training run to a server that runs: one that the Trainer has started, or one elsewhere.

Invariant: a run that is attached says so again and again, from a thread of its own. When its trainer is gone, the
server takes its engines out, and nothing of it is handed to runners any more.
"""

import contextlib
import logging
import shlex
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from lightning_rl.control_plane.gateways.server_info import Served, ServerInfo, info_of
from lightning_rl.errors import Explained
from lightning_rl.processes.service_keys import ADMIN_KEY, is_loopback
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import Conflict, ForeignAnswer, Invalid, NotAllowed, NotFound, StoreError, Unreachable

LEASE_SECONDS = 60.0
_RENEWAL_SECONDS = 0.5  # between two words of a run
_log = logging.getLogger(__name__)


class CannotAttach(Explained, ValueError):
    """What keeps a run from a server, for its user to remove."""


class RunGivenUp(Explained, RuntimeError):
    """The server does not know the run any more."""


class PolicyToServe(Served, Protocol):
    """What a run needs a server to serve."""

    tokenizer: str | None
    renderer: str
    engines: list[dict[str, Any]]
    served_as: str | None
    more_models: list[str]


class Attachment:
    """An attached run. `began_ns`: when it began, by the server's clock, since the epoch.

    `unregistered`: engines that the server does not know yet.
    """

    def __init__(self, store: HttpStore, run_id: str, began_ns: int, session: str | None = None) -> None:
        self.began_ns = began_ns
        self.unregistered: list[dict[str, Any]] = []
        self.why_unregistered = ""
        self._has_left = False
        self._session = session
        self._store = store
        self._run_id = run_id
        self._refused: StoreError | None = None
        self._heard_at = time.monotonic()
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="the run's lease", daemon=True)
        self._renewing.start()

    def check(self) -> None:
        """Raises RunGivenUp where the server has given the run up."""
        if self._refused is not None:
            raise RunGivenUp(f"{self._refused}; go on with the run from its folder (trainer.resume_mode=auto)")

    @property
    def given_up(self) -> bool:
        """Whether the server has given the run up, or was started anew."""
        return self._refused is not None

    @property
    def silent_seconds(self) -> float:
        """How long ago the server last said that the run is attached."""
        return time.monotonic() - self._heard_at

    def confirm(self) -> bool:
        """Whether the server knows the run, asked now. Raises Unreachable."""
        try:
            self._store.renew_run(self._run_id, self._session)
        except (Conflict, NotFound) as error:
            self._refused = error
        else:
            self._heard_at = time.monotonic()
        return not self.given_up

    def register_missing(self, away: Collection[str]) -> None:
        """Let the server use what is `unregistered`, where it is not at a URL in `away`, and the server reaches it."""
        unregistered, self.why_unregistered = [], ""
        for engine in self.unregistered if not self._has_left else ():
            try:
                if engine.get("url") in away:
                    raise Conflict("it does not have the present weights")
                info = _register(self._store, engine)
                if self._has_left:  # meanwhile, and its engines with it
                    self._store.remove_engine(info["engine_id"])
            except StoreError as error:
                unregistered.append(engine)
                self.why_unregistered = str(error)
                _log.info(
                    "the server at %s does not use the engine at %s yet: %s", self._store.url, engine.get("url"), error
                )
        self.unregistered = unregistered

    def close(self) -> None:
        """Say no more that the run lives."""
        self._ended.set()

    def detach(self) -> None:
        """Take the run and its engines from the server."""
        self._has_left = True
        self.close()
        self._renewing.join()
        with contextlib.suppress(StoreError):  # a server that is gone, or started anew, or has another trainer of it
            self._store.end_run(self._run_id, self._session)

    def _renew(self) -> None:
        warned = False
        while not self._ended.wait(_RENEWAL_SECONDS) and not self.given_up:
            try:
                self.confirm()
            except StoreError as error:  # whoever asks for rollouts finds out, too, and ends for it
                if not warned:
                    _log.warning("the server at %s does not answer: %s", self._store.url, error)
                warned = True
            else:
                if warned and not self.given_up:
                    _log.warning("the server at %s answers again", self._store.url)
                warned = False


@contextmanager
def attached(
    store: HttpStore,
    run_id: str,
    policy: PolicyToServe,
    *,
    lease_seconds: float = LEASE_SECONDS,
    sessions: Sequence[str] = (),
) -> Iterator[Attachment]:
    """The run with its engines at a server, for as long as the block runs. Raises as `attach`."""
    attachment = attach(store, run_id, policy, lease_seconds=lease_seconds, sessions=sessions)
    try:
        yield attachment
    finally:
        attachment.detach()


def attach(
    store: HttpStore,
    run_id: str,
    policy: PolicyToServe,
    *,
    lease_seconds: float,
    sessions: Sequence[str] = (),
    away: Collection[str] | None = None,
) -> Attachment:
    """Attach the run with its engines to a server.

    `away`: the run has been attached before, and the engines at these URLs do not have the present weights. They, and
    those that the server does not reach, are left `unregistered` then, unless these are all. None: all must be there.

    Raises Conflict or Invalid where the server cannot use an engine, or has the run from another copy of its folder;
    Unreachable where it can use none now. Nothing is attached then.
    """
    began_ns = store.begin_run(run_id, policy.served_as or policy.model, lease_seconds, policy.more_models, sessions)
    attachment = Attachment(store, run_id, began_ns, sessions[-1] if sessions else None)
    try:
        if away is None:
            for engine in policy.engines:
                _register(store, engine)
        else:
            attachment.unregistered = policy.engines
            attachment.register_missing(away)
            if policy.engines and len(attachment.unregistered) == len(policy.engines):
                raise Unreachable(
                    f"the server at {store.url} can use none of the run's engines now: {attachment.why_unregistered}"
                )
    except BaseException:
        attachment.detach()
        raise
    return attachment


def _register(store: HttpStore, engine: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(engine)
    try:
        return store.register_engine(fields.pop("model"), fields.pop("kind"), fields.pop("url", None), **fields)
    except (Conflict, Invalid) as error:
        if is_loopback(urlsplit(engine.get("url") or "").hostname or "") and not is_loopback(
            urlsplit(store.url).hostname or ""
        ):
            error.add_note(
                f"{engine['url']} is an address of this machine alone: train on the server's machine, or with engines "
                "that it reaches (actor_rollout_ref.rollout.server_urls)"
            )
        raise


def check_servers(stores: Sequence[HttpStore], policy: PolicyToServe) -> list[str]:
    """Whether the servers are there, take the key, mean the same tokens as the run, and have a store each: the ids of
    these. Raises CannotAttach."""
    by_store: dict[str, str] = {}
    for store in stores:
        try:
            info = _checked(store, policy)
        except CannotAttach as error:
            if len(stores) > 1 and isinstance(error.__cause__, Unreachable):
                error.add_note("or leave it out: a run goes on at the servers that are named")
            raise
        if info.store_id is None:
            continue
        if info.store_id in by_store:
            raise CannotAttach(
                f"{by_store[info.store_id]} and {store.url} are of one store: name one of them. A run uses all "
                "gateways of a store through any of them (docs/several-gateways.md); several servers have a store each "
                "(docs/several-servers.md)"
            )
        by_store[info.store_id] = store.url
    return list(by_store)


def _checked(store: HttpStore, policy: PolicyToServe) -> ServerInfo:
    """What the server says of itself; see `check_servers`."""
    try:
        there = msgspec.convert(store.server(), ServerInfo)
    except NotAllowed as error:
        raise CannotAttach(
            f"{store.url} refuses the key: set {ADMIN_KEY} to the one that it was started with"
        ) from error
    except (NotFound, ForeignAnswer) as error:
        raise CannotAttach(f"{store.url} is no lightning_rl server, or one of another version: {error}") from error
    except Unreachable as error:
        raise CannotAttach(
            f"no server answers at {store.url}: start it with `{serve_command(policy)}` ({error})"
        ) from error
    here = _wanted(policy)
    if there.version != here.version:
        raise CannotAttach(f"{store.url} is lightning-rl {there.version}, and this is {here.version}: install the same")
    differing = _differences(here, there)
    if differing:
        raise CannotAttach(
            f"{store.url} does not serve this run: {'; '.join(differing)}. Start it with `{serve_command(policy)}`"
        )
    return there


def _wanted(policy: PolicyToServe) -> ServerInfo:
    """What a server would say of itself that was started for this run."""
    from lightning_rl_proxy.rendering.load import load_renderer

    renderer = None
    if policy.tokenizer is not None:
        renderer = load_renderer(
            Path(policy.tokenizer),
            policy.renderer,
            policy.model,
            history=policy.history,
            chat_template_kwargs=policy.chat_template_kwargs,
            special_tokens_in_text=policy.special_tokens_in_text,
        )
    return info_of(policy, renderer)


def _differences(here: ServerInfo, there: ServerInfo) -> list[str]:
    """What of the server is not as the run needs it, in words; a run without a tokenizer needs nothing."""
    if here.vocabulary is None:
        return []
    if there.vocabulary is None:
        return ["it has no tokenizer"]
    names = ["history", "chat_template_kwargs", "special_tokens_in_text", "unknown_model"]
    if here.otlp_endpoint is not None:
        names.append("otlp_endpoint")
    if here.allowed_media_domains:
        names.append("allowed_media_domains")
    if here.housekeeping:
        names.append("housekeeping")
    differences = [
        f"its {name} is {getattr(there, name)!r}, not {getattr(here, name)!r}"
        for name in names
        if getattr(there, name) != getattr(here, name)
    ]
    if there.vocabulary != here.vocabulary:
        differences.append("its tokenizer is another one")
    elif there.chats != here.chats and not differences:
        differences.append("its renderer writes chats otherwise")
    elif there.settings != here.settings and not differences:
        differences.append(
            "its model's files (config.json, generation_config.json, preprocessor_config.json) are others: answers "
            "would end at other tokens, or images be seen otherwise"
        )
    return differences


def serve_command(policy: PolicyToServe) -> str:
    """The command that starts a server for a run."""
    words = ["lightning-rl", "serve", "--model", policy.model]
    if policy.tokenizer is not None:
        words += ["--tokenizer", policy.tokenizer, "--renderer", policy.renderer]
    for option, value, default in (
        ("--history", policy.history, "keep"),
        ("--special-tokens-in-text", policy.special_tokens_in_text, "text"),
        ("--unknown-model", policy.unknown_model, "policy"),
        ("--otlp-endpoint", policy.otlp_endpoint, None),
    ):
        if value is not None and value != default:
            words += [option, value]
    for host in policy.allowed_media_domains:
        words += ["--allowed-media-domain", host]
    for program, texts in policy.housekeeping.items():
        words += [word for text in texts or [""] for word in ("--housekeeping", f"{program}={text}")]
    if policy.chat_template_kwargs:
        words += ["--chat-template-kwargs", msgspec.json.encode(policy.chat_template_kwargs).decode()]
    return shlex.join(words)
