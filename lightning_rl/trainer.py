"""The Trainer: opens the parts of a run, lets the algorithm work, and closes them again.

A run is this process (algorithm and engine), one server child (store, control plane, gateway), and runner children.
Where the algorithm says so the runners are children of actors on a Ray cluster instead. All live in one run folder: the
store, the journal, the logs, the metrics and the checkpoints.

A server elsewhere takes the place of the child: the run attaches to either in the same way (`control_plane.attach`).
"""

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lightning_rl.agents.agent import Agent, FunctionAgent, agent_of_run, as_agent
from lightning_rl.algorithms.base import Algorithm, Endpoint
from lightning_rl.compat.agent_lightning import (
    Hook,
    NoTracer,
    check_arguments,
    check_parts,
    give_parts,
    hooked,
    service_of,
)
from lightning_rl.compat.lightning_store import LightningStore, LightningStoreClient
from lightning_rl.control_plane import launch as server
from lightning_rl.control_plane.attach import LEASE_SECONDS, Attachment, attached, check_servers
from lightning_rl.control_plane.several_servers import SeveralServers
from lightning_rl.data.dataset import dataset_of
from lightning_rl.errors import Explained, WorkerDied
from lightning_rl.files import finished, make_run_dir, note_finished, owned, write_whole
from lightning_rl.processes.child import Child
from lightning_rl.processes.service_keys import RUNNER_KEY, SHORTEST, is_loopback
from lightning_rl.runner import launch as runners
from lightning_rl.runner.agent_pickle import pickled
from lightning_rl.runner.payload import Isolation
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import Unreachable
from lightning_rl.telemetry import made_with

if TYPE_CHECKING:
    from lightning_rl.inspect.dev import Dev
    from lightning_rl.runner.launch import Working
    from lightning_rl.runner.on_ray import Hosts
    from lightning_rl.viewer.notebook import Run


_log = logging.getLogger(__name__)
_ORDERS = "Trainer(agent).fit(algorithm, tasks), or Trainer(algorithm=algorithm).fit(agent, tasks)"


_LOOPBACK = "127.0.0.1"
_LARGE_AGENT = 100_000_000  # bytes
_RUN_ID = "run.id"  # in the run folder
_ID_BYTES = 5  # of a run's id, which is chosen without asking a server that has had many
_SESSIONS = "run.sessions"  # of one that attaches to a server: its trainers' sessions, by which copies are told apart
_OWN_LEASE_SECONDS = 86400.0  # a server of ours ends with us; a trainer that is only stopped for a while goes on


class RunFolderUsed(Explained, FileExistsError):
    """The run folder holds a run, and nobody said to resume it."""


