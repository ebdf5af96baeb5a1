"""`lightning-rl replay`: the agent run again on recorded answers, without a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lightning_rl.agents.agent import Agent
    from lightning_rl.config.schema import TrainConfig
    from lightning_rl.inspect.replay import GatewaySetup, Replay, ReplayEnding
    from lightning_rl.inspect.replay_engine import Divergence
    from lightning_rl.store.contract import RolloutTrace

_CONTEXT = 40  # characters of a message before the first that differs
_SHOWN = 400  # characters of a message
_LABEL = 19  # characters


def run(
    run_dir: Annotated[Path, typer.Argument(help="The run's folder.")],
    rollout: Annotated[str, typer.Argument(help="A rollout's id, or how it alone begins or ends.")],
    agent: Annotated[
        str | None, typer.Option(help="module:function or path/to/file.py:function; by default the run's own.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="The folder of the tokenizer of the run's model.")] = None,
    renderer: Annotated[str | None, typer.Option(help="The chat format, by name; by default the run's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Run the agent again on the recorded answers of a rollout, and compare calls and rewards. No engine is needed.

    ```
    lightning-rl replay runs/20261231-120000 train-0-3-1-0
    lightning-rl replay runs/20261231-120000 train-0-3-1-0 --agent my_agent.py:solve
    ```

    A request that was not recorded ends it, with the first difference. The exit code is 0 only where all was the same.
    """
    import msgspec
    from opentelemetry.instrumentation.threading import ThreadingInstrumentor

    from lightning_rl.inspect import folder, recorded
    from lightning_rl.inspect.replay import replay
    from lightning_rl.inspect.rollout_source import resources_of

    config = folder.config_of(run_dir)
    with recorded.opened(run_dir) as connection:
        trace = recorded.trace(connection, recorded.find(connection, rollout))
        resources = resources_of(connection, trace.rollout.resources_id)
    ThreadingInstrumentor().instrument()  # as in a runner: what the agent's threads emit is the rollout's
    setting = _setting(run_dir, config, trace, tokenizer, renderer)
    result = replay(trace, _agent(run_dir, config, agent), resources, setting)
    if as_json:
        typer.echo(msgspec.json.encode(msgspec.to_builtins(result) | {"agrees": result.agrees}).decode())
    else:
        _show(result)
    if not result.agrees:
        raise typer.Exit(1)


def _agent(run_dir: Path, config: "TrainConfig | None", named: str | None) -> "Agent":
    """The agent that is named, else the run's own. Raises AgentNotFound."""
    from lightning_rl.agents.agent import AgentNotFound, agent_of_run, load_agent
    from lightning_rl.loops.configured import configured_agents

    if named is not None:
        return load_agent(named)
    own, configured = (None, []) if config is None else (config.agent, configured_agents(config))
    if own is None and not configured:
        raise AgentNotFound(
            f"the run in {run_dir.resolve()} names no agent, since it was started by a script or at a server: give "
            "--agent module:function or --agent path/to/file.py:function"
        )
    return agent_of_run(None if own is None else load_agent(own), configured)


def _setting(
    run_dir: Path, config: "TrainConfig | None", trace: "RolloutTrace", tokenizer: Path | None, renderer: str | None
) -> "GatewaySetup":
    from lightning_rl.inspect import folder
    from lightning_rl.inspect.replay import GatewaySetup, counting, needs_tokenizer
    from lightning_rl.ppo.resolved_config import chat_template_kwargs

    if not needs_tokenizer(counting(trace)):
        return GatewaySetup()
    place = tokenizer or folder.tokenizer_folder(run_dir, config)
    if config is None:
        return GatewaySetup(tokenizer=place, renderer=renderer or "auto")
    rollout = config.actor_rollout_ref.rollout
    return GatewaySetup(
        tokenizer=place,
        renderer=renderer or rollout.renderer,
        history=rollout.history,
        chat_template_kwargs=chat_template_kwargs(config),
        special_tokens_in_text=config.gateway.special_tokens_in_text,
        unknown_model=config.gateway.unknown_model,
        allowed_media_domains=config.gateway.allowed_media_domains,
    )


def _show(result: "Replay") -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in _lines(result):
        console.print(line)
    if result.divergence is not None:
        _show_divergence(result.divergence)
    typer.echo("All of it agrees." if result.agrees else "It does not agree.")


def _lines(result: "Replay") -> Iterator[str]:
    lost = f" ({result.undelivered} more were never delivered)" if result.undelivered else ""
    yield f"rollout {result.rollout_id}, attempt {result.attempt_id}"
    yield "calls".ljust(_LABEL) + f"{result.calls_replayed} of {result.calls_recorded} replayed{lost}"
    if result.divergence is not None:
        return  # what an agent makes of a refusal says nothing
    for name in ("rewards", "call_rewards", "error"):
        then = _text_of(result.recorded, name)
        now = "the agent did not end" if result.now is None else _text_of(result.now, name)
        if (then, now) != ("none", "none"):
            label = name.replace("_", " ")
            yield f"{label} then".ljust(_LABEL) + then
            yield f"{label} now".ljust(_LABEL) + now
    if result.given_later:
        yield " " * _LABEL + "the final reward was given from outside the agent, which a replay is not"
    for number, names in result.other_sampling.items():
        other = ", ".join(f"{name} {now} (then {then})" for name, (then, now) in names.items())
        yield f"call {number} is asked with other sampling: {other}"


def _text_of(ending: "ReplayEnding", name: str) -> str:
    value: Any = getattr(ending, name)
    if not value:
        return "none"
    if isinstance(value, str):
        return value
    pairs = value.items() if isinstance(value, dict) else value
    return ", ".join(f"{name} {number:g}" for name, number in pairs)


def _show_divergence(divergence: "Divergence") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(f"\nStopped: {divergence.why}"))
    if divergence.token is not None and divergence.before is not None:
        console.print(Text(f"  up to token {divergence.token}  ...{divergence.before!r}"))
        console.print(Text(f"  recorded        {divergence.recorded_text!r}..."))
        console.print(Text(f"  now             {divergence.text!r}..."))
    if divergence.message is not None:
        table = Table(title=f"message {divergence.message}", title_justify="left")
        table.add_column("recorded", ratio=1)
        table.add_column("now", ratio=1)
        table.add_row(*map(Text, side_by_side(divergence.recorded_message, divergence.new_message)))
        console.print(table)


def side_by_side(recorded: dict[str, Any] | None, now: dict[str, Any] | None) -> tuple[str, str]:
    """Two messages as text, from a little before where they part."""
    from lightning_rl.inspect.explain import words_of

    then, new = ("(none)" if one is None else f"{one.get('role')}: {words_of(one)}" for one in (recorded, now))
    pairs = zip(then, new, strict=False)
    parts_at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(then), len(new)))
    start = max(0, parts_at - _CONTEXT)
    return _cut(then, start), _cut(new, start)


def _cut(text: str, start: int) -> str:
    end = start + _SHOWN
    return f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}"
