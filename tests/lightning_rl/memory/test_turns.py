"""Trainer and engine take turns on one GPU: in any order of steps, validations and checkpoints, together they never
hold more than the plan says. Every allocation of both sides is counted; the order is that of `PolicyLearner.learn` and
what it calls."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.config import compose
from lightning_rl.config.policies import policies_of
from lightning_rl.config.schema import Config
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.inference.weights.stream import as_saved, stream_of
from lightning_rl.memory import budget as budget_module
from lightning_rl.memory.budget import budget
from lightning_rl.memory.engine import ASLEEP
from lightning_rl.memory.gpus import stated
from lightning_rl.memory.traced_step import Held, TracedStep
from lightning_rl.ppo import models as models_module
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.batch import StepBatch
from lightning_rl.ppo.models import Models
from lightning_rl.ppo.policy_learner import LearnerParts, PolicyLearner
from lightning_rl.ppo.run_state import PolicyState
from lightning_rl.ppo.weight_sync import WeightSync
from lightning_rl.training.batch import MiniBatch
from tests.lightning_rl.memory.models import QWEN_15B
from tests.random_examples import examples

CHECKPOINT = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"
MIB = 2**20
PARAMETERS = 2**30
HELD = Held(
    weights=2048 * MIB, gradients=2048 * MIB, optimizer=1500 * MIB, backward=7000 * MIB, step=6000 * MIB,
    scoring=4200 * MIB,
)  # fmt: skip
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


class Card:
    """What is held by whom, and the most that ever was."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.most = 0

    def hold(self, who: str, size: int) -> None:
        self.held[who] = size
        self.most = max(self.most, sum(self.held.values()))


class CountedActor:
    """An actor's turns, in bytes; its allocator keeps what it had at its peak."""

    def __init__(self, card: Card, config: Config) -> None:
        self._card, self._place = card, config.actor_rollout_ref.actor.fsdp_config
        card.hold("weights", HELD.weights)
        self.on_gpu = self.planned = True

    def onload(self) -> None:
        self._move("weights", HELD.weights, self._place.param_offload)
        self.on_gpu = True

    def offload(self) -> None:
        if self._place.param_offload:
            self._move("weights", 0, True)
            self.on_gpu = False

    def _move(self, what: str, size: int, moves: bool) -> None:
        if moves:
            self._card.hold(what, size)

    def log_probs(self, sequences: list[Any]) -> list[Any]:
        self.onload()
        self._compute(HELD.scoring - HELD.weights - HELD.optimizer)
        return []

    def plan(self, sequences: list[Any], rollouts: int) -> list[Any]:
        return [MiniBatch([], {})] if self.planned else []

    def update(self, plan: list[Any]) -> dict[str, float]:
        assert plan
        self.onload()
        self._card.hold("optimizer", HELD.optimizer)
        self._compute(HELD.update - HELD.weights - HELD.optimizer)
        if self._place.optimizer_offload:
            self._card.hold("optimizer", 0)
        return {}

    def _compute(self, size: int) -> None:
        self._card.hold("kept", max(size, self._card.held.get("kept", 0)))