class Trainer:
    """Trains one agent: `Trainer(agent).fit(algorithm, tasks)`.

    Args:
        agent: a function (decorated with `@rollout` or not), an `Agent`, or an `Agent` class. None where the
            algorithm's configuration names a LangGraph graph or agent loops, or where `fit` is given the agent.
        algorithm: Agent-lightning's order, `Trainer(algorithm=algorithm).fit(agent, tasks)`.
        n_runners: at most so many rollouts run at the same time, packed into at most as many processes as there are
            cores. Fewer do while the engines bear no more. By default what the algorithm says: as many as the engines
            bear, 64 a core at most, and 64 in all where each is a process or starts a program; 8 where only services
            answer, which do not say what they bear.
        run_dir: the run folder, made when missing; by default what the algorithm says
            (`trainer.default_local_dir`, else `runs/<date and time>`).
        port: where the server listens; 0 takes a free one.
        isolation: whether many rollouts share a process (`thread`) or each has its own (`process`), which is killed
            when its time is over. By default what the algorithm says.
        host: the address where the server listens. Beyond the loopback others can join with `lightning-rl runner`, for
            which LIGHTNING_RL_RUNNER_KEY must be set; `n_runners=0` then leaves all rollouts to them.
        url: where they reach it (`http://trainer.example:8080`); by default the address where it listens.
        adapter: Agent-lightning's `{"agent_match": regex}`: whose calls are trained, as `algorithm.train_agents` says.
            An algorithm of `lrl.algo` is given it as it is.
        initial_resources: what an algorithm of `lrl.algo` is given, and its agents get until it publishes others:
            `{"prompt_template": lrl.PromptTemplate(...)}`. `dev` asks the service of its `main_llm`, an `LLM`.
        hooks: what runs around each attempt (`lrl.Hook`).
        tracer: Agent-lightning's, which has nothing to do: the gateway records the calls.
        server: the URL of a `lightning-rl serve` that the run attaches to, instead of starting one; its admin key is
            LIGHTNING_RL_ADMIN_KEY's. Rollouts are left to runners that join the server (`lightning-rl runner`), and the
            Trainer needs no agent, unless `n_runners` says that some run here, with LIGHTNING_RL_RUNNER_KEY's key. Of
            several servers, a list of URLs, each has a store of its own, and the groups are spread over them
            (`docs/several-servers.md`).
        store: Agent-lightning's way to say `server`: a `LightningStoreClient`.
    """

    def __init__(
        self,
        agent: Any = None,
        *,
        algorithm: Algorithm | None = None,
        n_runners: int | None = None,
        run_dir: str | Path | None = None,
        port: int = 0,
        isolation: Isolation | None = None,
        host: str = _LOOPBACK,
        url: str | None = None,
        adapter: Any = None,
        initial_resources: Mapping[str, Any] | None = None,
        hooks: Hook | Sequence[Hook] | None = None,
        tracer: NoTracer | None = None,
        server: str | Sequence[str] | None = None,
        store: LightningStore | None = None,
        **elsewhere: Any,
    ) -> None:
        check_arguments(elsewhere)
        servers = [server] if isinstance(server, str) else list(server or ())
        if server is not None or store is not None:
            _check_elsewhere(servers, store, alone={"port": port, "url": url, "host": host != _LOOPBACK and host})
        if tracer is not None and not isinstance(tracer, NoTracer):
            raise TypeError(f"Trainer takes no tracer {tracer!r:.80}: the gateway records the calls; leave it out")
        if agent is not None and algorithm is not None:
            raise ValueError(f"the Trainer has the agent or the algorithm, and fit is given the other: {_ORDERS}")
        if algorithm is not None and not isinstance(algorithm, Algorithm):
            raise TypeError(f"algorithm takes one, as in algorithm=lrl.PPO(config), got {algorithm!r:.80}")
        if algorithm is not None:
            check_parts(algorithm, adapter, initial_resources)
        self._runner_key = _runner_key(host, url)
        attaches = bool(servers) or store is not None
        if n_runners and attaches and not self._runner_key:
            raise ValueError(
                f"n_runners is {n_runners}: to run rollouts of that server here, set {RUNNER_KEY} to its key"
            )
        if n_runners is not None and n_runners < (0 if self._runner_key or attaches else 1):
            raise ValueError(
                f"n_runners is {n_runners}; it takes at least one to run an agent, or others that join: for them set "
                f"{RUNNER_KEY} (docs/runners.md)"
            )
        if n_runners and n_runners < len(servers):
            raise ValueError(
                f"n_runners is {n_runners}, for {len(servers)} servers: it takes one for each, or none here"
            )
        self.agent = None if agent is None else as_agent(agent)
        self.algorithm = algorithm
        self.hooks = hooks
        self.adapter = adapter
        self.initial_resources = initial_resources
        self.n_runners = n_runners
        self.run_dir = None if run_dir is None else Path(run_dir).expanduser().resolve()
        self._fixed_run_dir = run_dir is not None
        self.port = port
        self.isolation = isolation
        self.host = host
        self.url = url
        self.servers = servers
        self.store = store

    def fit(
        self,
        algorithm: Algorithm | Agent | type[Agent] | Callable[..., Any] | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
    ) -> Algorithm:
        """Run `algorithm` on the datasets; returns it when it is done. `run_dir` then says where the run is.

        Where the Trainer has the algorithm, the agent stands first. Raises AgentNotFound for no agent, and for two: one
        that is given and one that the configuration names. Raises what the algorithm raises; RuntimeError when a child
        process died; RunFolderUsed for a run folder that holds a run, unless the algorithm resumes it. All processes
        are stopped first.
        """
        agent, running = self._agent_and_algorithm(algorithm)
        give_parts(running, self.adapter, self.initial_resources)
        if len(self.servers) > 1 and running.needs_one_server:
            raise ValueError(f"{type(running).__name__} works at one server: give Trainer(server=...) one URL")
        if isinstance(agent, FunctionAgent) and running.resources is not None:
            running.answer_for(agent.named_models)
            agent.check_resources(running.resources)
        self._run(None if agent is None else hooked(agent, self.hooks), running, train_dataset, val_dataset)
        return running

    @property
    def run(self) -> "Run":
        """The run that `fit` made, to look at: `trainer.run.rollout(id)` draws one in a notebook. Raises RuntimeError
        before `fit`."""
        from lightning_rl.viewer.notebook import Run

        if self.run_dir is None:
            raise RuntimeError("there is no run to look at yet: call fit first, or lrl.Run(folder) for another one")
        return Run(self.run_dir)

    def _run(
        self,
        agent: Agent | None,
        algorithm: Algorithm,
        train_dataset: Sequence[Any] | None,
        val_dataset: Sequence[Any] | None,
    ) -> None:
        """Run it, and where a process that trains dies, go on with it as often as the algorithm allows."""
        datasets = dataset_of(train_dataset, "train_dataset"), dataset_of(val_dataset, "val_dataset")
        tasks, held_out = algorithm.prepare(*datasets)
        if agent is not None and self.n_runners != 0 and not (self.n_runners is None and self._attaches):
            size = len(pickled(agent))  # what cannot be sent is said before there is a run folder
            if size > _LARGE_AGENT:
                _log.warning(
                    "the agent takes %d MB, and each runner process gets a copy of it: put what is large, such as a "
                    "dataset or a model, into a module that the agent imports",
                    size / 1e6,
                )
        if self.run_dir is None or not self._fixed_run_dir:
            self.run_dir = algorithm.run_folder()
        run_dir = self.run_dir
        make_run_dir(run_dir)
        with owned(run_dir):
            for restarts_left in reversed(range(algorithm.max_restarts + 1)):
                try:
                    self._run_once(agent, algorithm, tasks, held_out, run_dir)
                    break
                except WorkerDied as error:
                    if not restarts_left:
                        raise
                    algorithm.resume = True
                    _log.warning("%s; this is done now, and at most %d more times", error, restarts_left - 1)

    def _run_once(
        self, agent: Agent | None, algorithm: Algorithm, tasks: Sequence[Any], held_out: Sequence[Any], run_dir: Path
    ) -> None:
        """Open the parts, let the algorithm work, and close them."""
        with ExitStack() as parts:
            algorithm.run_id = _run_id(run_dir, algorithm, attaches=self._attaches)
            if algorithm.resume and algorithm.is_done(run_dir):
                return
            algorithm.shares_server = self._attaches
            parts.callback(algorithm.close)
            child = None if self._attaches else parts.enter_context(server.loading(run_dir))
            endpoint = algorithm.open(run_dir)
            made_with.note(run_dir)
            if not isinstance(endpoint, Endpoint):
                raise TypeError(
                    f"{type(algorithm).__name__}.open(run_dir) returned {endpoint!r:.80}, and no lrl.Endpoint"
                )
            one = algorithm.needs_one_server
            store, runner_key, serving = self._at_server(run_dir, endpoint, child, parts, needs_one_server=one)
            urls = store.urls if isinstance(store, SeveralServers) else [store.url]
            _write_private(run_dir / _RUN_ID, algorithm.run_id)
            _write_urls(run_dir, urls)
            attachment: Attachment | SeveralServers
            sessions = _with_new_session(run_dir) if self._attaches else ()
            if isinstance(store, SeveralServers):
                attachment = parts.enter_context(store.attached(algorithm.run_id, endpoint, sessions))
            else:
                lease_seconds = LEASE_SECONDS if serving is None else _OWN_LEASE_SECONDS
                attachment = parts.enter_context(
                    attached(store, algorithm.run_id, endpoint, lease_seconds=lease_seconds, sessions=sessions)
                )
            algorithm.store, algorithm.began_ns = store, attachment.began_ns
            working = self._runners(agent, algorithm, endpoint, (urls, runner_key), run_dir, parts)

            def check() -> None:
                if serving is not None:
                    serving.check()
                attachment.check()
                for each in working:
                    each.check()
                algorithm.watch()

            algorithm.check = check
            if isinstance(store, SeveralServers):
                store.while_waiting = check
            try:
                try:
                    algorithm.run(tasks, held_out)
                    if finished(run_dir) is None:
                        note_finished(run_dir)
                except Unreachable:
                    check()  # a dead server is the cause rather than its silence, and its log says why
                    raise
            except (KeyboardInterrupt, Explained, OSError) as error:
                if not (isinstance(error, ValueError) or getattr(error, "comes_again", False)):
                    error.add_note(f"what was recorded is in {run_dir}; {algorithm.resumed_by} goes on with it")
                raise

    @property
    def _attaches(self) -> bool:
        """Whether the server is one that runs elsewhere."""
        return bool(self.servers) or self.store is not None

    def _at_server(
        self, run_dir: Path, endpoint: Endpoint, child: Child | None, parts: ExitStack, *, needs_one_server: bool
    ) -> tuple[HttpStore | SeveralServers, str, server.Serving | None]:
        """The store of the server that the run is at, its runners' key, and the server where it is a child of ours."""
        if child is None:
            stores, runner_key = self._elsewhere(parts), self._runner_key or ""
            _write_stores(run_dir, check_servers(stores, endpoint))
            if needs_one_server:
                return stores[0], runner_key, None
            # Of several the others do the work of one that is gone; one alone is waited for as long as a run is.
            at_all = SeveralServers(stores) if len(stores) > 1 else SeveralServers(stores, lease_seconds=LEASE_SECONDS)
            return at_all, runner_key, None
        admin_key, runner_key = secrets.token_urlsafe(24), self._runner_key or secrets.token_urlsafe(24)
        _write_private(run_dir / "admin.key", admin_key)
        serving = server.serve(
            child,
            run_dir,
            msgspec.structs.replace(endpoint, engines=[]),
            admin_key=admin_key,
            runner_key=runner_key,
            host=self.host,
            port=self.port,
            url=self.url,
            otlp_endpoint=endpoint.otlp_endpoint,
        )
        store = HttpStore(serving.url, admin_key)
        parts.callback(store.close)
        return store, runner_key, serving

    def _elsewhere(self, parts: ExitStack) -> list[HttpStore]:
        """The stores of the servers elsewhere. Raises StoreKeyMissing where there is no key."""
        if self.store is not None:
            return [self.store.store]
        stores = [LightningStoreClient(url).store for url in self.servers]
        for store in stores:
            parts.callback(store.close)
        return stores

    def _runners(
        self,
        agent: Agent | None,
        algorithm: Algorithm,
        endpoint: Endpoint,
        servers: tuple[Sequence[str], str],
        run_dir: Path,
        parts: ExitStack,
    ) -> "Sequence[Working | Hosts]":
        """The runners of the run, for as long as `parts` are open; none where all rollouts are left to others.
        `servers` are their URLs, and the key."""
        if agent is None or not (wanted := self._at_once(agent, algorithm, endpoint)):
            return []
        isolation, (urls, key) = self.isolation or algorithm.isolation, servers
        if algorithm.ray is None:
            return [
                parts.enter_context(runners.launch(share, agent, url, key, log_dir=log_dir, isolation=isolation))
                for url, share, log_dir in zip(
                    urls, runners.shares(wanted, len(urls)), runners.log_dirs(run_dir, len(urls)), strict=True
                )
            ]
        from lightning_rl.runner import on_ray

        return [parts.enter_context(on_ray.launch(wanted, agent, urls, key, actors=algorithm.ray, isolation=isolation))]

    def _at_once(self, agent: Agent, algorithm: Algorithm, endpoint: Endpoint) -> int:
        """At most how many rollouts run here at once: what the user says, else the algorithm, else as many as the
        engines and this machine bear."""
        if self.n_runners is not None:
            return self.n_runners
        if self._attaches:
            return 0
        if algorithm.n_runners is not None:
            return algorithm.n_runners
        if _services_alone(endpoint):
            return runners.FOR_SERVICES
        processes = (self.isolation or algorithm.isolation) == "process" or agent.starts_processes
        return runners.at_once(algorithm.asks_for, start_processes=processes)

    def _agent_and_algorithm(self, argument: Any) -> tuple[Agent | None, Algorithm]:
        """The two, of which `argument` is the one that the Trainer has not. No agent, where none runs here."""
        if self.algorithm is None:
            if not isinstance(argument, Algorithm):
                raise TypeError(
                    f"fit takes an algorithm first, as in fit(lrl.PPO(config), tasks), got {argument!r:.80}; {_ORDERS}"
                )
            return self._agent_of(self.agent, argument), argument
        if isinstance(argument, Algorithm):
            raise TypeError(f"the Trainer has an algorithm, and fit is given another: {_ORDERS}")
        agent, algorithm = None if argument is None else as_agent(argument), self.algorithm
        return self._agent_of(agent, algorithm), algorithm

    def _agent_of(self, agent: Agent | None, algorithm: Algorithm) -> Agent | None:
        if self._attaches and not self.n_runners and agent is None:
            return None
        return agent_of_run(agent, algorithm.configured_agents)

    def dev(
        self,
        agent: Any,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        *,
        n_tasks: int = 3,
        model: str | Path | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        renderer: str = "auto",
    ) -> "Dev":
        """Run the agent on the first tasks, train nothing, and print calls, triplets and rows.

        Args:
            agent: the tasks, where the Trainer has the agent; or, in Agent-lightning's order, the agent.
            train_dataset: the tasks, where an agent is given.
            val_dataset: the tasks, where an agent is given without a `train_dataset`.
            n_tasks: how many of them.
            model: a folder or an id of the hub, run by the embedded engine; with `base_url`, the name of a model
                there. By default the tutorial's small model, which knows little but SQL words.
            base_url: an OpenAI-compatible service (`https://.../v1`). `initial_resources` of the Trainer may name it:
                `{"main_llm": lrl.LLM(endpoint=..., model=...)}`.
            api_key: its key; by default OPENAI_API_KEY.
            renderer: the chat format of an embedded model.

        Returns the algorithm that did it: `trajectories` has what was printed.
        """
        from lightning_rl.inspect.dev import Dev

        tasks = val_dataset if train_dataset is None else train_dataset
        if tasks is None:
            if callable(agent) or isinstance(agent, Agent):
                raise TypeError("dev takes tasks: Trainer(agent).dev(tasks), or Trainer().dev(agent, tasks)")
            agent, tasks = self.agent, agent
        service = {"model": model, "base_url": base_url, "api_key": api_key}
        if self.initial_resources is not None:
            service = service_of(self.initial_resources, service)
        dev = Dev(**service, renderer=renderer, n_tasks=n_tasks)
        trainer = Trainer(agent, n_runners=self.n_runners, port=self.port, isolation=self.isolation, hooks=self.hooks)
        trainer.fit(dev, tasks)
        return dev


