"""PPO through the real parts, a step: rewards of calls, weighted sums, graders, and what the step wrote down of it."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lightning_rl as lrl
from lightning_rl.rewards import FinishedRollout
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.token_account import ConservationError
from lightning_rl_adapters.span import unpack_logprobs
from tests.lightning_rl.ppo.agents import says_something, step_rewards, two_calls
from tests.lightning_rl.ppo.test_ppo import config
from tests.pages import ROOT

pytestmark = pytest.mark.e2e


def trained(tmp_path: Path, agent: Any, algorithm: lrl.PPO, tasks: list[Any]) -> step_record.StepRecord:
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(algorithm, tasks)
    [record] = step_record.read_all(tmp_path)
    return record


@pytest.mark.long
def test_rewards_of_calls_reach_them_by_their_ids(tmp_path: Path) -> None:
    algorithm = {"norm_adv_by_std_in_grpo": False, "credit": {"strategy": "return_to_go"}, "gamma": 0.5}
    record = trained(tmp_path, step_rewards, lrl.PPO(config() | {"algorithm": algorithm}), [0, 1, 2, 3])
    assert (record.step, record.rule, record.policy_version) == (1, "return_to_go", 0)
    assert len(record.rollouts) == 8
    for rollout in record.rollouts:
        task = float(rollout.rollout_id.split("-")[3])
        first, second = rollout.calls.values()
        assert (first.credit, second.credit) == (task + 0.5, 1.0)
        assert first.baseline == second.baseline == (task + 1.5) / 2
        assert first.advantage == first.credit - first.baseline
        assert rollout.reward == task + 1.0  # no final one, so the sum
        assert first.weight == second.weight > 0
        for call in (first, second):
            assert len(unpack_logprobs(call.old_log_probs)) == call.trained_tokens > 0
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["tokens/received"] == sum(c.trained_tokens for r in record.rollouts for c in r.calls.values())
    assert row["critic/advantages/max"] == max(c.advantage for r in record.rollouts for c in r.calls.values())


def test_named_rewards_are_weighed(tmp_path: Path) -> None:
    weights = {"polite": 4.0, "first": 10.0, "never": 1.0}
    record = trained(
        tmp_path, step_rewards, lrl.PPO(config() | {"algorithm": {"credit": {"weights": weights}}}), [0, 1, 2, 3]
    )
    assert {rollout.reward for rollout in record.rollouts} == {2.0}
    assert {call.credit for rollout in record.rollouts for call in rollout.calls.values()} == {2.0}
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["rollouts/groups_without_variance"] == 4.0
    assert {name: value for name, value in row.items() if name.startswith("rollouts/reward/")} == {
        "rollouts/reward/polite": 0.5
    }


TASKS = [{"n": n, "reward_model": {"ground_truth": n}} for n in range(4)]


@pytest.mark.long
def test_a_reward_function_in_a_file_gives_the_reward_also_after_a_resume(tmp_path: Path) -> None:
    scores = tmp_path / "scores.py"
    scores.write_text(
        "from pathlib import Path\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    with (Path(__file__).parent / 'asked').open('a') as file: file.write('x')\n"
        "    return {'score': ground_truth, 'length': len(solution_str), 'pred': solution_str}\n"
    )
    asked = tmp_path / "asked"
    graded = config(resume_mode="auto") | {"reward": {"custom_reward_function": {"path": str(scores)}}}

    class Stops(lrl.PPO):
        def on_sample_end(self, trajectories: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lrl.Trainer(says_something, n_runners=4, run_dir=tmp_path / "run").fit(Stops(graded), TASKS)
    assert asked.read_text() == "x" * 8
    record = trained(tmp_path / "run", says_something, lrl.PPO(graded), TASKS)
    assert asked.read_text() == "x" * 8  # the store has the grades
    for rollout in record.rollouts:
        assert rollout.reward == float(rollout.rollout_id.split("-")[3])
        assert rollout.rewards.keys() == {"reward", "length"}


def test_a_judge_sees_a_group_at_a_time(tmp_path: Path) -> None:
    seen: list[list[FinishedRollout]] = []

    def judge(rollouts: Sequence[FinishedRollout]) -> list[float]:
        seen.append(list(rollouts))
        return [float(place) for place, _ in enumerate(rollouts)]

    record = trained(tmp_path, says_something, lrl.PPO(config(), reward=judge), TASKS)
    assert [len(group) for group in seen] == [2, 2, 2, 2]
    assert all(len({rollout.group_id for rollout in group}) == 1 for group in seen)
    assert all(rollout.messages[0]["content"] == f"number {rollout.task['n']}" for group in seen for rollout in group)
    assert [rollout.reward for rollout in record.rollouts] == [0.0, 1.0] * 4


def test_what_a_rollout_lost_stops_the_run_and_names_it(tmp_path: Path) -> None:
    class Loses(lrl.PPO):
        """Its copy of one rollout lacks the last call."""

        def finished(self, requests: Any, read: Callable[[RolloutTrace], Any]) -> list[Any]:
            lost = requests[3].rollout_id

            def without(trace: RolloutTrace) -> Any:
                if trace.rollout.rollout_id == lost:
                    [attempt] = trace.attempts
                    trace = msgspec.structs.replace(
                        trace, attempts=[msgspec.structs.replace(attempt, spans=attempt.spans[:-1])]
                    )
                return read(trace)

            return super().finished(requests, without)

    with pytest.raises(ConservationError) as stopped:
        lrl.Trainer(two_calls, n_runners=4, run_dir=tmp_path).fit(Loses(config()), [0, 1, 2, 3])
    note, _ = stopped.value.__notes__  # the other one says how to resume
    assert note.startswith("these rollouts do not hold what engines handed over for them: train-0-1-")
    assert note.count("(received") == 1


def test_every_metric_of_a_run_is_on_the_page(tmp_path: Path) -> None:
    given = config() | {"reward": {"overlong_buffer": {"enable": True, "len": 4}}}
    lrl.Trainer(two_calls, n_runners=4, run_dir=tmp_path).fit(lrl.PPO(given), [0, 1, 2, 3], [4])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    page = set(re.findall(r"`([a-z_]+(?:/[A-Za-z0-9_/]+)?)`", (ROOT / "docs" / "metrics.md").read_text()))
    named = {name for row in rows for name in row}
    patterns = [name.removesuffix("NAME") for name in page if name.endswith("NAME")]
    assert {name for name in named - page if not name.startswith(tuple(patterns))} == set()
    [row] = [row for row in rows if row["step"] == 1]
    assert row["tokens/received"] == row["tokens/trained"] + row["tokens/excluded/validation"] + row["tokens/pending"]
    assert 0 <= row["perf/padding_share"] < 1
    assert row["training/staleness/max"] == 0.0


@pytest.mark.long
def test_dynamic_sampling_rolls_out_until_enough_groups_say_something(tmp_path: Path) -> None:
    """Every fourth task gives both rollouts the same reward: of each batch of four, three groups say something."""

    def judge(rollouts: Sequence[FinishedRollout]) -> list[float]:
        return [float(place * (rollout.task["n"] % 4 > 0)) for place, rollout in enumerate(rollouts)]

    tasks = [{"n": n} for n in range(12)]
    given = config(save_freq=1) | {"algorithm": {"filter_groups": {"enable": True}}}
    given["data"] = {"train_batch_size": 4, "max_response_length": 8, "shuffle": False}
    algorithm = lrl.PPO(given, reward=judge)
    record = trained(tmp_path, says_something, algorithm, tasks)
    groups = [(int(rollout.group_id.split("-")[-1].split(".")[0]), rollout.left_out) for rollout in record.rollouts]
    assert groups[:8] == [(n, None) for n in (1, 1, 2, 2, 3, 3, 5, 5)]
    others = ((0, "zero_variance"), (4, "zero_variance"), (6, "surplus"), (7, "surplus"))
    assert sorted(groups[8:]) == sorted([one for one in others for _ in range(2)])
    assert all(call.left_out == one.left_out for one in record.rollouts[8:] for call in one.calls.values())
    assert algorithm.state.batches_taken == 2
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["rollouts/groups_without_variance"] == 0.0
    assert row["critic/score/mean"] == 6 / 16  # of all
    assert row["tokens/excluded/zero_variance"] > 0
    assert row["tokens/excluded/surplus"] > 0  # of tasks 6 and 7
    again = lrl.PPO(
        given | {"trainer": given["trainer"] | {"total_training_steps": 2, "resume_mode": "auto"}}, reward=judge
    )
    lrl.Trainer(says_something, n_runners=4, run_dir=tmp_path).fit(again, tasks)
    of_step_2 = [one for one in list(step_record.read_all(tmp_path))[1].rollouts if one.left_out is None]
    tasks_of_step_2 = {int(one.group_id.split("-")[-1].split(".")[0]) for one in of_step_2}
    assert tasks_of_step_2 == {9, 10, 11, 1}  # the third batch, then the first again


@pytest.mark.long
def test_dynamic_sampling_ends_where_nothing_can_be_learned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = config() | {"algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 2}}}
    record = trained(tmp_path, says_something, lrl.PPO(given, reward=lambda group: [1.0] * len(group)), TASKS)
    assert {rollout.left_out for rollout in record.rollouts} == {"zero_variance"}
    assert "step 1 updates nothing: in 2 batches no group has rewards that differ" in caplog.text
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["tokens/received"] == row["tokens/excluded/zero_variance"] > 0
    assert "actor/pg_loss" not in row


@pytest.mark.long
@pytest.mark.parametrize("overlong", ["truncate_left", "truncate_response"])
def test_a_row_that_was_cut_is_trained_without_being_taken_for_another_models(overlong: str, tmp_path: Path) -> None:
    """What is left after a cut on the left has other log probabilities than its sampler gave it, and rightly so."""
    given = config()
    given["data"] |= {"max_prompt_length": 12, "overlong": overlong}
    lrl.Trainer(two_calls, n_runners=4, run_dir=tmp_path).fit(lrl.PPO(given), [0, 1, 2, 3])
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["tokens/excluded/truncated"] > 0
    assert row["tokens/trained"] + row["tokens/excluded/truncated"] == row["tokens/received"]
    assert row["training/rollout_probs_diff_max"] < 1e-4