class Colocated:
    """A run's own parts around models that are only counted."""

    def __init__(self, card: Card, config: Config, share: int, run_dir: Path) -> None:
        self.card, self.config = card, config
        options = Options(python="", dtype="bfloat16", device="cuda", processed_logprobs=False, sleeps=True)
        policy: Any = VllmPolicy(ModelSource(CHECKPOINT, device="cpu"), options, run_dir, urls=["http://127.0.0.1:1"])
        engine_weights, woken = 2 * PARAMETERS, []

        def wake(tag: str) -> None:
            woken.append(tag)
            card.hold("engine", share if tag == "kv_cache" else ASLEEP + engine_weights)

        self.control = control = policy._members[0].control
        control.sleep = lambda *, keep_weights: card.hold("engine", ASLEEP)
        control.wake = wake
        policy._transfer = SimpleNamespace(offer=self._offer, give=self._give, forget=lambda _: None)
        policy._prove = lambda *_: None
        self.models: Any = Models.__new__(Models)
        self.models.config, self.models.policy, self.models._crew = config, policy, None
        self.models._roles = frozenset({"actor"})
        self.models._own = SimpleNamespace(
            weight_stream=lambda form: as_saved(policy.model, stream_of(policy.model)), average_teachers=lambda: None
        )
        self.models.actor = self.actor = CountedActor(card, config)
        policy.make_room = self.models._make_room
        store: Any = SimpleNamespace(pause=lambda *_, **__: None, resume=lambda *_, **__: None)
        self.weights = WeightSync(config, store, self.models)
        [of_run] = policies_of(config)
        self.learner = PolicyLearner(of_run, resolved_config.step_rules(compose()))
        self.learner.models, self.learner.state = self.models, PolicyState(None, "policy")
        self.learner.run = SimpleNamespace(step=1)  # type: ignore[assignment]
        self.learner._update_finds_old_log_probs = lambda _: False  # type: ignore[method-assign]
        nobody: Any = SimpleNamespace(enter=lambda batch: None, write_record=lambda *_: None)
        self.learner.parts = LearnerParts(self, nobody, self.weights, nobody)  # type: ignore[arg-type]
        card.hold("engine", share)  # it was started with the trainer's weights beside it, or in main memory

    def _offer(self, source: Any, version: int) -> None:
        self._source = source
        if self.config.actor_rollout_ref.rollout.weight_transfer == "file":
            list(source)

    def _give(self, control: Any) -> None:
        if self.config.actor_rollout_ref.rollout.weight_transfer == "ipc":
            assert self.actor.on_gpu
            list(self._source)
            self.card.hold("buffer", 600 * MIB)
            self.card.hold("buffer", 0)

    compared = False

    def set_old_log_probs(self, batch: StepBatch, log_probs: Any, version: int) -> dict[str, float]:
        """As a `SamplerCheck` that does not take the sampler's."""
        log_probs(batch.sequences)
        return {}

    def step(self, *, updates: bool) -> None:
        self.actor.planned = updates
        before = self.learner.state.policy_version
        self.learner.learn([], {})
        assert self.learner.state.policy_version == before + updates

    def resume(self) -> None:
        """As `PPO.run` begins."""
        self.weights.sleep()
        self.actor.onload()
        self.weights.restore(self.learner.state.policy_version)
        self.actor.offload()
        self.weights.wake()


@pytest.mark.parametrize("transfer", ["file", "ipc"])
@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["step", "skipped step", "validation", "checkpoint", "resume"]), max_size=8),
)
@settings(max_examples=examples(40), deadline=None)
def test_together_they_hold_what_the_plan_says_at_most(
    tmp_path_factory: pytest.TempPathFactory, transfer: str, params: bool, optimizer: bool, events: list[str]
) -> None:
    words = [f"{ROLLOUT}name=vllm", f"{ROLLOUT}free_cache_engine=true", f"{ROLLOUT}weight_transfer={transfer}",
             f"{ACTOR}fsdp_config.param_offload={params}", f"{ACTOR}fsdp_config.optimizer_offload={optimizer}",
             f"{ROLLOUT}dtype=bfloat16", f"{ROLLOUT}gpu_memory_utilization=0.2"]  # fmt: skip
    config = compose(command_line=words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget_module, "CONTEXT", 0)  # what no side allocates
        patch.setattr(budget_module, "FRAGMENTATION", 0)
        planned = budget(config, QWEN_15B, TracedStep(PARAMETERS, HELD), stated("24"))
        assert planned.engine is not None
        card = Card()
        patch.setattr(models_module, "free_unused_memory", lambda: card.hold("kept", 0))
        run = Colocated(card, config, planned.engine.share, tmp_path_factory.mktemp("run"))
        run.resume()
        card.most = 0  # what the beginning holds is asked of the steps too
        for event in events:
            if event in ("step", "skipped step"):
                run.step(updates=event == "step")
            elif event == "resume":
                run.resume()
            assert card.held["engine"] == planned.engine.share  # calls are answered
            assert card.held["kept"] == 0
            assert (card.held["weights"] == 0) == params
    assert card.most <= planned.fullest.total