def _services_alone(endpoint: Endpoint) -> bool:
    return all(engine["kind"] in ("openai", "litellm") for engine in endpoint.engines)


def _runner_key(host: str, url: str | None) -> str | None:
    """The key of runners that join, None where nobody is to. Raises ValueError where it is not safe at `host`."""
    key = os.environ.get(RUNNER_KEY) or None
    if not is_loopback(host):
        if key is None or len(key) < SHORTEST:
            raise ValueError(f"on {host}, which others can reach, set {RUNNER_KEY} to at least {SHORTEST} characters")
        if host in ("0.0.0.0", "::") and url is None:
            raise ValueError(f"{host} is no place to go to: give url, as in url='http://trainer.example:8080'")
    return key


def _check_elsewhere(urls: Sequence[str], store: LightningStore | None, *, alone: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that do not go with servers elsewhere; `alone` are those of one's own."""
    if urls and store is not None:
        raise ValueError("give server or store, not both: they say the same")
    if store is None and not urls:
        raise ValueError("server=[] names no server; give a URL, or leave it out to have one started")
    if store is not None and not isinstance(store, LightningStore):
        raise TypeError(f"store takes a LightningStoreClient, got {store!r:.80}; or give server='http://...'")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"server={url!r} is no URL; give http://... or https://...")
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ValueError(f"server names one of {', '.join(urls)} twice; each has a store of its own")
    if names := [name for name, value in alone.items() if value]:
        raise ValueError(f"{', '.join(names)}: the server is elsewhere, and has its own; leave them out")


