"""The batch that a trainer of one's own gets: each line is a row of a trace, and none of Agent-lightning's defects.

Most tests use a store whose rollouts end at once; the last ones a real server, runners, and the embedded engine.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_rl as lrl
from lightning_rl.algorithms.base import Endpoint
from lightning_rl.compat.daemon import AgentModeDaemon, DaemonOrder
from lightning_rl.data.dataset import TaskError
from lightning_rl.store.contract import Attempt, AttemptTrace, ErrorInfo, Finish, Rollout, RolloutRequest, RolloutTrace
from lightning_rl.store.errors import NotAllowed
from lightning_rl_adapters import forest, rows
from lightning_rl_adapters.call import Call, calls_of, to_span
from lightning_rl_adapters.rows import Row
from tests.adapters.forests import attempts, make_call
from tests.lightning_rl.control_plane import conftest as server_parts
from tests.random_examples import examples

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # runners need not load torch
served = server_parts.served

PAD = 9999
Played = tuple[list[Call], float | str | None]  # calls, and a reward (None: gave none), or how it ended


class EndedStore:
    """A store whose rollouts have ended as soon as they are asked for, as `agent` (task, number within its sample)
    says: with a reward, without one, `failed` by the agent, or `lost` by the infrastructure."""

    def __init__(self, agent: Callable[[dict[str, Any], int], Played]) -> None:
        self.agent = agent
        self.asked: dict[str, RolloutRequest] = {}
        self.published: list[Any] = []

    def state(self) -> dict[str, Any]:
        return {"models": {}}

    def engines(self) -> list[Any]:
        return []

    def publish(self, resources: Mapping[str, Any]) -> Any:
        self.published.append(resources)
        return type("Published", (), {"resources_id": f"s{len(self.published)}"})

    def enqueue(self, requests: Sequence[RolloutRequest]) -> None:
        self.asked |= {str(request.rollout_id): request for request in requests}

    def cancel(self, rollout_id: str) -> None:
        self.asked.pop(rollout_id)

    def wait(self, rollout_ids: Sequence[str], wait_seconds: float, gather_seconds: float = 0.01) -> list[Rollout]:
        return [self.trace(rollout_id).rollout for rollout_id in rollout_ids[:3]]  # some now, the others later

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        return {rollout_id: self.trace(rollout_id) for rollout_id in rollout_ids}

    def trace(self, rollout_id: str) -> RolloutTrace:
        request = self.asked[rollout_id]
        calls, outcome = self.agent(request.task, int(rollout_id.rsplit("-", 1)[1]))
        failed, reward = outcome in ("failed", "lost"), None if isinstance(outcome, str) else outcome
        attempt = Attempt(
            attempt_id="a", rollout_id=rollout_id, sequence=1, status="failed" if failed else "succeeded",
            worker_id="w", lease_expires_at=0.0, started_at=0.0, reward=reward,
        )  # fmt: skip
        rollout = Rollout(
            rollout_id=rollout_id, task=request.task, mode=request.mode, status=attempt.status,  # type: ignore[arg-type]
            group_id=request.group_id, attempt_id="a", agent=None, resources_id=None, config=request.config,
            metadata={}, attempt_count=1, created_at=0.0, reward=reward,
            counting_attempt_id=None if outcome == "lost" else "a",
            error=ErrorInfo(type="ValueError", message="no model 'm'") if failed else None,
        )  # fmt: skip
        spans = [to_span(call) for call in calls]
        return RolloutTrace(rollout=rollout, attempts=[AttemptTrace(attempt=attempt, spans=spans, rewards=[])])


def daemon_of(store: Any, **more: Any) -> AgentModeDaemon:
    values = {"train_rollout_n": 2, "train_information": {"model": "m", "temperature": 0.7}, "pad_token_id": PAD}
    return AgentModeDaemon(store, **(values | more))


def rolled_out(
    agent: Callable[[dict[str, Any], int], Played], samples: int = 1, *, is_train: bool = True, **more: Any
) -> AgentModeDaemon:
    """A daemon whose `samples` samples {"i": number} have been rolled out."""
    daemon = daemon_of(EndedStore(agent), **more)
    daemon.start()
    daemon.set_up_data_and_server({"i": list(range(samples))}, None, is_train=is_train)
    daemon.run_until_all_finished(verbose=False)
    return daemon


def batch_of(calls: list[Call], reward: float | None = 1.0, *, prompt: int = 8, response: int = 8) -> Any:
    """The batch of one rollout, and its metrics."""
    daemon = rolled_out(lambda task, k: (calls, reward), train_rollout_n=1)
    return daemon.get_train_data_batch(prompt, response, "cpu")


def real(ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    return ids[mask.bool()].tolist()


def lines_of(batch: Any) -> list[tuple[list[int], list[int], list[int]]]:
    """Per line the prompt, the response, and the mask of the response, without padding."""
    width = batch["prompts"].shape[1]
    found = []
    for i in range(len(batch["prompts"])):
        before, after = batch["attention_mask"][i, :width], batch["attention_mask"][i, width:]
        prompt, response = real(batch["prompts"][i], before), real(batch["responses"][i], after)
        found.append((prompt, response, batch["response_mask"][i, : len(response)].tolist()))
    return found


# What stands in a batch


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(attempts(max_calls=6), min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 12))
def test_every_line_is_a_row_of_the_forest_and_every_token_is_accounted_for(
    rollouts: list[list[Call]], width: int, length: int
) -> None:
    daemon = rolled_out(lambda task, k: (rollouts[task["i"]], 0.5), len(rollouts), train_rollout_n=1)
    batch, metrics = daemon.get_train_data_batch(width, length, "cpu")
    expected = [
        (sample, row)
        for sample, calls in enumerate(rollouts)
        for row in rows.cut(forest.build(calls), {})
        if row.excluded is None and any(row.loss_mask)
    ]
    assert len(expected) == len(batch["prompts"])
    for i, (sample, row) in enumerate(expected):
        assert batch["i"][i] == sample
        check_line(batch, i, row, 0.5)
    trained = int(batch["response_mask"][~batch["is_drop_mask"]].sum())
    excluded = sum(n for name, n in metrics.items() if name.startswith("training/tokens/excluded/"))
    assert metrics["training/tokens/trained"] == trained
    assert trained + excluded == sum(len(call.response_ids) for calls in rollouts for call in calls)


def check_line(batch: Any, i: int, row: Row, reward: float) -> None:
    """Line `i` of a batch against the row that it was made of."""
    width, length = batch["prompts"].shape[1], batch["responses"].shape[1]
    start = row.loss_mask.index(1)
    prompt, response, mask = lines_of(batch)[i]
    assert prompt == row.token_ids[:start][-width:]
    assert response == row.token_ids[start : start + length]
    assert mask == row.loss_mask[start : start + length]
    assert batch["is_drop_mask"][i].item() == (start > width)
    assert batch["response_mask"][i, len(mask) :].sum() == 0
    logprobs = [p or 0.0 for p in row.logprobs[start : start + length]]
    assert batch["rollout_log_probs"][i, : len(mask)].tolist() == pytest.approx(logprobs)
    assert batch["rollout_log_probs"][i, len(mask) :].abs().sum() == 0
    scores = batch["token_level_scores"][i]
    last = max(j for j, trained in enumerate(mask) if trained)
    assert (scores.nonzero().flatten().tolist(), scores[last].item()) == ([last], pytest.approx(reward))
    assert torch.equal(batch["input_ids"][i], torch.cat([batch["prompts"][i], batch["responses"][i]]))
    attention = batch["attention_mask"][i]
    places = list(range(int(attention.sum())))
    assert batch["position_ids"][i][attention.bool()].tolist() == places
    assert batch["position_ids"][i].min() == 0


def test_a_small_batch_in_full() -> None:
    calls = [make_call(0, None, 2, 2), make_call(1, 0, 1, 1)]
    batch, metrics = batch_of(calls, 0.25, prompt=3, response=5)
    assert batch["prompts"].tolist() == [[PAD, 0, 1]]
    assert batch["responses"].tolist() == [[50, 51, 100, 150, PAD]]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 1, 0]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 5, 5]]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, -1.0, 0.0, -0.5, 0.0]]
    assert batch["token_level_scores"].tolist() == [[0, 0, 0, 0.25, 0]]
    assert metrics["training/reward"] == 0.25
    assert (metrics["training/n_rows"], metrics["training/tokens/trained"]) == (1, 3)
    dtypes = {name: value.dtype for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert dtypes.pop("is_drop_mask") == torch.bool
    assert dtypes.pop("token_level_scores") == dtypes.pop("rollout_log_probs") == torch.float32
    assert set(dtypes.values()) == {torch.int64}


def test_samples_are_rolled_out_n_times_and_their_columns_come_along() -> None:
    daemon = daemon_of(EndedStore(lambda task, k: ([make_call(0, None)], float(k))), train_rollout_n=3)
    daemon.start()
    columns = {
        "question": np.array(["one", "two"], dtype=object),
        "index": np.arange(2),
        "extra": [{"x": np.float32(0.5)}, {"y": [1]}],
        "ids": torch.tensor([[1, 2], [3, 4]]),
    }
    daemon.set_up_data_and_server(columns, [], is_train=True)
    daemon.run_until_all_finished(verbose=False)
    batch, _ = daemon.get_train_data_batch(4, 4, "cpu")
    assert batch["question"].tolist() == ["one"] * 3 + ["two"] * 3
    assert batch["index"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["extra"].tolist() == [{"x": 0.5}] * 3 + [{"y": [1]}] * 3
    assert batch["ids"].tolist() == [[1, 2]] * 3 + [[3, 4]] * 3
    assert batch["token_level_scores"].sum(1).tolist() == [0, 1, 2] * 2
    assert len(set(batch["uid"])) == 2
    assert len(set(batch["rollout_id"])) == 6
    assert all(column.dtype == object for name, column in batch.items() if isinstance(column, np.ndarray))


def test_the_infrastructures_failures_are_left_out_and_the_agents_get_the_fill_value() -> None:
    ends: list[Any] = [1.0, None, "failed", "lost"]
    daemon = rolled_out(
        lambda task, k: ([make_call(0, None)], ends[task["i"]]), 4, train_rollout_n=1, reward_fillna_value=-1.0
    )
    batch, metrics = daemon.get_train_data_batch(4, 4, "cpu")
    assert batch["token_level_scores"].sum(1).tolist() == [1, -1, -1]
    assert metrics["training/reward"] == pytest.approx(-1 / 3)
    assert (metrics["training/n_rollouts"], metrics["training/n_rollouts_w_reward"]) == (4, 1)
    assert (metrics["training/failed_share"], metrics["training/n_rollouts_left_out"]) == (0.75, 1)
    assert (metrics["training/n_rollouts_wo_rows"], metrics["training/tokens/excluded/infrastructure"]) == (1, 2)


def test_why_rollouts_failed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rolled_out(lambda task, k: ([], "failed" if task["i"] else 1.0), 3, train_rollout_n=1)
    [text] = caplog.messages
    assert text.startswith("2 of 3 rollouts failed, most often (2) by ValueError: no model 'm'")


def test_validation_metrics_are_shares_of_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    chain = [make_call(0, None, 2, 3), make_call(1, 0, 2, 1)]
    played: list[Played] = [(chain, 1.0), ([make_call(0, None, 2, 2)], "failed"), ([], 1.0), ([], "lost")]
    daemon = daemon_of(EndedStore(lambda task, k: played[task["i"]]))
    daemon.start()
    daemon.set_up_data_and_server({"i": [0, 1, 2, 3]}, None, is_train=False)
    daemon.run_until_all_finished()
    metrics = daemon.get_test_metrics()
    assert metrics["val/reward"] == pytest.approx(2 / 3)
    assert metrics["val/failed_share"] == 0.5
    assert (metrics["val/n_rollouts"], metrics["val/n_rollouts_w_trace"]) == (4, 2)
    assert (metrics["val/turn_count"], metrics["val/turn_count_max"]) == (1.5, 2)
    assert (metrics["val/sum_response_length"], metrics["val/mean_response_length"]) == (3, 2)
    assert "4 of 4 rollouts have ended (2 failed)" in capsys.readouterr().out


# Defects that the batch of Agent-lightning has


def test_a_late_prompt_that_is_too_long_never_becomes_response() -> None:
    calls = [make_call(0, None, 2, 2), make_call(1, None, 20, 3)]
    batch, metrics = batch_of(calls, prompt=4, response=8)
    assert lines_of(batch) == [
        ([0, 1], [50, 51], [1, 1]),
        ([116, 117, 118, 119], [150, 151, 152], [1, 1, 1]),
    ]
    assert batch["is_drop_mask"].tolist() == [False, True]
    assert (metrics["training/n_truncated_prompts"], metrics["training/tokens/excluded/overlong_prompt"]) == (1, 3)


def test_a_prompt_that_adds_nothing_does_not_repeat_the_conversation() -> None:
    batch, _ = batch_of([make_call(0, None, 2, 2), make_call(1, 0, 0, 2)])
    assert lines_of(batch) == [([0, 1], [50, 51, 150, 151], [1, 1, 1, 1])]


def test_two_samples_of_one_prompt_are_two_rows_and_neither_is_merged_into_the_other() -> None:
    twins = [msgspec.structs.replace(make_call(0, None), call_id=f"c{n}", number=n) for n in (0, 1)]
    batch, metrics = batch_of(twins)
    assert lines_of(batch) == [([0, 1], [50, 51], [1, 1])] * 2
    assert metrics["training/tokens/trained"] == 4


def test_long_rollouts_do_not_weigh_more_in_their_group() -> None:
    roots = [make_call(n, None) for n in range(5)]
    daemon = rolled_out(lambda task, k: (roots[: [5, 1, 0][k]], [1.0, 0.0, 0.5][k]), train_rollout_n=3)
    batch, _ = daemon.get_train_data_batch(4, 4, "cpu")
    assert len(batch["uid"]) == 6
    assert batch["row_index"].tolist() == [0, 1, 2, 3, 4, 0]
    assert batch["group_rewards"].tolist() == [[1.0, 0.0, 0.5]] * 6, "one each, also of the one without a call"


def test_validation_does_not_sample_as_training_does() -> None:
    store = EndedStore(lambda task, k: ([], 0.0))
    information = {"model": "m", "temperature": 0.7, "top_p": 0.9}
    daemon = daemon_of(store, train_information=information)
    daemon.start()
    daemon.set_up_data_and_server({"i": [0]}, None, is_train=False)
    [published] = store.published
    main_llm = published["main_llm"]
    assert (main_llm["type"], main_llm["model"]) == ("proxy_llm", "m")
    assert (main_llm["sampling_parameters"]["temperature"], main_llm["sampling_parameters"]["top_p"]) == (0.7, 0.9)
    assert main_llm["val_sampling_parameters"]["temperature"] == 0.0
    [request] = store.asked.values()
    assert (request.mode, request.resources_id) == ("val", "s1")


@pytest.mark.parametrize("reward", [0.1, 0.1 + 1e-6, 1 / 3, 1000.1])
def test_rewards_keep_their_precision(reward: float) -> None:
    batch, _ = batch_of([make_call(0, None)], reward)
    assert batch["token_level_scores"].sum().item() == np.float32(reward)


def test_the_reward_stands_on_a_sampled_token_when_the_response_is_cut_in_an_observation() -> None:
    batch, metrics = batch_of([make_call(0, None, 2, 2), make_call(1, 0, 4, 3)], response=4)
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0]]
    assert batch["token_level_scores"].tolist() == [[0, 1, 0, 0]]
    assert metrics["training/tokens/excluded/truncated"] == 3


def test_one_call_without_log_probs_takes_them_from_no_other() -> None:
    calls = [make_call(0, None), msgspec.structs.replace(make_call(1, 0), logprobs=None), make_call(2, 1)]
    batch, metrics = batch_of([*calls, make_call(3, None)])
    assert lines_of(batch)[0] == ([0, 1], [50, 51, 100, 101, 150, 151, 200, 201][:8], [1, 1, 0, 0, 0, 0, 0, 0])
    assert batch["rollout_log_probs"][:, :2].tolist() == [[-0.5, -1.0]] * 2
    assert metrics["training/tokens/excluded/no_logprob"] == 2


def test_a_batch_of_which_nothing_can_be_trained_says_why(caplog: pytest.LogCaptureFixture) -> None:
    batch, metrics = batch_of([msgspec.structs.replace(make_call(0, None), logprob_kind="raw")])
    assert (len(batch["uid"]), metrics["training/tokens/excluded/no_logprob"]) == (0, 2)
    [record] = caplog.records
    assert "none of 2 sampled tokens can be trained (no_logprob 2); for `no_logprob` take an" in record.getMessage()


def test_interleaved_agents_are_merged_each_with_its_own() -> None:
    calls = [make_call(0, None, 1, 1), make_call(1, None, 1, 1), make_call(2, 0, 1, 1), make_call(3, 1, 1, 1)]
    batch, _ = batch_of(calls)
    assert lines_of(batch) == [
        ([0], [50, 200, 250], [1, 0, 1]),
        ([100], [150, 300, 350], [1, 0, 1]),
    ]


def test_no_rows_are_a_batch_of_none() -> None:
    batch, metrics = rolled_out(lambda task, k: ([], 0.5)).get_train_data_batch(4, 6, "cpu")
    assert batch["input_ids"].shape == batch["position_ids"].shape == (0, 10)
    assert batch["prompts"].shape == (0, 4)
    assert len(batch["uid"]) == len(batch["i"]) == 0
    assert (metrics["training/n_rollouts_wo_rows"], metrics["training/reward"]) == (2, 0.5)
    batch, metrics = rolled_out(lambda task, k: ([], 0.5), samples=0).get_train_data_batch(4, 6, "cpu")
    assert (batch["responses"].shape, metrics["training/n_rollouts"]) == ((0, 6), 0)
    assert math.isnan(metrics["training/reward"])


def test_reading_twice_gives_the_same() -> None:
    calls = [make_call(0, None), make_call(1, 0), make_call(2, 0, 9, 2)]
    daemon = rolled_out(lambda task, k: (calls, 0.5), samples=2)
    (first, metrics), (again, metrics_again) = (daemon.get_train_data_batch(3, 5, "cpu") for _ in range(2))
    assert first.keys() == again.keys()
    for name, value in first.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a.tolist() == b.tolist()
        assert same(value, again[name]), name
    assert metrics == metrics_again


def test_nothing_is_dropped_before_the_group_was_looked_at() -> None:
    daemon = rolled_out(lambda task, k: ([make_call(0, None, prompt=[2, 9][k])], float(k)))
    batch, _ = daemon.get_train_data_batch(4, 4, "cpu")
    assert batch["is_drop_mask"].tolist() == [False, True]
    assert batch["token_level_scores"].sum(1).tolist() == [0, 1]
    assert batch["group_rewards"].tolist() == [[0, 1]] * 2


# Order and input


def test_methods_out_of_their_order_are_named() -> None:
    daemon = daemon_of(EndedStore(lambda task, k: ([], 0.0)))
    with pytest.raises(DaemonOrder, match=r"call start\(\) first"):
        daemon.set_up_data_and_server({"i": [0]}, None)
    daemon.start()
    for method in (
        daemon.run_until_all_finished, daemon.get_test_metrics, lambda: daemon.get_train_data_batch(4, 4, "cpu"),
    ):  # fmt: skip
        with pytest.raises(DaemonOrder, match="call set_up_data_and_server"):
            method()
    daemon.set_up_data_and_server({"i": [0]}, None)
    with pytest.raises(DaemonOrder, match=r"2 of 2 rollouts have not ended: call run_until_all_finished\(\) first"):
        daemon.get_train_data_batch(4, 4, "cpu")
    with pytest.raises(DaemonOrder, match=r"call clear_data_and_server\(\) before the next"):
        daemon.set_up_data_and_server({"i": [0]}, None)
    daemon.run_until_all_finished(verbose=False)
    with pytest.raises(DaemonOrder, match="set up for training: there is no test metrics"):
        daemon.get_test_metrics()
    with pytest.raises(ValueError, match="max_response_length is 0"):
        daemon.get_train_data_batch(4, 0, "cpu")
    daemon.clear_data_and_server()
    daemon.clear_data_and_server()
    daemon.set_up_data_and_server({"i": [0]}, None, is_train=False)
    daemon.run_until_all_finished(verbose=False)
    assert daemon.get_test_metrics()["val/n_rollouts"] == 1
    with pytest.raises(DaemonOrder, match="set up for validation"):
        daemon.get_train_data_batch(4, 4, "cpu")


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ({"a": [1, 2], "b": [1]}, ValueError, "differ in length .*'a': 2, 'b': 1"),
        ({"a": "text"}, ValueError, "column 'a' is a str"),
        ({}, ValueError, "the data have no column"),
        ({"uid": [1]}, ValueError, "columns of its own named uid"),
        ({"responses": [1]}, ValueError, "columns of its own named responses"),
        ({"a": [float("nan")]}, TaskError, "column 'a' of sample 0 is no JSON value"),
        ({"a": [1, object()]}, TaskError, "column 'a' of sample 1 is no JSON value"),
        ({"a": [{1: "x"}]}, TaskError, r"column 'a' of sample 0 is no JSON value \(key 1 is no text"),
    ],
)
def test_data_that_make_no_tasks_are_refused_and_nothing_is_asked_for(data: Any, error: Any, text: str) -> None:
    store = EndedStore(lambda task, k: ([], 0.0))
    daemon = daemon_of(store)
    daemon.start()
    with pytest.raises(error, match=text):
        daemon.set_up_data_and_server(data, None)
    assert (store.asked, store.published) == ({}, [])


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"train_rollout_n": 0}, "train_rollout_n is 0"),
        ({"train_information": {"model": "m"}}, "no 'temperature'"),
        ({"pad_token_id": None}, "pad_token_id is None"),
        ({"reward_fillna_value": math.nan}, "reward_fillna_value is nan"),
    ],
)
def test_arguments_that_make_no_sense_are_named(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        daemon_of(None, **more)


@pytest.mark.parametrize("address", ["", "ftp://host:1", "http://"])
def test_addresses_that_are_none_are_named(address: str) -> None:
    daemon = daemon_of(EndedStore(lambda task, k: ([], 0.0)))
    daemon.start()
    with pytest.raises(ValueError, match="write host:port"):
        daemon.set_up_data_and_server({"i": [0]}, [address])


def test_a_run_that_has_died_is_told_while_waiting() -> None:
    def check() -> None:
        raise RuntimeError("the engine has died")

    daemon = daemon_of(EndedStore(lambda task, k: ([], 0.0)), check=check)
    daemon.start()
    daemon.set_up_data_and_server({"i": [0]}, None)
    with pytest.raises(RuntimeError, match="the engine has died"):
        daemon.run_until_all_finished()


# At a real server


def test_engines_that_are_known_are_left_and_others_registered_under_the_policys_version(served: Any) -> None:
    served.client().register_engine("m", "embedded", "http://127.0.0.1:2", 1)
    daemon = daemon_of(served.client())
    daemon.start()
    for _ in range(2):
        daemon.set_up_data_and_server({"i": [0]}, ["127.0.0.1:1", "http://127.0.0.1:2/"])
        daemon.clear_data_and_server()
    registered = [(engine.kind, engine.url, engine.policy_version) for engine in served.attached]
    assert registered == [("embedded", "http://127.0.0.1:2", 1), ("vllm", "http://127.0.0.1:1", 3)]


def test_what_was_cleared_is_not_run_any_more(served: Any) -> None:
    daemon = daemon_of(served.client())
    daemon.start()
    daemon.set_up_data_and_server({"i": [0, 1]}, None)
    daemon.clear_data_and_server()
    assert [rollout.status for rollout in served.client().rollouts()] == ["cancelled"] * 4
    assert served.client("runner").claim("w") == []


def test_a_wrong_key_is_named_at_the_start(served: Any) -> None:
    with pytest.raises(NotAllowed):
        daemon_of(served.client("runner")).start()


def test_a_lost_claim_and_a_hung_agent_do_not_stall_the_batch(served: Any) -> None:
    """One runner dies with its claim, which another then takes; one never answers, until its deadline."""
    daemon = daemon_of(served.client(), llm_timeout_seconds=1.0)
    daemon.start()
    daemon.set_up_data_and_server({"i": [0]}, None)
    runner = served.client("runner")
    [_], [_] = runner.claim("dies"), runner.claim("hangs")
    runner.workers_died(["dies"])
    [again] = runner.claim("lives", wait_seconds=30)
    runner.finish(again.rollout.rollout_id, again.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    daemon.run_until_all_finished(verbose=False)
    _, metrics = daemon.get_train_data_batch(4, 4, "cpu")
    assert (metrics["training/reward"], metrics["training/failed_share"]) == (0.5, 0.5)


@lrl.rollout
def branches(task: dict[str, Any], llm: lrl.LLM) -> float:
    """A call, one that continues it, and one that begins anew; task 1 fails after the first, task 2 makes none."""
    if task["i"] == 2:
        return 1.0
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:

        def say(chat: list[Any], text: str) -> list[Any]:
            chat = [*chat, {"role": "user", "content": f"{text} {task['name']}"}]
            answer = client.chat.completions.create(model=llm.model, messages=chat).choices[0].message.content
            return [*chat, {"role": "assistant", "content": answer}]

        first = say([], "begin")
        if task["i"] == 1:
            raise RuntimeError("this agent has a bug")
        say(first, "go on")
        say([], "begin anew and at length " * 6)
    return 0.1 * task["i"]


class OwnTrainer(lrl.Baseline):
    """An algorithm that does all through the daemon; its server knows no engine before."""

    def open(self, run_dir: Path) -> Endpoint:
        return msgspec.structs.replace(super().open(run_dir), engines=[])

    def run(self, train_dataset: Any, val_dataset: Any) -> None:
        assert self.policy is not None
        daemon = AgentModeDaemon(
            self.store,
            train_rollout_n=2,
            train_information={"model": self.policy.name, "temperature": 1.0, "max_tokens": 8},
            val_sampling_parameters={"max_tokens": 4},
            pad_token_id=self.policy.model.config.pad_token_id,
            check=self.check,
        )
        daemon.start()
        data = {"i": [0, 1, 2, 3], "name": ["ann", "bob", "cid", "dee"]}
        daemon.set_up_data_and_server(data, [self.policy.url.removeprefix("http://")])
        daemon.run_until_all_finished()
        self.batch, self.metrics = daemon.get_train_data_batch(40, 60, "cpu")
        self.traces = self.store.traces([rollout.rollout_id for rollout in self.store.rollouts(mode="train")])
        daemon.clear_data_and_server()
        daemon.set_up_data_and_server(data, [self.policy.url], is_train=False)
        daemon.run_until_all_finished(verbose=False)
        self.test_metrics = daemon.get_test_metrics()
        self.engines = self.store.engines()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> OwnTrainer:
    run_dir = tmp_path_factory.mktemp("own")
    return lrl.Trainer(branches, n_runners=4, run_dir=run_dir).fit(OwnTrainer(), [0])  # type: ignore[misc]


@pytest.mark.e2e
@pytest.mark.long
def test_the_batch_of_a_real_run_is_the_rows_of_its_traces(own: OwnTrainer) -> None:
    i = 0
    for rollout_id in sorted(own.traces, key=lambda name: [int(part) for part in name.split("-")[-2:]]):
        trace = own.traces[rollout_id]
        [attempt] = trace.attempts
        for index, row in enumerate(rows.cut(forest.build(calls_of(attempt.spans)), {})):
            place = [own.batch[name][i] for name in ("rollout_id", "uid", "row_index", "i", "name")]
            task = trace.rollout.task
            assert place == [rollout_id, trace.rollout.group_id, index, task["i"], task["name"]]
            if task["i"] == 3:
                check_line(own.batch, i, row, 0.1 * 3)
            assert lines_of(own.batch)[i][1] == row.token_ids[row.loss_mask.index(1) :]
            i += 1
    assert i == len(own.batch["prompts"]) == 2 * (2 + 1 + 0 + 2)
    assert own.metrics["training/n_rollouts_wo_rows"] == 2
    assert own.metrics["training/tokens/sampled"] == own.batch["response_mask"].sum()


@pytest.mark.e2e
@pytest.mark.long
def test_the_policy_gives_the_lines_of_a_real_run_the_recorded_log_probs(own: OwnTrainer) -> None:
    """With the batch's own padding, mask and positions, as a trainer computes them."""
    assert own.policy is not None
    batch = own.batch
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        logits = own.policy.model(**inputs).logits[:, 39:-1]
    found = logits.log_softmax(-1).gather(-1, batch["responses"][..., None]).squeeze(-1)
    which = batch["response_mask"].bool() & ~batch["is_drop_mask"][:, None]
    assert which.any()
    torch.testing.assert_close(found[which], batch["rollout_log_probs"][which], atol=2e-3, rtol=0)


@pytest.mark.e2e
@pytest.mark.long
def test_a_real_run_validates_and_knows_its_engine_once(own: OwnTrainer) -> None:
    assert own.test_metrics["val/n_rollouts"] == 4
    assert own.test_metrics["val/failed_share"] == 0.25
    assert own.test_metrics["val/reward"] == pytest.approx((0 + 0 + 1 + 0.3) / 4)
    assert own.test_metrics["val/sum_response_length"] <= 4 * 3
    assert [engine["kind"] for engine in own.engines] == ["vllm"]
