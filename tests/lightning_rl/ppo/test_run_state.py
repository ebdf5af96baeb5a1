"""What a checkpoint has of a policy beside its weights, and what of it a run that goes on takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rl.config import ConfigError, compose, to_yaml
from lightning_rl.ppo import run_state
from lightning_rl.ppo.run_state import PolicyState, RunState, TuningRecord, begin_from, changes_to_warn_of
from lightning_rl.rl.kl import AdaptiveKL, FixedKL
from lightning_rl.training import checkpoint
from lightning_rl.trajectories import step_record


def adaptive(value: float) -> AdaptiveKL:
    return AdaptiveKL(value, target=0.1, horizon=1000)


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [
        (None, FixedKL(0.05), 0.05),
        (None, adaptive(0.05), 0.05),
        (FixedKL(0.05), FixedKL(0.2), 0.2),
        (FixedKL(0.05), adaptive(0.2), 0.2),
        (adaptive(0.05), FixedKL(0.2), 0.2),
        (adaptive(0.05), adaptive(0.2), 0.05),
        (adaptive(0.05), None, 0.0),
    ],
)
def test_an_adapted_coefficient_goes_on_and_a_fixed_one_is_that_of_now(
    before: FixedKL | AdaptiveKL | None, now: FixedKL | AdaptiveKL | None, after: float
) -> None:
    state = PolicyState(now, "policy")
    state.load_state_dict(PolicyState(before, "policy").state_dict())
    assert state.kl_coef == after


def test_a_training_set_of_another_length_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    began = RunState(compose(), tmp_path)
    began.note_tasks(6, shuffled=True)
    saved = began.save(lambda folder: None, {"": PolicyState(None, "policy").state_dict()}, None)
    for tasks, shuffled in ((6, True), (9, False), (9, True)):
        goes_on = RunState(compose(), tmp_path, saved)
        goes_on.restore({"": lambda state: None}, synchronous=True)
        goes_on.note_tasks(tasks, shuffled=shuffled)
    [told] = caplog.messages
    assert told.startswith("the training set has 9 tasks (it had 6), so they are in another order")


@pytest.mark.parametrize("names", [[""], ["p", "q"]])
@pytest.mark.parametrize(("best_step", "best"), [(3, (3, 0.5)), (2, (None, -float("inf")))])
def test_a_run_that_begins_with_anothers_checkpoint_has_tokens_and_a_best_step_of_its_own(
    tmp_path: Path, names: list[str], best_step: int, best: tuple[int | None, float]
) -> None:
    tuning = TuningRecord()
    tuning.measured(best_step, 0.5)
    trained = PolicyState(adaptive(0.05), "policy")
    trained.policy_version = 3
    trained.account.received = trained.account.trained = 7
    of_policies = {name: trained.state_dict() for name in names}
    state: dict[str, Any] = of_policies[""] if names == [""] else {"policies": of_policies}
    state |= {"step": 3, "tuning": tuning.state_dict()}
    given = checkpoint.save(tmp_path / "other", export=lambda folder: None, state=state)

    found = checkpoint.load_state(begin_from(given, tmp_path / "run"))
    begun = TuningRecord()
    begun.load_state_dict(found["tuning"])
    assert (begun.best_step, begun.best_reward) == best
    for of_policy in found.get("policies", {"": found}).values():
        own = PolicyState(adaptive(0.2), "policy")
        own.load_state_dict(of_policy)
        assert (own.policy_version, own.kl_coef) == (3, 0.05)
        assert (own.account.received, own.account.trained) == (0, 0)


def test_a_key_that_is_new_since_the_run_began_has_not_changed(tmp_path: Path) -> None:
    before = yaml.safe_load(to_yaml(compose({})))
    del before["actor_rollout_ref"]["actor"]["clip_ratio"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before))
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "000005.msgpack").touch()
    assert list(changes_to_warn_of(compose({}), tmp_path, 3)) == []


def test_a_run_without_a_checkpoint_says_that_it_begins_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = RunState(compose({}), tmp_path)
    state.begin_session("run", 0)
    assert caplog.messages == []
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "000005.msgpack").touch()
    state.begin_session("run", 0)
    [told] = caplog.messages
    assert "has no whole checkpoint, so it begins with step 1 again; it had got to step 5" in told


def test_records_of_steps_that_are_made_anew_are_set_aside(tmp_path: Path) -> None:
    state = RunState(compose({}), tmp_path)
    (tmp_path / "steps" / "writer").mkdir(parents=True)
    for name in ("000001", "000002", "writer/000002"):
        (tmp_path / "steps" / f"{name}.msgpack").touch()
    state.step = 1
    state.begin_session("run", 0)
    assert [file.name for file, _ in step_record.files(tmp_path)] == ["000001.msgpack"]
    assert not list((tmp_path / "steps" / "writer").glob("*.msgpack"))
    assert step_record.furthest(tmp_path) == 2


def test_a_checkpoint_of_sft_is_refused_with_what_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state.checkpoint, "open_state", lambda _: {"step": 3})
    with pytest.raises(
        ConfigError, match=r"step-3 is a checkpoint of SFT: go on with it by `lightning-rl sft --resume"
    ):
        RunState(compose(), tmp_path, tmp_path / "step-3")
