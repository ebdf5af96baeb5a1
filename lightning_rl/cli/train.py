"""`lightning-rl train`: train an agent without a script. Keys as in `docs/config.md`, syntax as in Hydra."""

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rl.cli.named_agent import agent_of
from lightning_rl.cli.sft import supervised
from lightning_rl.cli.sigterm import ended_by_sigterm
from lightning_rl.data import check_files
from lightning_rl.files import newest_checkpoints

if TYPE_CHECKING:
    from lightning_rl.config.from_verl import Note
    from lightning_rl.config.schema import TrainConfig

CONFIG = "config.yaml"  # in the run folder: what `--resume` goes on with
SFT = "sft"  # in the run folder: the supervised training that it began with
_AGENT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
_AGENTS = ("agent", "actor_rollout_ref.rollout.multi_turn.langgraph.path")  # in the place of verl's own loop
_WIDEST = 90  # characters of a key with its value, where the keys of a table stand in a column

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="agent=module:function, data.train_files=tasks.jsonl, ..."),
]
ConfigFile = Annotated[Path | None, typer.Option(help="A YAML file of keys; the command line wins over it.")]
RunDir = Annotated[Path | None, typer.Option(help="Where the run is kept; by default runs/DATE.")]
Resume = Annotated[
    Path | None, typer.Option(help="Go on with the run in this folder: its own keys, from its last checkpoint.")
]
FromVerl = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A script that starts verl's trainer, or a YAML file of verl's: say what each key becomes, and train.",
    ),
]
Servers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Attach to this `lightning-rl serve`, whose admin key is LIGHTNING_RL_ADMIN_KEY's; its runners run "
        "the agent. Several, each with a store of its own, share the rollouts. By default a server and runners "
        "are started.",
    ),
]
BeginsWithSft = Annotated[
    bool,
    typer.Option(
        "--sft",
        help="Begin with supervised training, as `lightning-rl sft` does with these keys, in the run folder's "
        "`sft`, and go on from its model.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]
Gpus = Annotated[
    str | None,
    typer.Option(metavar="GIB", help="Of --dry-run: does it fit on these GPUs, as of `lightning-rl plan`?"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan, or the result, as JSON.")]


def run(
    overrides: Overrides = None,
    config: ConfigFile = None,
    run_dir: RunDir = None,
    resume: Resume = None,
    from_verl: FromVerl = None,
    server: Servers = None,
    sft: BeginsWithSft = False,
    dry_run: DryRun = False,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Train an agent on tasks from files.

    The agent is a function in a module of yours, `agent=my_agent:solve` or `agent=path/to/my_agent.py:solve`; it takes
    a task and an `llm`, and returns a reward. The tasks are JSONL, CSV, Parquet, or a Hugging Face dataset on disk.

    ```
    lightning-rl train agent=my_agent:solve data.train_files=tasks.jsonl
    ```

    without a model of yours trains the tutorial's small one, which shows that everything works. Then name yours:

    ```
    lightning-rl train agent=my_agent:solve data.train_files=tasks.jsonl \\
        actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.actor.optim.lr=1e-6
    ```

    Any program that people run from a shell is an agent, too (`docs/command-agents.md`):

    ```
    lightning-rl train command='claude -p {prompt}' reward='pytest -q' sandbox.files=repo data.train_files=tasks.jsonl
    ```

    `--dry-run` prints the plan and every key. Ctrl-C stops; `--resume RUN_DIR` goes on.

    `--server http://host:8080` attaches to a server that runs; rollouts are left to the runners that join it, and no
    agent is named here.

    `--sft` begins with supervised training on the answers of a stronger model, then goes on with rewards:

    ```
    lightning-rl train --sft sft.teacher=helper sft.min_reward=1 sft.lr=1e-5 agent=my_agent:solve ...
    ```

    `--from-verl run.sh` trains with what a script of verl's says: its overrides over verl's defaults, and those that
    are written here over both. The script itself is not run.
    """
    from lightning_rl.config import ConfigError

    command_line = list(overrides or ())
    if resume is not None:
        if run_dir is not None or config is not None:
            raise ConfigError("--resume takes the run folder's own configuration: leave --run-dir and --config out")
        run_dir, config = resume, resume / CONFIG
        if not config.is_file() and (resume / SFT / CONFIG).is_file():
            sft, config = True, resume / SFT / CONFIG
        if not config.is_file():
            raise ConfigError(f"{resume.resolve()} holds no run of `lightning-rl train`: there is no {CONFIG} in it")
        command_line.append("trainer.resume_mode=auto")
    if from_verl is not None and config is not None:
        raise ConfigError("--from-verl names the configuration: leave --config and --resume out")
    if gpus is not None and not dry_run:
        raise ConfigError("--gpus says on which GPUs a plan is made: add --dry-run")
    settings, notes = _settings(config, command_line, from_verl)
    if notes is not None and not as_json:
        typer.echo(_table(notes))
    server = server or None
    if resume is not None:
        _check_resumed(resume, settings, server)
    agent = agent_of(settings, server)
    if settings.data.train_files is None and not settings.trainer.val_only:
        raise ConfigError("name the tasks: data.train_files=tasks.jsonl")
    for files in (settings.data.train_files, settings.data.val_files, settings.data.tune_files):
        if files is not None:
            check_files(files)
    if dry_run:
        plan = _plan(settings, run_dir, gpus)
        _show({"begins_with": _sft_of(settings)} | plan if sft else plan, settings, notes, as_json=as_json)
        return
    _train(agent, settings, run_dir, server, sft=sft, as_json=as_json)


def _check_resumed(run_dir: Path, settings: "TrainConfig", server: list[str] | None) -> None:
    """Raises ConfigError for a run that attached to a server, and now to none, and for one whose agent only a script
    knows."""
    from lightning_rl.config import ConfigError
    from lightning_rl.inspect import recorded
    from lightning_rl.loops.configured import configured_agents

    if server:
        return
    if recorded.is_attached(run_dir):
        urls = recorded.server_urls(run_dir)
        flags = "".join(f" --server {url}" for url in urls)
        raise ConfigError(
            f"{run_dir.resolve()} is of a run that attached to {' and '.join(urls)}, where its rollouts are: add{flags}"
        )
    if settings.agent is None and not configured_agents(settings):
        raise ConfigError(
            f"{run_dir.resolve()} is of a script or a notebook, and only that names its agent: go on there, by "
            f"lrl.Trainer(agent, run_dir={str(run_dir)!r}) and trainer.resume_mode=auto, or add agent=module:function; "
            "or it is of `lightning-rl sft`, whose own --resume goes on with it"
        )


def _settings(
    config: Path | None, command_line: list[str], from_verl: Path | None
) -> tuple["TrainConfig", "list[Note] | None"]:
    """The configuration, and what became of each key of verl's. Raises ConfigError."""
    from lightning_rl.config import compose, notes_of
    from lightning_rl.config.schema import TrainConfig

    if from_verl is None:
        return compose(base={}, file=config, command_line=command_line, schema=TrainConfig), None
    base, config, command_line = _of_verl(from_verl, command_line)
    notes = notes_of(file=config, command_line=command_line, schema=TrainConfig, is_verl=True)
    return compose(base=base, file=config, command_line=command_line, schema=TrainConfig), notes


def _of_verl(file: Path, further: list[str]) -> tuple[dict[str, Any], Path | None, list[str]]:
    """What a file of verl's stands on, the YAML file with its keys if there is one, and all overrides."""
    from lightning_rl.config import ConfigError, verl_keys, verl_script

    if not file.is_file():
        raise ConfigError(f"--from-verl: there is no file {file.resolve()}")
    base = dict(verl_keys.DEFAULTS)
    if any(override.partition("=")[0] in _AGENTS for override in further):
        del base[_AGENT_LOOP]
    if file.suffix in (".yaml", ".yml"):
        return base, file, further
    command = verl_script.command_of(file)
    return base, command.config, [*command.overrides, *further]


def _table(notes: "list[Note]") -> str:
    """What became of each key, a line each: what is ours as it is comes first, what is refused last."""
    order = ("same", "converted", "accepted", "refused")
    sign = {"same": "=", "converted": "->", "accepted": "no effect:", "refused": "REFUSED:"}
    lines = [
        (f"{note.key}={note.value}", f"{sign[note.kind]} {note.text}".rstrip(" ="))
        for note in sorted(notes, key=lambda note: order.index(note.kind))
    ]
    width = min(_WIDEST, max((len(setting) for setting, _ in lines), default=0))
    counted = ", ".join(f"{sum(note.kind == kind for note in notes)} {kind}" for kind in order)
    return "\n".join([*(f"{setting:<{width}}  {became}".rstrip() for setting, became in lines), f"{counted}", ""])


def _train(
    agent: Any, settings: "TrainConfig", run_dir: Path | None, server: list[str] | None, *, sft: bool, as_json: bool
) -> None:
    if not as_json:
        typer.echo("loading torch and transformers")  # else nothing is printed for seconds
    import lightning_rl as lrl

    algorithm = lrl.PPO(settings)
    began = time.monotonic()
    if sft:
        run_dir = algorithm.run_folder(run_dir)
    trainer = lrl.Trainer(agent, run_dir=run_dir, server=server)
    try:
        with ended_by_sigterm():
            if sft and run_dir is not None:
                algorithm = lrl.PPO(_begun_with_sft(agent, settings, run_dir, server, as_json=as_json))
            algorithm.console = not as_json
            trainer.fit(algorithm)
    except (KeyboardInterrupt, SystemExit):
        folder = trainer.run_dir
        if folder is not None and any(file.exists() for file in (folder / CONFIG, folder / SFT / CONFIG)):
            at = "".join(f" --server {url}" for url in server or ())
            typer.echo(
                f"\nInterrupted. Go on with: lightning-rl train --resume {shlex.quote(str(folder))}{at}\n"
                f"It goes on {_begins_behind(folder, settings)}.",
                err=True,
            )
        raise
    last = algorithm.history[-1] if algorithm.history else {}
    checkpoint = algorithm.run_dir / "checkpoints" / f"step-{algorithm.step}"
    model = algorithm.run_dir / "model"
    result = {
        "run_dir": str(algorithm.run_dir),
        "steps": algorithm.step,
        "checkpoint": str(checkpoint) if checkpoint.exists() else None,
        "model": str(model) if model.exists() else None,
        "seconds": round(time.monotonic() - began, 1),
        "metrics": last,
    }
    if as_json:
        typer.echo(json.dumps(result))
    elif "console" not in settings.trainer.logger:
        typer.echo("\n".join(algorithm.summary()))


def _begins_behind(run_dir: Path, settings: "TrainConfig") -> str:
    """Where an interrupted run goes on when it is resumed."""
    if not (run_dir / CONFIG).exists():
        return "with the supervised training"
    if saved := newest_checkpoints(run_dir / "checkpoints", 1):
        return f"behind {saved[0].name}, its last checkpoint"
    every = settings.trainer.save_freq
    begins = (
        f"every {every} steps" if every > 0 else "only with the last step: trainer.save_freq=N does so every N steps"
    )
    return f"from its beginning, since it has no checkpoint yet (one is saved {begins})"


def _begun_with_sft(
    agent: Any, settings: "TrainConfig", run_dir: Path, server: list[str] | None, *, as_json: bool
) -> "TrainConfig":
    """The settings with the model of supervised training in place of theirs, once it is made."""
    from lightning_rl.config import ConfigError, derived

    if (run_dir / CONFIG).exists() and settings.trainer.resume_mode != "auto":
        raise ConfigError(f"{run_dir} holds a run: go on with it (--resume), or name another folder")
    if not as_json:
        typer.echo(f"{_sft_of(settings)}, in {run_dir / SFT}; then PPO")
    model = supervised(agent, settings, run_dir / SFT, server, console=not as_json).model
    return derived(settings, {"actor_rollout_ref": {"model": {"path": str(model)}}})


def _sft_of(settings: "TrainConfig") -> str:
    """What supervised training would learn from. Raises ConfigError where it is nothing."""
    from lightning_rl.sft_algorithm import SFT

    made = SFT(settings)
    named = [str(source) for source in made.sources]
    if made.teacher is not None:
        named.append(f"rollouts of {made.teacher.model}")
    return f"SFT on {', '.join(named)}"


def _plan(settings: "TrainConfig", run_dir: Path | None, gpus: str | None = None) -> dict[str, Any]:
    """What a run with these settings would do, and needs. Raises what it would raise before its first step, but for
    rewards that nothing gives and an engine that is not here: the plan says so, beside all the rest."""
    from lightning_rl import tutorial
    from lightning_rl.cli import preflight
    from lightning_rl.config import ConfigError
    from lightning_rl.loops.loop_registry import loops_of
    from lightning_rl.ppo import resolved_config, tasks
    from lightning_rl.ppo.estimators import needs_critic
    from lightning_rl.ppo_algorithm import PPO
    from lightning_rl.runner.launch import at_once
    from lightning_rl.telemetry import metrics

    algorithm, data, rollout = PPO(settings), settings.data, settings.actor_rollout_ref.rollout
    loops = loops_of(settings)
    metrics.check_names(settings.trainer.logger)
    resolved_config.resume_from(settings)
    with_critic = needs_critic(settings, algorithm.rules.batch.estimator)
    resolved_config.check_paths(settings, with_critic=with_critic)
    model = settings.actor_rollout_ref.model.path
    folder = preflight.model_folder_here(settings)
    try:
        engine = preflight.engine(settings)
    except ConfigError as error:
        engine = f"NONE HERE, AND IT WOULD NOT BEGIN: {error}"
    datasets = tasks.datasets(settings, None, None, None)
    try:
        scored = tasks.grader_of(settings, algorithm.rules.grader, datasets) is not algorithm.rules.grader
        rewards = "the scorers of the tasks' data_source" if scored else _rewards_of(settings)
    except ConfigError as error:
        rewards = f"NONE, AND IT WOULD NOT BEGIN: {error}"
    train, val, _ = datasets if folder is None else tasks.without_overlong(settings, folder, datasets)
    steps = 0 if settings.trainer.val_only else algorithm.steps(len(train))
    numbers = None if folder is None else preflight.parameters(folder)
    processes = algorithm.isolation == "process" or settings.command is not None
    unknown = "not known before the model is here"
    return {
        "agent": settings.agent or settings.command or rollout.multi_turn.langgraph.path or (loops and loops.default),
        "model": model or f"{tutorial.checkpoint()} (the tutorial's; name yours: actor_rollout_ref.model.path)",
        "parameters": unknown if numbers is None else numbers,
        "learning_rate": unknown if numbers is None else resolved_config.learning_rate(settings, numbers),
        "memory": unknown if folder is None else preflight.memory(settings, gpus),
        "engine": engine,
        "rewards": rewards,
        "train_tasks": len(train),
        "val_tasks": len(val),
        "steps": steps,
        "rollouts_per_step": data.train_batch_size * rollout.n,
        "rollouts_at_once": algorithm.n_runners or at_once(algorithm.asks_for, start_processes=processes),
        "run_dir": str(algorithm.run_folder(run_dir)),
    }


def _rewards_of(settings: "TrainConfig") -> str:
    function, judge, scorer = (
        settings.reward.custom_reward_function,
        settings.reward.judge,
        settings.reward.reward_model,
    )
    if function.path:
        return f"{function.path}:{function.name}"
    if judge.model:
        return f"the judge {judge.model}"
    if scorer.enable:
        return f"the reward model {scorer.model_path}"
    if settings.command is None:
        return "what the agent returns or emits"
    return settings.reward.command or "what the program writes to $LIGHTNING_RL_REWARD, or its exit status"


def _show(plan: dict[str, Any], settings: "TrainConfig", notes: "list[Note] | None", *, as_json: bool) -> None:
    import msgspec

    from lightning_rl.config import to_yaml

    if as_json:
        of_verl = {} if notes is None else {"from_verl": [note._asdict() for note in notes]}
        typer.echo(json.dumps({**of_verl, "plan": plan, "config": msgspec.to_builtins(settings)}))
        return
    width = max(map(len, plan))
    for name, value in plan.items():
        typer.echo(f"{name.replace('_', ' '):<{width}}  {value}")
    typer.echo(f"\n{to_yaml(settings)}", nl=False)
