"""Teachers: what a frozen model says of rows, which calls it teaches, and the gradient of the loss against it."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import urllib3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rl.inference.servers.errors import Unreached
from lightning_rl.inference.sglang import ScorerUnreached, ScoresRefused
from lightning_rl.inference.vllm.control import VllmRefused
from lightning_rl.rl.distillation import DistillationOptions, forward_kl, jensen_shannon, reverse_kl
from lightning_rl.training import teacher as teacher_module
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.forward import Forward
from lightning_rl.training.teacher import (
    AveragedTeacher,
    FrozenTeacher,
    Scores,
    ServedTeacher,
    TeacherRefused,
    ask_teachers,
)
from lightning_rl_adapters import forest
from tests.lightning_rl.training.test_actor import (
    VOCABULARY,
    config,
    forests_of_rollouts,
    merged,
    per_call,
    tiny_model,
    two_answers,
)
from tests.random_examples import examples

EVERY = VOCABULARY - 1  # tokens: all but one, whose class then is exact


def other_model() -> Any:
    model = tiny_model()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def taught(sequences: list[TrainingSequence], top: int = 0) -> list[TrainingSequence]:
    ask_teachers(sequences, {"t": FrozenTeacher(other_model(), 0)}, lambda *_: "t", top)
    return sequences


def distributions(model: Any, sequence: TrainingSequence) -> torch.Tensor:
    """Log probabilities [K, V] of what the trained tokens were sampled from, by the plain model."""
    logits = model(torch.from_numpy(sequence.token_ids)[None]).logits[0, sequence.trained - 1]
    return (logits / torch.from_numpy(sequence.temperature)[:, None]).log_softmax(-1)


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(forests_of_rollouts(), st.sampled_from([{}, {"rows": 1}, {"tokens": 12}]), st.sampled_from([0, 1, 5]))
def test_it_says_what_the_model_says_however_much_is_computed_at_once(
    rollouts: list[forest.Forest], bounds: dict[str, int], top: int
) -> None:
    sequences = merged(rollouts)
    model = other_model()
    forward = Forward(model, 0, packed=True)
    for sequence, found in zip(
        sequences, FrozenTeacher(model, 0, forward=forward, **bounds).score(sequences, top), strict=True
    ):
        whole = distributions(model, sequence).detach()
        own = torch.from_numpy(sequence.token_ids[sequence.trained])
        assert found.log_probs == pytest.approx(whole.gather(-1, own[:, None])[:, 0].numpy(), abs=1e-5)
        if top:
            assert found.top_log_probs == pytest.approx(whole.topk(top).values.numpy(), abs=1e-5)
            assert found.top_ids is not None
            assert whole.gather(-1, torch.from_numpy(found.top_ids)).numpy() == pytest.approx(
                found.top_log_probs, abs=1e-5
            )


def test_ids_beyond_the_tokenizers_are_not_among_the_likely_ones() -> None:
    [found, *_] = FrozenTeacher(other_model(), 0, vocabulary=6).score(two_answers(), 6)
    assert found.top_ids is not None
    assert {int(each) for each in found.top_ids.ravel()} == set(range(6))


def gradient(sequences: list[TrainingSequence], options: DistillationOptions, **changes: object) -> torch.Tensor:
    for sequence in sequences:
        sequence.old_log_probs = sequence.rollout_log_probs
    actor = Actor(tiny_model(), config(distillation=options, **changes), pad_id=0)
    [mini] = actor.plan(sequences, rollouts=10)
    actor.accumulate(mini)
    return torch.cat([p.grad.ravel() for p in actor.model.parameters() if p.grad is not None])


def told_of(sequences: list[TrainingSequence], options: DistillationOptions) -> dict[str, float]:
    """The metrics of an update."""
    for sequence in sequences:
        sequence.old_log_probs = sequence.rollout_log_probs
    actor = Actor(tiny_model(), config(distillation=options), pad_id=0)
    return actor.update(actor.plan(sequences, rollouts=10))


@pytest.mark.parametrize(
    ("mode", "divergence"),
    [("forward_kl_tail", forward_kl), ("reverse_kl_tail", reverse_kl), ("jsd_tail", jensen_shannon)],
)
def test_alone_it_draws_the_policy_by_the_divergences_own_gradient(mode: str, divergence: Any) -> None:
    sequences = taught(two_answers(), EVERY)
    student, teacher = tiny_model(), other_model()
    each = [divergence(distributions(student, s), distributions(teacher, s).detach()) for s in sequences]
    torch.cat(each).mean().backward()
    expected = torch.cat([p.grad.ravel() for p in student.parameters() if p.grad is not None])
    options = DistillationOptions(loss_mode=mode, topk=EVERY, use_task_rewards=False, distillation_loss_coef=7.0)
    torch.testing.assert_close(gradient(sequences, options), expected, atol=1e-6, rtol=1e-4)


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    forests_of_rollouts(),
    st.sampled_from(
        [
            DistillationOptions(loss_mode="k1", use_policy_gradient=True, loss_max_clamp=2.0),
            DistillationOptions(loss_mode="k1", use_policy_gradient=True, control_variate=True, topk=4),
            DistillationOptions(loss_mode="jsd_tail", topk=4, use_task_rewards=False),
            DistillationOptions(loss_mode="forward_kl_topk", topk=4, log_prob_min_clamp=-10.0),
        ]
    ),
    st.sampled_from([1, 2, None]),
)
def test_rows_and_micro_batches_change_nothing(
    rollouts: list[forest.Forest], options: DistillationOptions, rows: int | None
) -> None:
    whole = gradient(taught(merged(rollouts), options.top), options)
    cut = gradient(taught(per_call(rollouts), options.top), options, micro_batch_rows=rows)
    torch.testing.assert_close(whole, cut, atol=1e-6, rtol=1e-4)


def test_beside_rewards_it_counts_by_its_coefficient() -> None:
    options = [
        DistillationOptions(loss_mode="k2", distillation_loss_coef=coef, use_task_rewards=rewards)
        for coef, rewards in ((0.0, True), (0.5, True), (0.5, False))
    ]
    rewards, both, teacher = (gradient(taught(two_answers()), each) for each in options)
    torch.testing.assert_close(both, rewards + 0.5 * teacher)
    assert gradient(taught(two_answers()), options[0]).abs().sum() > 0


def test_a_policy_that_is_its_own_teacher_learns_nothing_of_it() -> None:
    sequences = two_answers()
    ask_teachers(sequences, {"t": FrozenTeacher(tiny_model(), 0)}, lambda *_: "t", 0)
    options = DistillationOptions(loss_mode="k1", use_policy_gradient=True, use_task_rewards=False)
    assert gradient(sequences, options).abs().max() < 1e-6


def test_each_call_has_its_own_teacher_and_may_have_none() -> None:
    sequences = two_answers()
    for number, sequence in enumerate(sequences):
        sequence.calls = {f"c{number}": int(sequence.trained[0])}
    teachers = {"a": FrozenTeacher(tiny_model(), 0), "b": FrozenTeacher(other_model(), 0)}
    ask_teachers(sequences, teachers, lambda _, call_id: {"c0": "b"}.get(call_id), 2)
    first, second = sequences
    assert first.teacher_log_probs == pytest.approx(teachers["b"].score([first], 0)[0].log_probs)
    assert second.teacher_log_probs is not None
    assert np.isnan(second.teacher_log_probs).all()
    options = DistillationOptions(loss_mode="jsd_tail", topk=2, use_task_rewards=False)
    alone = [first]
    assert gradient(sequences, options).abs().sum() > 0
    assert gradient(alone, options).abs().sum() > 0
    both, taught_alone = (told_of(each, options) for each in (sequences, alone))
    assert 0 < both["distillation/taught_share"] < 1 == taught_alone["distillation/taught_share"]
    for mass in ("distillation/teacher_mass", "distillation/student_mass"):
        assert both[mass] == pytest.approx(taught_alone[mass])


class Says:
    """A teacher that says the same of every token: minus its number, and that its number is the most likely one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def score(self, sequences: list[TrainingSequence], top: int) -> list[Scores]:
        assert sequences, "a teacher of no call is not asked"
        of_each = [np.full(len(sequence.trained), -self.number, np.float32) for sequence in sequences]
        return [Scores(one, np.full((len(one), 1), self.number), one[:, None]) for one in of_each]


