"""The teacher of SFT: the rollouts of the agent with another model, from which the policy learns."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from lightning_rl.algorithms.base import Dataset, Endpoint
from lightning_rl.algorithms.baseline import Baseline
from lightning_rl.algorithms.evaluation import Evaluation
from lightning_rl.config import ConfigError, backends
from lightning_rl.config.schema import Config
from lightning_rl.errors import Explained
from lightning_rl.inspect import export
from lightning_rl.rewards.training_rewards import Grader
from lightning_rl.sft.traces import TracedCall
from lightning_rl.store.contract import RolloutTrace
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer


class TeacherAway(Explained, RuntimeError):
    """No rollout of the teacher came to an end of its own."""


class TeacherBaseline(Baseline):
    """The agent with the model `name`: one of `gateway.backends`, else a folder or an id of the hub, which the embedded
    engine samples. Raises ConfigError where it is none of these.
    """

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(name, n=config.sft.n)
        self._gateway = config.gateway
        frozen = sorted(config.gateway.frozen_models())
        self._frozen = name in frozen
        if not self._frozen and "/" not in name and not Path(name).is_dir():
            backend_list = f"gateway.backends has {', '.join(frozen)}" if frozen else "gateway.backends is empty"
            raise ConfigError(f"sft.teacher={name}: {backend_list}, and there is no folder {Path(name).resolve()}")

    def open(self, run_dir: Path) -> Endpoint:
        """See `Algorithm`."""
        frozen = backends.registrations(self._gateway)
        if not self._frozen:
            endpoint = super().open(run_dir)
            return msgspec.structs.replace(endpoint, engines=[*endpoint.engines, *frozen])
        self.run_dir = run_dir
        return Endpoint(model=str(self.model), tokenizer=None, renderer=self.renderer, engines=frozen)

    @property
    def gateway_name(self) -> str:
        """The name by which the gateway knows the model."""
        return str(self.model) if self.policy is None else self.policy.name

    def answer(self, tasks: Dataset, grader: Grader | None) -> tuple[list[RolloutTrace], Evaluation]:
        """The agent's finished rollouts, and how good they are; what went wrong in them is told."""
        self._grader = grader
        traces = self.roll_out(f"teacher-{self._digest()}", tasks)
        evaluation = self._evaluation("teacher", traces)
        if all(trace.counting is None for trace in traces):
            raise TeacherAway(
                f"sft.teacher={self.model}: infrastructure ended all {len(traces)} of its rollouts, as a warning says: "
                "there is nothing to learn from. A run that goes on asks again"
            )
        return traces, evaluation

    def calls(self, traces: Sequence[RolloutTrace]) -> Iterator[TracedCall]:
        """The calls of rollouts."""
        vocabulary = None if self.policy is None else FastTokenizer(self.policy.folder).vocabulary_digest()
        for trace in traces:
            for record in export.call_records(trace, vocabulary):
                yield msgspec.convert(record, TracedCall, from_attributes=True)
