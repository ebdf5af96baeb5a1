"""`lightning-rl explain`: a rollout drawn, with what training made of its calls; one of them down to its tokens."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lightning_rl.inspect.call import CallDetail
    from lightning_rl_adapters.call import Call


def run(
    rollout: Annotated[str | None, typer.Argument(help="A rollout's id, or how it alone begins or ends.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; by default the newest below runs/.")] = None,
    call: Annotated[str | None, typer.Option(help="One call in full: its number as drawn, or its id.")] = None,
    token: Annotated[int | None, typer.Option(help="With --call: one token of it in words, from 0.")] = None,
    now: Annotated[bool, typer.Option("--now", help="With --call: what the newest checkpoint makes of it.")] = False,
    whole: Annotated[bool, typer.Option("--all", help="With --call: all its tokens, not their ends alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON, calls whole.")] = False,
) -> None:
    """Draw the calls of a recorded rollout as trees, name their forks and rows, and say what training made of them.

    Without a rollout: the forks of the whole run by cause, and the rollouts that have most. The run may be going on.

    ```
    lightning-rl explain train-0-3-1-0 --run-dir runs/20261231-120000
    lightning-rl explain train-0-3-1-0 --call 2 --token 5 --now
    ```
    """
    import msgspec

    from lightning_rl.inspect import call as calls
    from lightning_rl.inspect import draw, folder, recorded
    from lightning_rl.inspect.explain import explain
    from lightning_rl_adapters.forest import ForestError
    from lightning_rl_adapters.media import media_of

    if call is not None and rollout is None:
        raise typer.BadParameter("--call needs the rollout that it is in")
    if call is None and (token is not None or now or whole):
        raise typer.BadParameter("--token, --now and --all are of one call: name it with --call")
    if rollout is not None and os.path.isdir(rollout):
        raise typer.BadParameter(f"{rollout} is a folder: name it with --run-dir")
    place = recorded.newest_run() if run_dir is None else run_dir
    with recorded.opened(place) as connection:
        if rollout is None:
            forks = recorded.forks(connection, place)
            _show(forks, draw.run(forks), as_json=as_json)
            return
        trace = recorded.trace(connection, recorded.find(connection, rollout))
    context = folder.beside(place, trace.rollout)
    trace = folder.with_trained_calls(context.config, trace)
    training = folder.trained_by(context.config, context.record, context.not_recorded)
    try:
        if call is None:
            view = msgspec.structs.replace(explain(trace, training), run_dir=str(place.resolve()))
            _show(view, draw.rollout(view), as_json=as_json)
            return
        attempt, call_id = calls.find(trace, call)
        one = calls.detail(trace, attempt, call_id, training, decode=folder.decoder(place, context.config))
    except ForestError as error:
        raise recorded.NotRecorded(
            f"rollout {trace.rollout.rollout_id} of {place.resolve()} is damaged: {error}"
        ) from error
    one = msgspec.structs.replace(one, run_dir=str(place.resolve()))
    if now:
        from lightning_rl.ppo.local_workers import register_model_code

        if context.config is not None:
            register_model_code(context.config)
        one = _with_now(one, calls.path_of(attempt, call_id), media_of(attempt.spans), place)
    if token is not None:
        one = calls.of_token(one, token)
    _show(one, draw.call(one, whole=whole) if token is None else draw.token(one), as_json=as_json)


def _with_now(view: "CallDetail", path: list["Call"], media: dict[str, bytes], run_dir: Path) -> "CallDetail":
    from lightning_rl.inspect import call
    from lightning_rl.inspect import rescore as weights

    if view.rollout_training is not None and view.training is None:
        raise weights.NoWeights(f"call {view.number} is of model {view.model!r}, which this run does not train")
    checkpoint = weights.newest(run_dir)
    if (checkpoint / view.model).is_dir():
        checkpoint /= view.model  # of several policies
    return call.with_now(view, weights.log_probs(checkpoint, path, media), str(checkpoint.relative_to(run_dir)))


def _show(view: object, lines: list[str], *, as_json: bool) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(view).decode() if as_json else "\n".join(lines))
