"""Recorded images, read again: drawn, replayed, trained; equal tokens that show other images are never one."""

import msgspec
import pytest

from lightning_rl.inspect import draw
from lightning_rl.inspect.explain import explain
from lightning_rl.inspect.replay_engine import Recording
from lightning_rl.store.contract import Attempt, AttemptTrace, Rollout, RolloutConfig, RolloutTrace
from lightning_rl.trajectories.trajectory import trajectory_of
from lightning_rl_adapters.call import Call, to_span
from lightning_rl_adapters.forest import ForestError
from lightning_rl_adapters.media import Placed, media_span
from lightning_rl_proxy.engines.base import EngineRefused
from lightning_rl_proxy.sampling import Sampling
from tests.adapters.test_media import CAT, DOG, FIRST, OTHER, PAD, TOOL


def trace_of(calls: list[Call], held: tuple[str, ...] = (CAT, DOG)) -> RolloutTrace:
    attempt = Attempt(
        attempt_id="a", rollout_id="r", sequence=1, status="succeeded", worker_id="w", lease_expires_at=0.0,
        started_at=0.0, reward=1.0,
    )  # fmt: skip
    rollout = Rollout(
        rollout_id="r", status="succeeded", mode="train", task={}, attempt_count=1, attempt_id="a", created_at=0.0,
        counting_attempt_id="a", reward=1.0, group_id=None, agent=None, resources_id=None, config=RolloutConfig(),
        metadata={},
    )  # fmt: skip
    images = [media_span("r", "a", one, data=one.encode(), media_type="image/png", at_ns=9) for one in held]
    spans = [*map(to_span, calls), *images]
    return RolloutTrace(rollout=rollout, attempts=[AttemptTrace(attempt=attempt, spans=spans, rewards=[])])


def test_equal_tokens_with_other_images_are_no_samples_of_one_prompt() -> None:
    [attempt] = explain(trace_of([FIRST, TOOL, OTHER])).attempts
    assert [fork.same_prompt for fork in attempt.forks] == [False]
    again = msgspec.structs.replace(OTHER, media=TOOL.media)
    [attempt] = explain(trace_of([FIRST, TOOL, again])).attempts
    assert [fork.same_prompt for fork in attempt.forks] == [True]


def test_a_drawing_says_how_many_images_a_call_adds() -> None:
    text = "\n".join(draw.rollout(explain(trace_of([FIRST, TOOL]))))
    assert text.count("1 image,") == 2


def test_a_trajectory_holds_the_images_of_its_rows_and_its_tokens_balance() -> None:
    found = trajectory_of(trace_of([FIRST, TOOL, OTHER]), agent_failure=0.0)
    assert found.media == {CAT: CAT.encode(), DOG: DOG.encode()}
    assert sum(sum(row.loss_mask) for row in found.rows) == found.sampled_tokens == 5
    with pytest.raises(ForestError, match=f"rollout r shows image {DOG}"):
        trajectory_of(trace_of([FIRST, TOOL, OTHER], (CAT,)), agent_failure=0.0)


def test_a_replay_answers_a_prompt_only_where_its_images_are_the_recorded_ones() -> None:
    prompt = [1, PAD, PAD, 2, 50, 51, 3, PAD, 4]
    for second, expected in ((DOG, OTHER), (CAT, TOOL)):
        recording = Recording(trace_of([FIRST, TOOL, OTHER]).attempts[0])
        found = recording.by_tokens("m", prompt, Sampling(), [Placed(1, 2, CAT), Placed(7, 1, second)])
        assert found.call == expected
    recording = Recording(trace_of([FIRST, TOOL, OTHER]).attempts[0])
    with pytest.raises(EngineRefused, match="call 2 with other images"):
        recording.by_tokens("m", prompt, Sampling(), [Placed(1, 2, DOG), Placed(7, 1, DOG)])
