"""`lightning-rl explain`: what a rollout recorded, drawn: its calls as trees, its forks and their causes, its rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lightning_rl.inspect.explain import RolloutView
    from lightning_rl.inspect.recorded import RunForks


def run(
    rollout: Annotated[str | None, typer.Argument(help="A rollout's id, or how it alone begins or ends.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; by default the newest below runs/.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Draw the calls of a recorded rollout as trees, and name their forks and rows.

    Without a rollout: the forks of the whole run by cause, and the rollouts that have most. The run may be going on.

        lightning-rl explain train-0-3-1 --run-dir runs/20261231-120000
    """
    from lightning_rl.inspect import draw, recorded
    from lightning_rl.inspect.explain import explain
    from lightning_rl_adapters.forest import ForestError

    folder = recorded.newest_run() if run_dir is None else run_dir
    with recorded.opened(folder) as connection:
        if rollout is None:
            forks = recorded.forks(connection, folder)
            _show(forks, draw.run(forks), as_json=as_json)
            return
        trace = recorded.trace(connection, recorded.find(connection, rollout))
    try:
        view = explain(trace, **_as_trained(folder))
    except ForestError as error:
        raise recorded.NotRecorded(
            f"rollout {trace.rollout.rollout_id} of {folder.resolve()} is damaged: {error}"
        ) from error
    _show(view, draw.rollout(view), as_json=as_json)


def _as_trained(run_dir: Path) -> dict[str, Any]:
    """What the run's own keys say of its rows; nothing where it was no training.

    A function that a script gave (`PPO(select=...)`) is not recorded.
    """
    from lightning_rl.cli.train import CONFIG

    if not (run_dir / CONFIG).is_file():
        return {}
    from lightning_rl.algorithms.selection import selection
    from lightning_rl.config import compose
    from lightning_rl.config.schema import TrainConfig

    config = compose(file=run_dir / CONFIG, schema=TrainConfig)
    return {
        "max_tokens": config.data.max_prompt_length + config.data.max_response_length,
        "select": selection(config.algorithm.train_agents, None),
    }


def _show(view: "RolloutView | RunForks", lines: list[str], *, as_json: bool) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(view).decode() if as_json else "\n".join(lines))