def test_of_a_row_of_several_calls_each_hears_its_own_teacher() -> None:
    ones = np.ones(4, np.float32)
    row = TrainingSequence(0, np.arange(6), np.arange(2, 6), -ones, ones, ones)
    row.calls = {f"c{n}": 2 + n for n in range(4)}
    teachers = {name: Says(number) for number, name in enumerate("abc", 1)}
    ask_teachers([row], teachers, lambda _, call_id: {"c0": "a", "c1": "b", "c2": "a"}.get(call_id), 1)
    expected = [-1, -2, -1, np.nan]
    assert row.teacher_log_probs == pytest.approx(expected, nan_ok=True)
    assert row.teacher_top_ids is not None
    assert row.teacher_top_ids[:3].tolist() == [[1], [2], [1]]
    assert row.teacher_top_log_probs is not None
    assert row.teacher_top_log_probs[:, 0] == pytest.approx(expected, nan_ok=True)


def test_an_averaged_teacher_goes_a_part_of_the_way_to_the_policy() -> None:
    policy, before = tiny_model(), dict(other_model().named_parameters())
    teacher = AveragedTeacher(other_model(), 0, None, 0.25)
    teacher.follow(policy)
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(teacher.weights[name], 0.75 * before[name] + 0.25 * weight)


def test_a_server_is_not_asked_about_what_it_cannot_score() -> None:
    sequence = two_answers()[0]
    sequence.temperature = np.full_like(sequence.temperature, 0.7)
    with pytest.raises(TeacherRefused, match=r"temperature 0.7, .*set actor_rollout_ref.rollout.temperature=1"):
        ServedTeacher("big", ["http://127.0.0.1:9"], VOCABULARY).score([sequence], 0)
    teacher = ServedTeacher("big", ["http://127.0.0.1:9"], VOCABULARY)
    teacher.begin(sequence, 0)
    assert not teacher._begun
    seen = a_row(1)
    seen.images = ["one"]  # type: ignore[assignment]
    with pytest.raises(TeacherRefused, match="shows images, and servers score text alone"):
        teacher.score([seen], 0)


