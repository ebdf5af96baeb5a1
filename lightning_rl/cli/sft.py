"""`lightning-rl sft`: train a policy on recorded answers. Keys as in `docs/config.md`, syntax as in Hydra."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rl.cli.named_agent import agent_of
from lightning_rl.cli.sigterm import ended_by_sigterm

if TYPE_CHECKING:
    from lightning_rl.config.schema import TrainConfig
    from lightning_rl.sft_algorithm import SFT


def run(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="sft.traces=runs/teacher, sft.min_reward=1, ..."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of keys; the command line wins over it.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is kept; by default runs/sft-DATE.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder: its own keys, from its last checkpoint.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Train a policy on the answers of recorded calls, of a stronger model or of its own best rollouts.

    ```
    lightning-rl sft sft.traces=runs/teacher sft.min_reward=1 \\
        actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.actor.optim.lr=1e-5
    ```

    `sft.traces` names folders of runs, and files of `lightning-rl export --what calls`. `sft.teacher` names a model
    with which the agent is run on the tasks first:

    ```
    lightning-rl sft sft.teacher=helper gateway.backends.helper.kind=litellm \\
        gateway.backends.helper.remote_model=anthropic/claude-sonnet-4-5 agent=my_agent:solve \\
        data.train_files=tasks.jsonl sft.min_reward=1 actor_rollout_ref.model.path=Qwen/Qwen3-0.6B
    ```

    The trained model is in the run folder's `model`; `lightning-rl train actor_rollout_ref.model.path=RUN_DIR/model`
    goes on from it. `lightning-rl train --sft` does both.
    """
    from lightning_rl.config import ConfigError, compose
    from lightning_rl.config.schema import TrainConfig

    command_line = list(overrides or ())
    if resume is not None:
        if run_dir is not None or config is not None:
            raise ConfigError("--resume takes the run folder's own configuration: leave --run-dir and --config out")
        run_dir, config = resume, resume / "config.yaml"
        if not config.is_file():
            raise ConfigError(f"{resume.resolve()} holds no run of `lightning-rl sft`: there is no config.yaml in it")
        command_line.append("trainer.resume_mode=auto")
    settings = compose(file=config, command_line=command_line, schema=TrainConfig)
    agent = None if settings.sft.teacher is None else agent_of(settings, None)
    folder = folder_of(settings, run_dir)
    try:
        with ended_by_sigterm():
            algorithm = supervised(agent, settings, folder, None, console=not as_json)
    except (KeyboardInterrupt, SystemExit):
        if (folder / "config.yaml").exists():
            typer.echo(f"\nInterrupted. Go on with: lightning-rl sft --resume {shlex.quote(str(folder))}", err=True)
        raise
    result = {
        "run_dir": str(algorithm.run_dir),
        "steps": algorithm.step,
        "model": str(algorithm.model),
        "metrics": algorithm.history[-1],
    }
    if as_json:
        typer.echo(json.dumps(result))
        return
    _show(algorithm)


def folder_of(settings: "TrainConfig", run_dir: Path | None) -> Path:
    """The run folder of SFT with these settings, where it was not given."""
    from lightning_rl.sft_algorithm import SFT

    return SFT(settings).run_folder(run_dir)


def supervised(
    agent: Any, settings: "TrainConfig", run_dir: Path | None, server: list[str] | None, *, console: bool
) -> "SFT":
    """SFT that has trained in the folder; where there is a teacher, on its rollouts with the agent, too."""
    from lightning_rl.sft_algorithm import SFT
    from lightning_rl.trainer import Trainer

    algorithm = SFT(settings)
    algorithm.console = console
    if algorithm.teacher is None:
        algorithm.fit(run_dir)
    else:
        Trainer(agent, run_dir=run_dir, server=server).fit(algorithm)
    return algorithm


def _show(algorithm: "SFT") -> None:
    model = algorithm.model.resolve()
    measured = [one["sft/held_out_loss"] for one in algorithm.history if "sft/held_out_loss" in one]
    if measured:
        typer.echo(f"held-out loss {measured[0]:.4f} -> {measured[-1]:.4f} nats a token in {algorithm.step} steps")
    typer.echo(f"model  {model}\nnext   lightning-rl train {shlex.quote(f'actor_rollout_ref.model.path={model}')} ...")
