"""`lightning-rl plan`: whether a run fits on GPUs, which need not be here, and with which keys."""

import json
from pathlib import Path
from typing import Annotated

import typer


def run(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of the run, as `lightning-rl train` takes them."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            "--gpu",
            metavar="GIB",
            help="24: a card of 24 GiB; 8x80: eight of 80; 2x8x80: two machines of eight. By default the cards here.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of keys; the command line wins over it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what a run needs of GPUs, and which keys make it fit.

    Of the model its config.json is enough. The step of the run is traced without numbers, so the answer is that of its
    own code:

    ```
    lightning-rl plan --gpu 24 actor_rollout_ref.model.path=path/to/model data.max_response_length=2048
    ```

    Of several policies each is told beside what the others hold on its GPU.

    Ends with status 1 where nothing that is known makes it fit.
    """
    from lightning_rl.config import compose
    from lightning_rl.config.schema import TrainConfig
    from lightning_rl.memory.plan import hardware_of, plans

    settings = compose(file=config, command_line=list(overrides or ()), schema=TrainConfig)
    hardware, settings = hardware_of(settings, gpus)
    by_policy = plans(settings, hardware)
    if as_json:
        policies = {name: plan.as_json() for name, plan in by_policy.items()}
        typer.echo(json.dumps({"policies": policies} if settings.policies else policies[""]))
    else:
        for name, plan in by_policy.items():
            if name:
                typer.echo(f"policy {name}:")
            typer.echo("\n".join(plan.lines()))
    if not all(plan.fits for plan in by_policy.values()):
        raise typer.Exit(1)