def test_a_row_of_which_nothing_is_trained_is_neither_skipped_nor_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, none = served(AtTimesAway(0), monkeypatch), np.zeros(0, np.float32)
    row = TrainingSequence(0, np.asarray([4, 5]), np.zeros(0, np.int64), none, none, none)
    for top in (0, 2):
        [found] = teacher.score([row], top)
        assert found.log_probs.shape == (0,)
    assert found.top_ids is not None
    assert (found.top_ids.shape, teacher.skipped) == ((0, 2), 0)
    teacher.close()


class AtTimesAway:
    """A server that is away so many times, and then says -1 of every token; `because` is how it is away."""

    url = "http://teacher.example"

    def __init__(self, away: int, because: Exception | None = None) -> None:
        self.away, self.asked = away, list[list[int]]()
        self.because = because or Unreached(f"vLLM at {self.url} does not answer")

    def score(self, token_ids: list[int], top: int) -> list[dict[str, Any]]:
        self.asked.append(token_ids)
        if len(self.asked) <= self.away:
            raise self.because
        return [{str(each): {"logprob": -1.0, "rank": 1}} for each in token_ids]


def served(server: AtTimesAway, monkeypatch: pytest.MonkeyPatch, **more: Any) -> ServedTeacher:
    monkeypatch.setattr(teacher_module, "_AWAY_SECONDS", 0.01)
    made = ServedTeacher("big", [server.url], VOCABULARY, **more)
    monkeypatch.setitem(made.__dict__, "_servers", [server])
    return made