def _run_id(run_dir: Path, algorithm: Algorithm, *, attaches: bool) -> str:
    """The id of the run in the folder, or a new one. Raises RunFolderUsed for one that is not to be gone on with, or
    not without the server that has its rollouts."""
    file = run_dir / _RUN_ID
    if not file.exists() and not (run_dir / "store.db").exists():
        return secrets.token_hex(_ID_BYTES)
    if not algorithm.resume:
        by = algorithm.resumed_by
        raise RunFolderUsed(f"{run_dir} holds a run already: resume it ({by}), or choose another run_dir")
    from lightning_rl.inspect import recorded  # brings SQLAlchemy, of no use to a new run

    if not attaches and recorded.is_attached(run_dir):
        urls = recorded.server_urls(run_dir)
        raise RunFolderUsed(
            f"{run_dir} is of a run that attached to {' and '.join(urls)}, where its rollouts are: go on with it with "
            f"server={urls if len(urls) > 1 else urls[0]!r} (`--server` on the command line)"
        )
    if file.exists() and (run_id := file.read_text(encoding="ascii", errors="replace")).isalnum():
        return run_id
    _log.warning(
        "%s holds a run and no file %s, so it goes on under a new id: what it had in flight is left, and its step is "
        "sampled anew. Was the whole folder copied, or did its first start fail?",
        run_dir,
        _RUN_ID,
    )
    return secrets.token_hex(_ID_BYTES)


