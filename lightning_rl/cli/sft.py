"""`lightning-rl sft`: train a policy on recorded answers. Keys as in `docs/config.md`, syntax as in Hydra."""

import json
from pathlib import Path
from typing import Annotated

import typer


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

    `sft.traces` names folders of runs, and files of `lightning-rl export --what calls`. The trained model is in the run
    folder's `model`; `lightning-rl train actor_rollout_ref.model.path=RUN_DIR/model` goes on from it.
    """
    from lightning_rl.config import ConfigError, compose
    from lightning_rl.config.schema import TrainConfig
    from lightning_rl.sft_algorithm import SFT

    given = list(overrides or ())
    if resume is not None:
        if run_dir is not None or config is not None:
            raise ConfigError("--resume takes the run folder's own configuration: leave --run-dir and --config out")
        run_dir, config = resume, resume / "config.yaml"
        if not config.is_file():
            raise ConfigError(f"{resume.resolve()} holds no run of `lightning-rl sft`: there is no config.yaml in it")
        given.append("trainer.resume_mode=auto")
    algorithm = SFT(compose(file=config, command_line=given, schema=TrainConfig))
    algorithm.console = not as_json
    model = algorithm.fit(run_dir)
    result = {
        "run_dir": str(algorithm.run_dir),
        "steps": algorithm.step,
        "model": str(model),
        "metrics": algorithm.history[-1],
    }
    if as_json:
        typer.echo(json.dumps(result))
        return
    measured = [one["sft/held_out_loss"] for one in algorithm.history if "sft/held_out_loss" in one]
    if measured:
        typer.echo(f"held-out loss {measured[0]:.4f} -> {measured[-1]:.4f} nats a token in {algorithm.step} steps")
    typer.echo(f"model  {model}\nnext   lightning-rl train actor_rollout_ref.model.path={model} ...")
