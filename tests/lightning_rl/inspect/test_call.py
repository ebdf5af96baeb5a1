"""`explain` of a rollout that was trained, and of one call of it down to a token."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from lightning_rl import tutorial
from lightning_rl.cli import explain as command
from lightning_rl.config import compose
from lightning_rl.config.schema import TrainConfig
from lightning_rl.errors import Explained
from lightning_rl.inspect.folder import decoder
from lightning_rl.store.contract import ErrorInfo, Reward
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import VersionRange
from tests.adapters.words import say
from tests.lightning_rl.inspect.runs import (
    TALK,
    call_record,
    open_store,
    record,
    rollout_record,
    step_of,
    write_run,
)

app = typer.Typer()
app.command()(command.run)


def explain(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(*arguments: str) -> str:
    with pytest.raises(Explained) as told:
        explain(*arguments)
    return str(told.value)


def as_json(*arguments: str) -> Any:
    return json.loads(explain(*arguments, "--json"))


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trained: r1, its first call at its second token alone. Left out: r2, whole. Not (yet) trained: r3, v."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "one"
    first = msgspec.structs.replace(TALK[0], versions=[VersionRange(4, 0, 1), VersionRange(5, 1, 2)], agent="map")
    sampled = {semconv.SAMPLING_REQUESTED: {"temperature": 0.7}, semconv.SAMPLING_EFFECTIVE: {"temperature": 1.0}}
    with open_store(folder) as store:
        record(
            store, "r1", [first, TALK[1]], {1: sampled}, reward={"reward": 1.0, "tone": 0.5},
            call_rewards=[Reward(value=0.25, name="step", call_id="chatcmpl-r1-c1")],
        )  # fmt: skip
        record(store, "r2", TALK, attempts=1)
        record(store, "r3", TALK)
        record(store, "v", TALK, mode="val")
    calls = {
        "r1-c1": call_record([1], [-0.5]),
        "r1-c2": call_record(None, [], trained_tokens=0, left_out="not_selected"),
    }
    steps = [
        step_of(6, rollout_record("r0", "g", 1.0)),
        step_of(
            7,
            msgspec.structs.replace(rollout_record("r1", "g", 1.0), calls=calls),
            msgspec.structs.replace(
                rollout_record("r2", "h", 1.0),
                left_out="zero_variance",
                calls={f"r2-c{n}": call_record(None, [], trained_tokens=0) for n in (1, 2)},
            ),
        ),
    ]
    return write_run(folder, steps=steps, config={})


def test_each_call_says_which_reward_reached_it_and_what_became_of_it(run_dir: Path) -> None:
    lines = explain("r1").splitlines()
    assert "  step 7  updated version 6; counted with reward 1 in group g" in lines
    [first] = [i for i, line in enumerate(lines) if "call 1 (map):" in line]
    assert lines[first + 1].strip() == (
        "rule final: credit 1, compared with group, baseline 0.5, scale 0.53, advantage 0.943 by grpo, "
        "weight 0.125 in mini-batch 0, 1 tokens trained"
    )
    assert lines[first + 3].strip().endswith("advantage 0.943 by grpo, not trained: not_selected")
    assert "        calls [1] 2 (not_selected)" in lines, "as the step did it, whatever the config says"


def test_a_rollout_left_out_whole_says_why_at_each_call(run_dir: Path) -> None:
    printed = explain("r2")
    assert "in group h; left out: zero_variance" in printed
    assert printed.count("not trained: zero_variance") == 2
    assert "left out: zero_variance" in next(line for line in printed.splitlines() if "row 1:" in line)


def test_what_no_record_tells_is_said_to_be_unknown(run_dir: Path) -> None:
    assert "not told what training made of it: no step of the run has trained on it, or not yet" in explain("r3")
    assert "not told" not in explain("v"), "the attempt says already that it is validation"
    for file in (run_dir / "steps").iterdir():
        file.unlink()
    assert "there are no step records: the run is from before they were kept" in explain("r1")
    assert as_json("r1")["not_recorded"].startswith("there are no step records")


def test_a_run_that_was_no_training_says_nothing_of_it(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        record(store, "r", TALK)
    for arguments in (["r"], ["r", "--call", "1"]):
        printed = explain(*arguments, "--run-dir", str(tmp_path))
        assert not any(word in printed for word in ("rule", "step ", "not told")), printed


def test_a_superseded_attempt_has_no_part_in_the_record(tmp_path: Path) -> None:
    lost = ErrorInfo(type="EngineError", message="gone", infrastructure=True)
    with open_store(tmp_path) as store:
        record(store, "r", TALK, attempts=2, error=lost, step=1)
    write_run(tmp_path, steps=[step_of(1, rollout_record("r", "g", None, calls=0, left_out="no_reward"))], config={})
    view = as_json("r", "--run-dir", str(tmp_path))
    assert view["training"]["left_out"] == "no_reward"
    assert [attempt["excluded"] for attempt in view["attempts"]] == ["superseded", "infrastructure"]
    assert all(call["training"] is None for attempt in view["attempts"] for call in attempt["calls"])
    one = as_json("r", "--run-dir", str(tmp_path), "--call", "r-c1", "--token", "0")
    assert (one["rollout_training"], one["tokens"][0]["trained"]) == (None, False)


def test_a_call_is_told_in_full(run_dir: Path) -> None:
    printed = explain("r1", "--call", "1")
    assert printed.startswith("call 1 (r1-c1) of rollout r1, attempt 1: counts\n")
    for told in (
        "sampled by   policy, agent map; temperature 1",
        "version 4 (tokens 0 to 0), version 5 (tokens 1 to 1)",
        "+1 prompt, 2 sampled, stop",
        'requested    {"temperature": 0.7}',
        "of the attempt reward 1, tone 0.5; of this call step 0.25",
        "rule final: credit 1",
        "in row 1, trained in row 1",
        "adds         user: a",
        "answers      assistant: b c",
    ):
        assert told in printed, printed


def test_each_token_has_its_mask_and_its_logprobs_then(run_dir: Path) -> None:
    first, second = as_json("r1", "--call", "1")["tokens"]
    assert (first["trained"], first["trainer_logprob"], first["difference"]) == (False, None, None)
    assert (second["trained"], second["logprob"], second["trainer_logprob"]) == (True, -1.0, -0.5)
    assert second["difference"] == 0.5
    assert [token["policy_version"] for token in (first, second)] == [4, 5]
    table = explain("r1", "--call", "1").splitlines()[-3:]
    assert table[0].split() == ["token", "id", "trained", "version", "sampler", "trainer", "difference", "text"]
    assert table[2].split()[:1] + table[2].split()[2:7] == ["1", "1", "5", "-1.0000", "-0.5000", "+0.5"]


def test_a_call_that_no_record_knows_has_the_mask_of_its_row(run_dir: Path) -> None:
    assert [token["trained"] for token in as_json("r3", "--call", "1")["tokens"]] == [True, True]
    assert [token["trained"] for token in as_json("v", "--call", "1")["tokens"]] == [False, False]


@pytest.mark.parametrize("name", ["2", "r1-c2", "r1-c2"[1:], "chatcmpl-r1-c2", "-c2"])
def test_a_call_is_found_by_number_id_part_or_the_name_its_client_knows(run_dir: Path, name: str) -> None:
    assert as_json("r1", f"--call={name}")["call_id"] == "r1-c2"


def test_what_is_not_there_is_named_with_what_is_near(run_dir: Path) -> None:
    assert refusal("r1", "--call", "r1-d1").startswith("rollout r1 has no call 'r1-d1'; near are r1-c1")
    for number in ("9", "0", "1111"):  # with which an id may begin, too
        assert refusal("r1", "--call", number) == f"rollout r1 has no call '{number}'; its calls are 1 to 2"
    assert "'r1' names several calls of rollout r1, r1-c1, r1-c2" in refusal("r1", "--call", "r1")
    told = refusal("r1", "--call", "1", "--token", "2")
    assert told == "call 1 (r1-c1) has no token 2: its tokens are 0 to 1"
    assert "holds no checkpoint: one is written at the end" in refusal("r1", "--call", "1", "--now")


@pytest.mark.parametrize("arguments", [["--call", "1"], ["r1", "--token", "1"], ["r1", "--now"], ["r1", "--all"]])
def test_options_that_would_do_nothing_are_refused(run_dir: Path, arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_a_token_is_told_in_words(run_dir: Path) -> None:
    trained = explain("r1", "--call", "1", "--token", "1")
    assert "under policy version 5 at temperature 1: logprob -1.0000 (probability 0.368)" in trained
    assert "the trainer gave it before the update: logprob -0.5000 (probability 0.607), +0.5 from the" in trained
    assert "it is trained in row 1 with advantage 0.943 and weight 0.125: made likelier" in trained
    assert "it is not trained: this token was left out" in explain("r1", "--call", "1", "--token", "0")
    assert "it is not trained: not_selected" in explain("r1", "--call", "2", "--token", "0")
    assert "it is not trained: validation" in explain("v", "--call", "2", "--token", "0")


def test_the_samplers_logprobs_are_not_shown_as_the_trainers(run_dir: Path) -> None:
    bypass = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
    write_run(run_dir, config=bypass)
    assert "were taken for the trainer's (algorithm.rollout_correction.bypass_mode)" in explain("r1", "--call", "1")
    assert "training took the sampler's logprob for its own" in explain("r1", "--call", "1", "--token", "1")


def test_long_calls_are_cut_in_the_middle_unless_all_is_asked_for(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        record(store, "r", [say(1, "a", "b " * 100)])
    place = ["r", "--call", "1", "--run-dir", str(tmp_path)]
    cut = explain(*place).splitlines()
    assert "... 68 more, all of them with --all" in cut[-17]
    assert cut[-1].split()[0] == "99"
    assert len(explain(*place, "--all").splitlines()) == len(cut) - 1 + 68
    assert len(as_json(*place)["tokens"]) == 100


def test_a_call_without_token_ids_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        record(store, "r", [msgspec.structs.replace(say(1, "", "", exact=False), logprobs=None)])
    place = ["r", "--call", "1", "--run-dir", str(tmp_path)]
    assert explain(*place).splitlines()[-1].strip() == "no tokens are known of it"
    assert refusal(*place, "--token", "0").endswith("its tokens are not known")


def test_the_text_of_tokens_is_that_of_the_runs_own_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's, else the model's folder; nothing is fetched for a model that is not on this machine."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ids = [291, 585]

    def text(path: str | None) -> str | None:
        found = decoder(tmp_path, compose({"actor_rollout_ref": {"model": {"path": path}}}, schema=TrainConfig))
        return found and found(ids)

    assert text(None) == text(str(tutorial.checkpoint())) == "SELECT id"
    assert text("owner/not-here") is None
    assert text(str(tmp_path / "gone")) is None
    assert decoder(tmp_path, None) is None
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    shutil.copy(tutorial.checkpoint() / "tokenizer.json", tmp_path / "checkpoints" / "step-3")
    assert text("owner/not-here") == "SELECT id"


def test_a_damaged_record_is_one_line(run_dir: Path) -> None:
    (run_dir / "steps" / "000007.msgpack").write_bytes(b"\x81")
    assert "a step record in" in refusal("r1")
    assert "cannot be read" in refusal("r1")
