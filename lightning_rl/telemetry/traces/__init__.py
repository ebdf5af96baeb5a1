"""Rollout traces: rollouts as traces of a tool for looking at traces, MLflow or any that takes OTLP.

Invariant: a copy, made from what the store holds and off the way of training, which never waits for it and never reads
of it. So a run's results are the same, bit by bit, with and without.
"""

import importlib.util
from pathlib import Path

from lightning_rl.config import ConfigError
from lightning_rl.config.otlp_endpoint import traces_url
from lightning_rl.config.schema import Config, Trace
from lightning_rl.telemetry.metrics.about import PROJECT
from lightning_rl.telemetry.traces.trace_builder import Story
from lightning_rl.telemetry.traces.trace_sampling import TraceSampling
from lightning_rl.telemetry.traces.writer import TraceBackend, Writer


def check(trace: Trace) -> None:
    """Raises ConfigError where the backend cannot be written to: its library, or its endpoint, is missing."""
    if trace.backend == "mlflow" and importlib.util.find_spec("mlflow") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.trace.backend=mlflow needs a library: pip install 'lightning-rl[tracking]'"
        )
    if trace.backend == "otlp" and trace.otlp_endpoint is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.trace.backend=otlp needs to know where to: set "
            "actor_rollout_ref.rollout.trace.otlp_endpoint=http://127.0.0.1:4318"
        )


def open_writer(config: Config, run_dir: Path, tokenizer: Path) -> Writer | None:
    """What writes the traces of a run; None where none are asked for. `tokenizer` is the folder of the policy's.

    Raises what the backend's own library raises where it cannot be reached.
    """
    trace = config.actor_rollout_ref.rollout.trace
    if trace.backend is None:
        return None
    check(trace)
    return Writer(
        _backend(trace, run_dir, config.trainer.project_name or PROJECT),
        Story(tokenizer if trace.token2text else None),
        TraceSampling(trace.max_samples_per_step_per_worker, config.data.seed),
    )


def _backend(trace: Trace, run_dir: Path, project: str) -> TraceBackend:
    if trace.backend == "mlflow":
        from lightning_rl.telemetry.traces.mlflow import MlflowTraces

        return MlflowTraces(run_dir, project)
    from lightning_rl.telemetry.traces.otlp import OtlpTraces

    return OtlpTraces(traces_url(str(trace.otlp_endpoint), "actor_rollout_ref.rollout.trace.otlp_endpoint"))
