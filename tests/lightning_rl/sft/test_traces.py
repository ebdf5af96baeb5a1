"""Which traces are learned from, and what becomes of the tokens of the others."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_rl.config import ConfigError, compose
from lightning_rl.inspect.export import export
from lightning_rl.sft import examples, traces
from lightning_rl.sft.examples import Examples
from lightning_rl.sft.traces import TracedCall
from lightning_rl.store.contract import ErrorInfo, Reward
from lightning_rl.trajectories.token_account import ConservationError
from lightning_rl_proxy.rendering.load import load_renderer
from tests.lightning_rl.inspect import runs

from .records import CHECKPOINT, conversation, record, write

RENDERER = load_renderer(CHECKPOINT, "template", "student")
RECORDS = [
    record("good", group_id="g", reward=1.0, agent="writer"),
    record("fair", group_id="g", reward=0.5, agent="judge"),
    record("bad", group_id="g", reward=0.0, model="small"),
    record("none", group_id="h", reward=None, response_token_ids=[1, 2, 3]),
    record("seen", group_id="i", mode="val"),
]


def load(tmp_path: Path, records: list[dict[str, Any]] = RECORDS, **config: Any) -> Examples:
    sft = {"held_out": 0.0} | config.pop("sft", {})
    file = write(tmp_path / "calls.jsonl", records)
    return examples.load(compose({"sft": sft, **config}), [file], RENDERER)


def learned(found: Examples) -> dict[str, float]:
    return {one.rollout_id: one.weight for one in found.trained}


@pytest.mark.parametrize(
    ("config", "rollouts"),
    [
        ({}, ["good", "fair", "bad", "none"]),
        ({"sft": {"mode": None}}, ["good", "fair", "bad", "none", "seen"]),
        ({"sft": {"mode": "val"}}, ["seen"]),
        ({"sft": {"min_reward": 0.5}}, ["good", "fair"]),
        ({"sft": {"best_of_group": 2}}, ["good", "fair"]),
        ({"sft": {"models": "small"}}, ["bad"]),
        ({"sft": {"models": "smal|teach.*"}}, ["good", "fair", "none"]),
        ({"algorithm": {"train_agents": "writer|judge"}}, ["good", "fair"]),
    ],
)
def test_the_keys_say_which_rollouts_are_learned_from(
    config: dict[str, Any], rollouts: list[str], tmp_path: Path
) -> None:
    found = load(tmp_path, **config)
    assert list(learned(found)) == rollouts
    found.metrics(0)  # the account balances


def test_a_run_and_the_files_that_are_exported_of_it_are_the_same_traces(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with runs.open_store(run_dir) as store:
        runs.record(store, "one", runs.TALK)
        runs.record(store, "two", runs.TALK, reward=0.5)
    files = [export(run_dir, "calls", form, tmp_path / f"calls.{form}")[0] for form in ("jsonl", "parquet")]
    found, excluded = of_run = traces.read([run_dir])
    assert [traces.read([file]) for file in files] == [of_run, of_run] == [traces.read([run_dir / "store.db"])] * 2
    assert [(one.rollout_id, one.reward, len(one.calls)) for one in found] == [("one", 1.0, 2), ("two", 0.5, 2)]
    assert not excluded


def test_a_source_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "calls.jsonl", RECORDS)
    assert traces.read(["~/calls.jsonl"]) == traces.read([tmp_path / "calls.jsonl"])


def test_answers_that_stay_as_they_were_sampled_are_counted_beside_those_that_are_rendered(tmp_path: Path) -> None:
    own = {"vocabulary": RENDERER.tokenizer.vocabulary_digest(), "exact": True}
    own |= {"prompt_token_ids": RENDERER.render([{"role": "user", "content": "question 0"}], None)}
    own |= {"response_token_ids": [5, RENDERER.stop_token_ids[0]]}
    found = load(tmp_path, [record("own", **own), record("other")])
    assert found.calls == {"as_sampled": 1, "rendered": 1}


def test_answers_weigh_what_their_rollouts_were_rewarded_with(tmp_path: Path) -> None:
    assert set(learned(load(tmp_path)).values()) == {1.0}
    found = load(tmp_path, sft={"weights": "reward"})
    assert learned(found) == {"good": 1.0, "fair": 0.5}
    assert found.excluded["no_reward"] == 3


@pytest.mark.parametrize(
    ("first", "second", "reward"),
    [
        ({"reward": None, "call_rewards": {"a": 1.0, "b": 2.0}}, {"reward": None, "call_rewards": {"a": 0.5}}, 3.5),
        ({"reward": 1.0, "call_rewards": {"a": 5.0}}, {"reward": 1.0}, 1.0),
        ({"reward": None}, {"reward": 0.5}, 0.5),
        ({"reward": None}, {"reward": None}, None),
    ],
)
def test_a_rollouts_reward_is_its_own_or_else_the_sum_of_its_calls(
    first: dict[str, Any], second: dict[str, Any], reward: float | None, tmp_path: Path
) -> None:
    [found], _ = traces.read([write(tmp_path / "calls.jsonl", [record("r", 1, **second), record("r", **first)])])
    assert found.reward == reward
    assert [call.number for call in found.calls] == [0, 1]


@pytest.mark.parametrize(
    ("keys", "found", "excluded"),
    [
        ({}, {"crashed": 1.0, "poor": 1.0}, {}),
        ({"sft": {"min_reward": 0.5}}, {"poor": 1.0}, {"low_reward": 3}),
        ({"sft": {"best_of_group": 1}}, {"poor": 1.0}, {"not_best": 3}),
        ({"sft": {"weights": "reward"}}, {"poor": 0.5}, {"no_weight": 3}),
        ({"sft": {"min_reward": 0.5}, "algorithm": {"agent_failure": 0.75}}, {"crashed": 1.0, "poor": 1.0}, {}),
        ({"algorithm": {"agent_failure": "exclude"}}, {"poor": 1.0}, {"no_reward": 3}),
    ],
)
def test_a_rollout_whose_agent_failed_counts_as_in_ppo(
    keys: dict[str, Any], found: dict[str, float], excluded: dict[str, int], tmp_path: Path
) -> None:
    crashed = record("crashed", failed=True, reward=None, call_rewards={"step": 1.0}, response_token_ids=[1, 2, 3])
    both = [one | {"group_id": "g"} for one in (crashed, record("poor", reward=0.5))]
    config = compose(keys | {"sft": {"held_out": 0.0} | keys.get("sft", {})})
    made = examples.load(config, [write(tmp_path / "calls.jsonl", both)], RENDERER)
    assert {one.rollout_id: one.weight for one in made.trained} == found
    assert made.excluded == excluded


@pytest.mark.parametrize("form", ["folder", "jsonl", "parquet"])
def test_a_run_says_which_of_its_rollouts_failed(form: Any, tmp_path: Path) -> None:
    run_dir, crashed = tmp_path / "run", ErrorInfo(type="ValueError", message="after a good call")
    with runs.open_store(run_dir) as store:
        step_reward = [Reward(name="step", value=1.0, call_id="crashed-c1")]
        runs.record(store, "crashed", runs.TALK, error=crashed, call_rewards=step_reward)
        runs.record(store, "well", runs.TALK, reward=0.5)
    source = run_dir if form == "folder" else export(run_dir, "calls", form, tmp_path / f"calls.{form}")[0]
    found, _ = traces.read([source])
    assert {one.rollout_id: (one.failed, one.reward) for one in found} == {
        "crashed": (True, None),
        "well": (False, 0.5),
    }


def test_of_a_teachers_rollouts_its_own_answers_are_learned_whatever_their_mode() -> None:
    def call(rollout: str, number: int = 0, **more: Any) -> TracedCall:
        return msgspec.convert(record(rollout, number, mode="val", **{"model": "helper.1"} | more), TracedCall)

    calls = [
        call("good"), call("good", 1, model="helper-1"), call("good", 2, counts=False, response_token_ids=[1, 2, 3]),
        call("poor", reward=0.0, response_token_ids=[1, 2]),
    ]  # fmt: skip

    def taught(**sft: Any) -> Examples:
        config = compose({"sft": {"held_out": 0.0, "min_reward": 0.5} | sft})
        return examples.load(config, [], RENDERER, taught=calls, teacher="helper.1")

    found = taught()
    [one] = found.trained
    assert (one.rollout_id, found.calls) == ("good", {"rendered": 2})
    assert found.excluded == {"not_selected": one.tokens, "low_reward": 2, "superseded": 3}
    assert taught(models="helper-1").excluded == found.excluded  # the other one of the two alike
    assert taught(models="helper-1").trained[0].sequences[0].calls != one.sequences[0].calls
    with pytest.raises(ConfigError, match=r"of 2 rollouts none is left to learn from \(2 low_reward\)"):
        taught(min_reward=2.0)


def test_groups_of_different_sources_are_different_groups(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"{run}.jsonl", [record(f"{run}-{n}", group_id="1-0") for n in (0, 1)]) for run in "ab"]
    found = examples.load(compose({"sft": {"held_out": 0.0, "best_of_group": 1}}), sources, RENDERER)
    assert list(learned(found)) == ["a-0", "b-0"]
    alike = [record(str(n), response_token_ids=[1], group_id="g") for n in range(3)]
    sources = [write(tmp_path / "c.jsonl", alike)]
    found = examples.load(compose({"sft": {"held_out": 0.0, "best_of_group": 1}}), sources, RENDERER)
    assert found.excluded == {"not_best": 2}


def test_whole_groups_are_held_out(tmp_path: Path) -> None:
    found = load(tmp_path, sft={"held_out": 0.5})
    assert len({one.group_id for one in found.held_out}) == 1
    assert not {one.group_id for one in found.held_out} & {one.group_id for one in found.trained}
    held_out = sum(one.tokens for one in found.held_out)
    assert found.metrics(0)["tokens/excluded/held_out"] == held_out > 0
    trained = sum(one.tokens for one in found.trained)
    assert found.metrics(2)["tokens/pending"] == trained - 2


def test_an_account_that_does_not_balance_is_an_error() -> None:
    lost = Examples(read=5, excluded=Counter(overlong=3))
    with pytest.raises(ConservationError, match=r"of 5 tokens of the traces 0 are trained, 0 held out and 3 excluded"):
        lost.metrics(0)


@pytest.mark.parametrize(("share", "groups"), [(0.0, 0), (0.3, 1), (1.0, 1)])
def test_of_two_groups_one_is_trained_in_any_case(share: float, groups: int, tmp_path: Path) -> None:
    found = load(tmp_path, sft={"held_out": share})
    assert len({one.group_id for one in found.held_out}) == groups


def test_the_seed_says_which_groups_are_held_out(tmp_path: Path) -> None:
    held_out = {
        one.group_id for seed in range(6) for one in load(tmp_path, sft={"held_out": 0.5}, data={"seed": seed}).held_out
    }
    assert len(held_out) == 2


def test_every_token_that_is_not_trained_is_named(tmp_path: Path) -> None:
    records = [
        *conversation("long", ["select 1"] * 12),
        record("short"),
        record("lost", delivered=False),
        record("shown", media=[[0, 1, "x"]], response_token_ids=[1, 2]),
        record("again", counts=False, response_token_ids=[1, 2, 3, 4]),
    ]
    found = load(tmp_path, records, data={"max_prompt_length": 40, "max_response_length": 10})
    assert list(learned(found)) == ["short"]
    assert found.excluded["overlong"] == 12 * found.trained[0].tokens
    assert found.excluded["undelivered"] == found.trained[0].tokens
    assert (found.excluded["images"], found.excluded["superseded"]) == (2, 4)
    assert found.calls == {"rendered": 14, "images": 1}
    cut = load(
        tmp_path, records, data={"max_prompt_length": 40, "max_response_length": 10, "overlong": "truncate_left"}
    )
    assert cut.excluded["truncated"] > 0


@pytest.mark.parametrize(
    ("overlong", "answers", "excluded"),
    [
        ("drop_row", {"two": 1, "short": 1}, {"overlong": 1}),
        ("drop_rollout", {"short": 1}, {"overlong": 2}),
        ("truncate_left", {"two": 2, "short": 1}, {}),
        ("truncate_response", {"two": 1, "short": 1}, {"truncated": 1}),
    ],
)
def test_of_a_row_that_is_too_long_is_learned_what_the_key_says(
    overlong: str, answers: dict[str, int], excluded: dict[str, int], tmp_path: Path
) -> None:
    """Counted in answers, which are all alike; the question of one call of `two` alone is longer than a row."""
    long = record("two", messages=[{"role": "user", "content": "why " * 60}])
    data = {"max_prompt_length": 40, "max_response_length": 10, "overlong": overlong}
    found = load(tmp_path, [long, record("two", 1), record("short")], data=data)
    of_answer = len(RENDERER.tokenizer.encode("select 1")) + 1
    assert {one.rollout_id: one.tokens / of_answer for one in found.trained} == answers
    assert {reason: tokens / of_answer for reason, tokens in found.excluded.items()} == excluded
    assert all(len(row.trained) for one in found.trained for row in one.sequences)


def test_what_cannot_be_learned_from_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of 5 rollouts none is left .*1 mode_val"):
        load(tmp_path, sft={"min_reward": 2.0})
    with pytest.raises(ConfigError, match=r"of 5 rollouts none is left .*no_answer"):
        load(tmp_path, [record(str(n), answer=[]) for n in range(5)])
    with pytest.raises(ConfigError, match=r"sft.models '\(' is no regular expression"):
        load(tmp_path, sft={"models": "("})
    with pytest.raises(ConfigError, match=r"empty.jsonl holds no calls; name a run"):
        examples.load(compose({}), [write(tmp_path / "empty.jsonl", [])], RENDERER)
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r"latin\.jsonl, record 1 is none of"):
        examples.load(compose({}), [tmp_path / "latin.jsonl"], RENDERER)
    with pytest.raises(ConfigError, match="no run folder and no file"):
        examples.load(compose({}), [tmp_path / "nothing"], RENDERER)
    with pytest.raises(ConfigError, match="record 1 is none of `lightning-rl export --what calls`"):
        examples.load(compose({}), [write(tmp_path / "rows.jsonl", [{"row": 1}])], RENDERER)
    twice = [write(tmp_path / name, RECORDS) for name in ("one.jsonl", "two.jsonl")]
    for named in (twice, twice[:1] * 2):
        with pytest.raises(ConfigError, match="name one, once"):
            examples.load(compose({}), named, RENDERER)