def test_rows_that_were_begun_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = AtTimesAway(0)
    teacher, rows = served(server, monkeypatch), [a_row(n) for n in range(4)]
    for row in rows[:2]:
        teacher.begin(row, 0)
        teacher.begin(a_row(int(row.token_ids[0])), 0)  # the same row, made again
    assert [each.log_probs.tolist() for each in teacher.score(rows, 0)] == [[-1.0, -1.0]] * 4
    assert sorted(server.asked) == sorted(row.token_ids.tolist() for row in rows)
    teacher.score(rows, 0)
    assert len(server.asked) == 8, "what was said is given once: the policy changes, a frozen teacher is asked again"
    teacher.close()


def test_rows_are_dealt_out_among_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [AtTimesAway(0), AtTimesAway(0)]
    teacher = served(servers[0], monkeypatch)
    monkeypatch.setitem(teacher.__dict__, "_servers", servers)
    teacher.score([a_row(n) for n in range(4)], 0)
    assert [len(server.asked) for server in servers] == [2, 2]
    teacher.close()


def test_each_server_must_write_texts_as_the_policy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[Any] = [AtTimesAway(0), AtTimesAway(0)]
    teacher = served(servers[0], monkeypatch)
    monkeypatch.setitem(teacher.__dict__, "_servers", servers)
    servers[0].tokenize, servers[1].tokenize = lambda _: [1, 2], lambda _: [1, 3]
    with pytest.raises(TeacherRefused, match=r"writes 'a b' as the tokens \[1, 3\], and the policy as \[1, 2\]"):
        teacher.check([("a b", [1, 2])])
    servers[1].tokenize = servers[0].tokenize
    teacher.check([("a b", [1, 2])])


def test_what_was_asked_ahead_is_kept_for_some_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    server = AtTimesAway(0)
    teacher = served(server, monkeypatch)
    teacher.begin(a_row(1), 0)
    for _ in range(teacher_module._KEPT - 1):
        teacher.score([], 0)
    teacher.score([a_row(1)], 0)
    assert len(server.asked) == 1
    teacher.begin(a_row(2), 0)
    for _ in range(teacher_module._KEPT):
        teacher.score([], 0)
    assert not teacher._begun, "its rollout was left out"
    teacher.close()


def test_the_likely_tokens_are_those_of_the_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*others: tuple[int, int]) -> list[Any]:
        """Of token 5 that it has rank 9, and of others which."""
        each = {"5": {"logprob": -9.0, "rank": 9}} | {str(one): {"logprob": -1.0, "rank": rank} for one, rank in others}
        return [{}, {}, each, each]

    server = AtTimesAway(0)
    teacher, row = served(server, monkeypatch), a_row(5)
    row.token_ids[2:] = 5
    monkeypatch.setattr(server, "score", lambda token_ids, top: said((3, 2), (4, 1)))
    [found] = teacher.score([row], 2)
    assert found.log_probs.tolist() == [-9.0, -9.0]
    assert found.top_ids is not None
    assert found.top_ids.tolist() == [[4, 3], [4, 3]]
    with pytest.raises(TeacherRefused, match="of token 5 and the 4 most likely ones it told of"):
        teacher.score([row], 4)
    monkeypatch.setattr(server, "score", lambda token_ids, top: said((VOCABULARY, 1)))
    with pytest.raises(TeacherRefused, match=f"finds token {VOCABULARY} likely, and the policy's tokenizer has"):
        teacher.score([row], 1)
    teacher.close()


def test_a_step_waits_for_a_server_that_is_away_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = served(server := AtTimesAway(3), monkeypatch)
    assert teacher.score([a_row(1)], 0)[0].log_probs.tolist() == [-1.0, -1.0]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "teacher big: vLLM at http://teacher.example does not answer; the step waits for it" in said[0]
    assert "answers again" in said[1]
    server.away = len(server.asked) + 1
    teacher.score([a_row(1)], 0)
    assert len(caplog.records) == 4, "it was away again"
    teacher.close()