def _with_new_session(run_dir: Path) -> list[str]:
    """The sessions that the folder knows of, and the one that begins now."""
    file = run_dir / _SESSIONS
    sessions = [*(file.read_text(encoding="utf-8").split() if file.exists() else []), secrets.token_hex(8)]
    _write_private(file, "\n".join(sessions))
    return sessions


def _write_urls(run_dir: Path, urls: Sequence[str]) -> None:
    """Note where the run's rollouts are, for those who read its folder; warn of servers that are left out now."""
    file = run_dir / "server.url"
    before = file.read_text(encoding="utf-8").split() if file.exists() else []
    if len(before) > len(urls):
        missing_urls = ", ".join(url for url in before if url not in urls)
        _log.warning(
            "the run goes on without the servers at %s: what they have of it is in no export, doctor or explain, until "
            "their URLs are in %s again",
            missing_urls,
            file,
        )
    _write_private(file, "\n".join(urls))


def _write_stores(run_dir: Path, stores: Sequence[str]) -> None:
    """Note in which stores the run's rollouts are; warn where none of them has what it did so far."""
    file = run_dir / "server.stores"
    before = file.read_text(encoding="utf-8").split() if file.exists() else []
    if before and stores and not set(before) & set(stores):
        _log.warning(
            "the run goes on at a server with another store than before: what it did so far is in no export, doctor or "
            "explain, and rollouts of the step that was cut off are sampled anew. To go on with them, start the server "
            "with the store that it had (--store)"
        )
    _write_private(file, "\n".join(dict.fromkeys([*before, *stores])))


def _write_private(path: Path, text: str) -> None:
    write_whole(path, text.encode(), mode=0o600)
