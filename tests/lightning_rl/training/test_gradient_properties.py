"""Law 7 from the trace to the gradient: what a step learns depends on its rollouts alone, and equals verl where it can.

Traces become trajectories, a step's batch, its mini-batch, a gradient, as in training; the model is tiny, in float64.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rl.ppo.batch import BatchRules, StepBatch
from lightning_rl.rl.aggregation import MODES
from lightning_rl.store.contract import (
    Attempt,
    AttemptTrace,
    ErrorInfo,
    Finish,
    Rollout,
    RolloutConfig,
    RolloutRequest,
    RolloutTrace,
)
from lightning_rl.store.sql import SqlStore
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import MiniBatch, TrainingSequence
from lightning_rl.trajectories.trajectory import trajectory_of
from lightning_rl_adapters.call import Call, VersionRange, to_span
from tests.lightning_rl.ppo.test_batch import build
from tests.lightning_rl.rl.golden import grpo
from tests.lightning_rl.training.test_actor import VOCABULARY, config, forests_of_rollouts, tiny_model
from tests.random_examples import examples

MICRO_BATCHES = ({}, {"micro_batch_rows": 1}, {"micro_batch_rows": 2}, {"micro_batch_tokens": 16})
several = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Played(NamedTuple):
    """A rollout that has ended: its calls and its reward."""

    calls: list[Call]
    reward: float


@st.composite
def steps(draw: st.DrawFn) -> list[Played]:
    """The rollouts of a step with trees of any form; even ones are a group, odd ones another."""
    forests = draw(forests_of_rollouts())
    return [Played([node.call for node in f.nodes.values()], draw(st.floats(-2, 2))) for f in forests]


@st.composite
def conversations(draw: st.DrawFn) -> list[Played]:
    """A step whose rollouts are one conversation each, so one row: two groups, of two or three rollouts."""
    tokens = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=4)
    step = []
    for rollout in range(draw(st.integers(4, 6))):
        calls: list[Call] = []
        for number in range(draw(st.integers(1, 3))):
            answer = draw(tokens)
            logprobs = [-0.5 - draw(st.floats(0, 8)) for _ in answer]  # far off too, so that clips are active
            calls.append(call_of(f"{rollout}-{number}", number, draw(tokens), answer, logprobs, calls[-1:]))
        step.append(Played(calls, draw(st.floats(-2, 2))))
    return step


def call_of(
    name: str, number: int, prompt: list[int], answer: list[int], logprobs: list[float], parent: Sequence[Call] = ()
) -> Call:
    return Call(
        call_id=name, rollout_id="r", attempt_id="a", number=number, parent_id=parent[0].call_id if parent else None,
        model="m", prompt_ids=prompt, response_ids=answer, logprobs=logprobs, temperature=1.0, finish_reason="stop",
        versions=[VersionRange(0, 0, len(answer))],
    )  # fmt: skip


def trace_of(number: int, played: Played, superseded: Sequence[Sequence[Call]] = ()) -> RolloutTrace:
    """The trace of a rollout whose last attempt counts; `superseded` are the calls of those before."""
    all_calls = [*superseded, played.calls]
    attempts = [
        AttemptTrace(
            attempt=Attempt(
                attempt_id=f"a{i}", rollout_id=str(number), sequence=i + 1, worker_id="w", lease_expires_at=0.0,
                started_at=0.0, status="succeeded" if i == len(superseded) else "lost",
            ),
            spans=[to_span(msgspec.structs.replace(call, attempt_id=f"a{i}")) for call in calls],
            rewards=[],
        )
        for i, calls in enumerate(all_calls)
    ]  # fmt: skip
    last = attempts[-1].attempt.attempt_id
    rollout = Rollout(
        rollout_id=str(number), task=None, mode="train", status="succeeded", group_id=f"g{number % 2}", agent=None,
        resources_id=None, config=RolloutConfig(), metadata={}, attempt_count=len(attempts), created_at=0.0,
        attempt_id=last, counting_attempt_id=last, reward=played.reward,
    )  # fmt: skip
    return RolloutTrace(rollout=rollout, attempts=attempts)


def batch_of(traces: Sequence[RolloutTrace], *, max_tokens: int | None = None) -> StepBatch:
    return build([trajectory_of(trace, agent_failure=0.0, max_tokens=max_tokens) for trace in traces], BatchRules())


def sequences_of(traces: Sequence[RolloutTrace]) -> list[TrainingSequence]:
    sequences = batch_of(traces).sequences
    for sequence in sequences:
        sequence.old_log_probs = sequence.rollout_log_probs
    return sequences


class Learned(NamedTuple):
    loss: float
    gradient: torch.Tensor


def learned(sequences: list[TrainingSequence], parts: Sequence[int] = (), **changes: object) -> Learned:
    """Loss and gradient of one mini-batch; with `parts` (a worker for each of its rows) as the sum over workers."""
    actor = Actor(tiny_model(), config(**changes), pad_id=0)
    [mini] = actor.plan(sequences, rollouts=1)
    shares = [mini] if not parts else _shares(mini, parts)
    total = Learned(0.0, torch.zeros(sum(p.numel() for p in actor.model.parameters()), dtype=torch.float64))
    for share in shares:
        worker = Actor(tiny_model(), config(**changes), pad_id=0)
        loss = worker.accumulate(share)["actor/pg_loss"]
        total = Learned(total.loss + loss, total.gradient + gradient_of(worker.model))
    return total


def _shares(mini: MiniBatch, parts: Sequence[int]) -> list[MiniBatch]:
    of_worker = [
        [sequence for sequence, own in zip(mini.sequences, parts, strict=False) if own == worker]
        for worker in range(max(parts) + 1)
    ]
    return [MiniBatch(sequences, mini.weights) for sequences in of_worker if sequences]


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def traces_of(step: Sequence[Played]) -> list[RolloutTrace]:
    return [trace_of(number, played) for number, played in enumerate(step)]


def assert_same(one: Learned, other: Learned) -> None:
    assert other.loss == pytest.approx(one.loss, abs=1e-5)
    torch.testing.assert_close(other.gradient, one.gradient, atol=1e-5, rtol=1e-5)


# What changes nothing


@several
@given(steps(), st.sampled_from(MODES), st.sampled_from(MICRO_BATCHES), st.randoms(use_true_random=False))
def test_the_order_of_rollouts_and_the_micro_batches_change_nothing(
    step: list[Played], mode: str, micro: dict[str, int], order: random.Random
) -> None:
    traces = traces_of(step)
    expected = learned(sequences_of(traces), loss_agg_mode=mode)
    order.shuffle(traces)
    sequences = sequences_of(traces)
    order.shuffle(sequences)
    assert_same(expected, learned(sequences, loss_agg_mode=mode, **micro))


@several
@given(steps(), st.sampled_from(MODES), st.randoms(use_true_random=False))
def test_how_the_calls_of_branches_interleave_changes_nothing(
    step: list[Played], mode: str, order: random.Random
) -> None:
    """The same trees in another order of arrival; which branch trains a trunk changes with it."""
    expected = learned(sequences_of(traces_of(step)), loss_agg_mode=mode)
    other = [Played(_interleaved(played.calls, order), played.reward) for played in step]
    assert_same(expected, learned(sequences_of(traces_of(other)), loss_agg_mode=mode))


def _interleaved(calls: Sequence[Call], order: random.Random) -> list[Call]:
    """The calls with other arrival numbers: any order in which parents come before their children."""
    arrived: list[Call] = []
    waiting = list(calls)
    while waiting:
        there = {None, *(call.call_id for call in arrived)}
        call = order.choice([call for call in waiting if call.parent_id in there])
        waiting.remove(call)
        arrived.append(msgspec.structs.replace(call, number=len(arrived)))
    return arrived


@several
@given(steps(), st.data(), st.randoms(use_true_random=False))
def test_superseded_attempts_and_the_order_of_records_change_nothing(
    step: list[Played], data: st.DataObject, order: random.Random
) -> None:
    expected = learned(sequences_of(traces_of(step)))
    traces = []
    for number, played in enumerate(step):
        earlier = [list(played.calls[: data.draw(st.integers(0, 3))]) for _ in range(data.draw(st.integers(0, 2)))]
        trace = trace_of(number, played, earlier)
        for attempt in trace.attempts:
            order.shuffle(attempt.spans)
        traces.append(trace)
    assert_same(expected, learned(sequences_of(traces)))


@settings(max_examples=examples(5), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=steps())
def test_records_that_come_twice_and_attempts_that_were_retried_change_nothing(
    step: list[Played], tmp_path: Path
) -> None:
    """Through a real store: a first attempt is lost in the middle, and every record is sent twice."""
    expected = learned(sequences_of(traces_of(step)))
    (tmp_path / "store.db").unlink(missing_ok=True)
    now = [1000.0]
    store = SqlStore(f"sqlite:///{tmp_path / 'store.db'}", clock=lambda: now[0])
    ids = [f"r{number}" for number in range(len(step))]
    store.enqueue([RolloutRequest(task=None, rollout_id=name, group_id=f"g{i % 2}") for i, name in enumerate(ids)])
    lost = Finish(status="failed", error=ErrorInfo(type="Lost", message="", infrastructure=True))
    for first in (True, False):
        for claim in store.claim("w", limit=len(step)):
            rollout_id, attempt_id = claim.rollout.rollout_id, claim.attempt.attempt_id
            played = step[ids.index(rollout_id)]
            calls = [_at(call, rollout_id, attempt_id) for call in played.calls[: 1 if first else None]]
            for _ in range(2):
                store.add_spans([to_span(call) for call in calls])
            store.finish(rollout_id, attempt_id, lost if first else Finish(status="succeeded", reward=played.reward))
        now[0] += 60  # a lost attempt is not tried again at once
    found = store.traces(ids)
    store.close()
    assert [len(found[name].attempts) for name in ids] == [2] * len(ids)
    assert_same(expected, learned(sequences_of([found[name] for name in ids])))


def _at(call: Call, rollout_id: str, attempt_id: str) -> Call:
    return msgspec.structs.replace(
        call,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        call_id=f"{attempt_id}-{call.call_id}",
        parent_id=call.parent_id and f"{attempt_id}-{call.parent_id}",
    )


@several
@given(
    steps(),
    st.sampled_from(MODES),
    st.lists(st.integers(0, 2), min_size=16, max_size=16),
    st.sampled_from(MICRO_BATCHES),
)
def test_workers_that_share_a_mini_batch_in_any_way_add_up_to_it(
    step: list[Played], mode: str, parts: list[int], micro: dict[str, int]
) -> None:
    """Rows of one rollout may be with different workers; the weights are those of the whole mini-batch."""
    sequences = sequences_of(traces_of(step))
    expected = learned(sequences, loss_agg_mode=mode)
    assert_same(expected, learned(sequences, parts, loss_agg_mode=mode, **micro))


# verl's formulas, dense and by hand, where a rollout is one row


@several
@given(conversations(), st.sampled_from(MODES), st.sampled_from([0.0, 0.01]))
def test_with_one_row_per_rollout_loss_and_gradient_are_verls(
    step: list[Played], mode: str, entropy_coeff: float
) -> None:
    sequences = sequences_of(traces_of(step))
    assert len(sequences) == len(step)
    found = learned(sequences, loss_agg_mode=mode, entropy_coeff=entropy_coeff)
    assert_same(_verl(step, mode, entropy_coeff), found)


def _verl(step: Sequence[Played], mode: str, entropy_coeff: float) -> Learned:
    """Rows [B, T]: score at the last token, GRPO over rows, dual clip, `agg_loss`; masks say what counts."""
    rows = [[(t, m, p) for call in played.calls for t, m, p in _marked(call)] for played in step]
    size, longest = len(rows), max(map(len, rows))
    ids = torch.zeros(size, longest, dtype=torch.int64)
    mask = torch.zeros(size, longest, dtype=torch.float64)
    old = torch.zeros(size, longest, dtype=torch.float64)
    for i, row in enumerate(rows):
        for t, (token, sampled, logprob) in enumerate(row):
            ids[i, t], mask[i, t], old[i, t] = token, sampled, float(np.float32(logprob))
    advantages = _grpo_of_rows([played.reward for played in step])[:, None] * mask
    model, settings_of = tiny_model(), config()
    all_log_probs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    log_probs = all_log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropies = -(all_log_probs.exp() * all_log_probs).sum(-1)
    mask, old, advantages = mask[:, 1:], old[:, 1:], advantages[:, 1:]
    ratio = (log_probs - old).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - settings_of.clip_ratio_low, 1 + settings_of.clip_ratio_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    dual = torch.minimum(-advantages * settings_of.clip_ratio_c, losses)
    policy = _agg_loss(torch.where(advantages < 0, dual, losses), mask, mode, settings_of.loss_scale_factor)
    total = policy - entropy_coeff * _agg_loss(entropies, mask, mode, settings_of.loss_scale_factor)
    total.backward()
    return Learned(policy.item(), gradient_of(model))


def _marked(call: Call) -> list[tuple[int, int, float]]:
    assert call.logprobs is not None
    sampled = [(token, 1, p) for token, p in zip(call.response_ids, call.logprobs, strict=True)]
    return [(token, 0, 0.0) for token in call.prompt_ids] + sampled


def _grpo_of_rows(scores: Sequence[float]) -> torch.Tensor:
    found = torch.zeros(len(scores), dtype=torch.float64)
    for group in (0, 1):
        members = torch.tensor(scores, dtype=torch.float64)[group::2]
        found[group::2] = (members - members.mean()) / (members.std() + 1e-6)
    return found


def _agg_loss(losses: torch.Tensor, mask: torch.Tensor, mode: str, scale_factor: float | None) -> torch.Tensor:
    of_rows, tokens = (losses * mask).sum(1), mask.sum(1)
    live = (tokens > 0).sum()
    if mode == "token-mean":
        return of_rows.sum() / tokens.sum()
    if mode == "token-sum":
        return of_rows.sum()
    if mode == "seq-mean-token-sum":
        return of_rows.sum() / live
    if mode == "seq-mean-token-sum-norm":
        assert scale_factor is not None
        return of_rows.sum() / live / scale_factor
    return (of_rows / (tokens + 1e-8)).sum() / live


# GRPO's groups


@several
@given(steps(), st.integers(2, 20))
def test_dropping_overlong_rows_changes_no_advantage_of_those_that_stay(step: list[Played], max_tokens: int) -> None:
    traces = traces_of(step)
    whole, dropped = batch_of(traces), batch_of(traces, max_tokens=max_tokens)
    assert all(len(sequence) <= max_tokens for sequence in dropped.sequences)
    for before, after in zip(whole.parts, dropped.parts, strict=True):
        assert before.estimates == after.estimates
    stay = {call_id for sequence in dropped.sequences for call_id in sequence.calls}
    assert _advantages(dropped.sequences) == {
        call_id: values for call_id, values in _advantages(whole.sequences).items() if call_id in stay
    }


def _advantages(sequences: Sequence[TrainingSequence]) -> dict[str, float]:
    """The one advantage that all trained tokens of a call have."""
    found: dict[str, float] = {}
    for sequence in sequences:
        for call_id, where, _ in sequence.trained_by_call():
            [found[call_id]] = set(sequence.advantages[where].tolist())
    return found


@several
@given(steps(), steps())
def test_a_rollout_has_one_voice_in_its_group_however_many_calls_it_has(
    step: list[Played], others: list[Played]
) -> None:
    """The same rewards with the calls of quite other rollouts, or none: the same statistics."""
    rewards = [played.reward for played in step]
    expected = grpo(rewards, [number % 2 for number in range(len(step))]).tolist()
    calls = [played.calls for played in others] + [[]] * len(step)
    changed = [Played(of_rollout, reward) for of_rollout, reward in zip(calls, rewards, strict=False)]
    for played in (step, changed):
        for part, advantage in zip(batch_of(traces_of(played)).parts, expected, strict=True):
            assert [e.advantage for e in part.estimates.values()] == [advantage] * len(part.trajectory.forest.nodes)