@pytest.mark.parametrize("top", [0, 2])
def test_a_row_is_skipped_where_the_run_shall_not_wait(
    top: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = served(AtTimesAway(1), monkeypatch, when_away="skip")
    [found] = teacher.score([a_row(1)], top)
    assert np.isnan(found.log_probs).all()
    assert (found.top_log_probs is None) == (top == 0)
    assert teacher.skipped == 1
    assert "the step goes on without it" in caplog.text
    teacher.close()


@pytest.mark.parametrize(
    ("error", "is_busy"),
    [
        (VllmRefused("vLLM: ", urllib3.HTTPResponse(b"overloaded", status=503)), True),
        (ScoresRefused("SGLang: slow down", 429), True),
        (ScorerUnreached("SGLang does not answer"), True),
        (VllmRefused("vLLM: ", urllib3.HTTPResponse(b"too long", status=400)), False),
        (ScoresRefused("SGLang: broken", 500), False),
    ],
)
def test_a_server_that_is_busy_is_away_and_any_other_error_ends_the_run(
    error: Exception, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = served(AtTimesAway(1, error), monkeypatch)
    if is_busy:
        assert teacher.score([a_row(1)], 0)[0].log_probs.tolist() == [-1.0, -1.0]
    else:
        with pytest.raises(type(error)) as raised:
            teacher.score([a_row(1)], 0)
        needs = "--max-model-len of" if isinstance(error, VllmRefused) else "--context-length for"
        assert (
            f"asked about 4 tokens, the 0 most likely of each place: the server needs {needs}"
            in (raised.value.__notes__[0])
        )
    teacher.close()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([{}, {}, {}], "of 4 tokens, and it told of 3"),
        ([{}, {}, {"6": {"logprob": -1.0, "rank": 1}}, {"7": {"logprob": None, "rank": 1}}], "got `null`"),
        (
            [{}, {}, {"6": {"logprob": -1.0, "rank": 1}}, {"8": {"logprob": -1.0, "rank": 1}}],
            "of token 7 and .* told of",
        ),
    ],
)
def test_a_server_that_says_something_else_is_named(
    said: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = AtTimesAway(0)
    monkeypatch.setattr(server, "score", lambda token_ids, top: said)
    teacher = served(server, monkeypatch)
    with pytest.raises(TeacherRefused, match=f"server at {server.url} did not answer what it was asked.*{message}"):
        teacher.score([a_row(1)], 0)
    teacher.close()


def test_a_server_that_writes_no_tokens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    says_nothing = SimpleNamespace(url="http://teacher.example", tokenize=lambda text: {}["tokens"])
    teacher = served(cast(Any, says_nothing), monkeypatch)
    with pytest.raises(TeacherRefused, match=r"what it was asked: the tokens of a text \(KeyError: 'tokens'"):
        teacher.check([("hello", [1])])
    teacher.close()


def test_a_row_that_was_skipped_ahead_counts_where_its_step_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = served(AtTimesAway(1), monkeypatch, when_away="skip")
    teacher.begin(a_row(1), 0)
    [(_, begun)] = teacher._begun.values()
    assert np.isnan(begun.result(20).log_probs).all()
    before = teacher.skipped
    teacher.score([a_row(1)], 0)
    assert teacher.skipped == before + 1, "by this a step knows that a teacher was away"
    teacher.close()


def test_a_run_that_ends_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = served(AtTimesAway(10**9), monkeypatch)
    teacher.begin(a_row(1), 0)
    [(_, begun)] = teacher._begun.values()
    teacher.close()
    assert isinstance(begun.exception(timeout=20), Unreached)


def a_row(first: int) -> TrainingSequence:
    """Four tokens, the last two of them trained."""
    ones = np.ones(2, np.float32)
    return TrainingSequence(0, np.asarray([first, 5, 6, 7]), np.asarray([2, 3]), -ones, ones, ones)
