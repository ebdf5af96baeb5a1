"""An agent of a framework, or a program, against a real gateway whose engine says what is scripted; what came of it.

Nothing of ours is in the agent's process: it knows a base URL, a key and a model's name from its environment.
"""

import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rl.agents.resources import LLM
from lightning_rl_adapters import credit, forest, rows, semconv
from lightning_rl_adapters.call import calls_of
from tests.proxy.conftest import MODEL, Served
from tests.works_with.environments import made, surroundings
from tests.works_with.table import Agent, Mode

AGENTS = Path(__file__).parent / "agents"
_SECONDS = 180


class Found(NamedTuple):
    """What one run left: its calls, those that are housekeeping, training rows, causes of forks; what was printed."""

    calls: int
    housekeeping: int
    rows: int
    forks: dict[str, int]
    printed: str


class Lost(AssertionError):
    """A law of the gateway did not hold, or the agent failed."""


def run(served: Served, agent: Agent, mode: Mode) -> Found:
    """Let an agent work in an attempt of its own.

    Raises Lost where it fails, or where a sampled token is not in exactly one row exactly once.
    """
    attempt = f"{agent.name}-{mode.api}-{mode.streamed}".replace("_", "-")
    engine: Any = served.engine
    engine.script.clear()
    engine.script.extend(agent.said)
    engine.aside = agent.aside
    first = len(engine.prompts)
    url = served.base_url("r", attempt)
    llm = LLM(MODEL, url, served.key("r", attempt), url.removesuffix("/v1"))
    with tempfile.TemporaryDirectory() as folder:
        printed = _printed(agent, mode, llm, Path(folder))
    served.seal("r", attempt)
    return _judged(served, attempt, len(engine.prompts) - first, agent, printed)


def _printed(agent: Agent, mode: Mode, llm: LLM, folder: Path) -> str:
    environment = made(agent.environment)
    variables = {
        **{name: value for name, value in surroundings(environment).items() if not name.startswith(_SET_BY_OTHERS)},
        **llm.env(),
        "HOME": str(folder),
        "PYTHONPATH": str(AGENTS),
    }
    work = folder / "work"
    work.mkdir()
    command = agent.command(llm, environment, folder, mode, variables)
    done = subprocess.run(
        command, cwd=work, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise Lost(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return done.stdout


_SET_BY_OTHERS = ("OPENAI_", "ANTHROPIC_", "CLAUDE", "CODEX", "LITELLM")


def _judged(served: Served, attempt: str, generated: int, agent: Agent, printed: str) -> Found:
    spans = [span for span in served.ledger.spans if span.attempt_id == attempt]
    calls = calls_of(spans)
    if len(calls) != generated:
        raise Lost(f"the engine was asked {generated} times, and {len(calls)} calls are recorded")
    built = forest.build(calls)
    cut = rows.cut(built, credit.final_values(built, 1.0))
    trained = Counter(call for row in cut for call in row.call_ids if call is not None)
    sampled = {call.call_id: len(call.response_ids) for call in calls if call.delivered}
    if trained != sampled:
        raise Lost(f"sampled tokens by call {sampled}, in rows {dict(trained)}")
    for answer in agent.printed:
        if answer not in printed:
            raise Lost(f"the agent did not print {answer!r}:\n{printed[-3000:]}")
    forks = Counter(str(span.attributes[semconv.FORK_CAUSE]) for span in spans if semconv.FORK_CAUSE in span.attributes)
    return Found(len(calls), sum(call.is_housekeeping for call in calls), len(cut), dict(forks), printed)
