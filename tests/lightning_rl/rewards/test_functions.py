"""A reward function in a file: how it is found, what it is told, and what becomes of what it returns."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.rewards.checked import RewardError
from lightning_rl.rewards.functions import RewardFunction, RewardFunctionError, task_arguments
from tests.lightning_rl.rewards.rollouts import TASK, finished, group


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """A reward function of this text, in a file."""

    def written(text: str, name: str = "compute_score", **reward_kwargs: Any) -> RewardFunction:
        file = tmp_path / "my_rewards.py"
        file.write_text(text)
        return RewardFunction(file, name, reward_kwargs)

    return written


SIGNATURE = "data_source, solution_str, ground_truth, extra_info"


def returning(expression: str) -> str:
    return f"def compute_score({SIGNATURE}):\n    return {expression}\n"


# What it is told


def test_it_is_called_as_verl_calls_it(load) -> None:
    scored = load(
        "calls = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):\n"
        "    calls.append((data_source, solution_str, ground_truth, extra_info))\n"
        "    return scale * (solution_str == ground_truth)\n",
        scale=2.0,
    )
    assert scored(group("4", "5")) == [{"reward": 2.0}, {"reward": 0.0}]
    assert scored.function.__globals__["calls"] == [("sums", "4", "4", {"index": 7}), ("sums", "5", "4", {"index": 7})]


def test_it_sees_the_answer_alone_and_nothing_that_a_tool_printed(load) -> None:
    rollout = finished("I do not know.")
    rollout.messages.insert(1, {"role": "tool", "content": "the answer is 4"})
    assert load(returning("float('4' in solution_str)"))([rollout]) == [{"reward": 0.0}]


def test_what_a_task_does_not_say_is_none_but_for_the_ground_truth() -> None:
    told = task_arguments(finished("4", task={"reward_model": {"ground_truth": None}}))
    assert told == {"data_source": None, "ground_truth": None, "extra_info": None}


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"question": "?", "answer": "4"}, r"has the keys \['answer', 'question'\]"),
        ({"reward_model": {"style": "rule"}}, r"has the keys \['reward_model'\]"),
        ({"reward_model": "rule"}, r"has the keys \['reward_model'\]"),
        ("2+2?", "is str"),
    ],
)
def test_a_task_without_a_ground_truth_is_named_with_its_keys(load, task: Any, told: str) -> None:
    with pytest.raises(RewardError, match=rf"rollout r0: its task {told}.*reward_model.*ground_truth"):
        load(returning("1.0"))([finished("4", task=task)])


# What it returns


@pytest.mark.parametrize(
    ("expression", "rewards"),
    [
        ("0.25", {"reward": 0.25}),
        ("3", {"reward": 3.0}),
        ("True", {"reward": 1.0}),
        ("__import__('numpy').float32(0.5)", {"reward": 0.5}),
        ("__import__('numpy').bool_(True)", {"reward": 1.0}),
        ("{'score': 0.5, 'acc': True, 'length': 3}", {"reward": 0.5, "acc": 1.0, "length": 3.0}),
        ("{'score': 0, 'pred': '4', 'steps': [1], 'why': None}", {"reward": 0.0}),
    ],
)
def test_numbers_become_rewards_by_name_and_other_entries_are_left_out(load, expression, rewards) -> None:
    assert load(returning(expression))([finished("4")]) == [rewards]


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("float('nan')", "is nan; it must be finite"),
        ("{'score': float('inf')}", "'reward' is inf"),
        ("{'score': 1.0, 'acc': float('nan')}", "'acc' is nan"),
        ("None", "is None, of type NoneType; return a number"),
        ("'1.0'", "is '1.0', of type str; return a number"),
        ("{'score': '1.0'}", "'reward' is '1.0', of type str"),
        ("__import__('numpy').ones(2)", "of type ndarray"),
        ("{'reward': 1.0}", r"returned \['reward'\]; its final reward is named 'score'"),
        ("{'score': 1.0, 'reward': 0.0}", "no other may be named 'reward'"),
    ],
)
def test_what_is_no_reward_names_the_rollout_and_the_function(load, expression, told) -> None:
    with pytest.raises(RewardError, match=rf"rollout g-1: .*my_rewards.py:compute_score.*{told}"):
        load(returning(f"1.0 if solution_str == 'fine' else {expression}"))(group("fine", "not"))


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_it_raises_is_raised_with_a_note_of_where(load, kind: str) -> None:
    scored = load(f"{kind} compute_score({SIGNATURE}):\n    return 1 / (solution_str != '5')\n")
    with pytest.raises(ZeroDivisionError) as raised:
        scored(group("4", "5"))
    [note] = raised.value.__notes__
    assert note.endswith("my_rewards.py:compute_score on rollout g-1")


# Async functions

MEETING = f"""
import asyncio
barrier = asyncio.Barrier(3)
loops = set()
async def compute_score({SIGNATURE}):
    loops.add(asyncio.get_running_loop())
    await asyncio.wait_for(barrier.wait(), 20)
    return float(solution_str)
"""


def test_an_async_function_scores_a_group_at_once_and_keeps_its_loop(load) -> None:
    scored = load(MEETING)  # none returns before all three are there
    for _ in range(2):  # a second group needs the same loop as the first: so does a client that is kept
        assert scored(group("1", "2", "3")) == [{"reward": 1.0}, {"reward": 2.0}, {"reward": 3.0}]
    assert len(scored.function.__globals__["loops"]) == 1


def test_a_function_may_answer_some_rollouts_at_once_and_others_later(load) -> None:
    later = f"async def later(score):\n    return score\ndef compute_score({SIGNATURE}):\n"
    scored = load(later + "    return later(1.0) if solution_str == 'hard' else 0.5\n")
    assert scored(group("hard", "easy")) == [{"reward": 1.0}, {"reward": 0.5}]


def test_an_error_ends_the_others_of_its_group(load) -> None:
    scored = load(
        "import asyncio\nended = []\n"
        f"async def compute_score({SIGNATURE}):\n"
        "    if solution_str == 'bad':\n        raise KeyError('bug')\n"
        "    try:\n        await asyncio.sleep(1000)\n    finally:\n        ended.append(solution_str)\n"
    )
    with pytest.raises(KeyError):
        scored(group("slow", "bad"))
    assert scored._async.submit(_nothing()).result(20) is None  # what was cancelled has ended by then
    assert scored.function.__globals__["ended"] == ["slow"]


async def _nothing() -> None: ...


# How it is found


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("def compute_scores(): ...", "compute_score", "defines no 'compute_score'; did you mean 'compute_scores'"),
        ("x = 1", "compute_score", "defines no 'compute_score'$"),
        ("compute_score = 3", "compute_score", "is of type int; name a function"),
        ("import no_such_module", "compute_score", "cannot be imported\n(.*\n)*.*No module named 'no_such_module'"),
        ("raise SystemExit", "compute_score", "cannot be imported\n(.*\n)*.*SystemExit"),
        ("def compute_score(prompt, answer): ...", "compute_score", r"\(prompt, answer\) cannot be called: .*data_sou"),
    ],
)
def test_what_is_wrong_with_the_file_is_told_before_anything_runs(load, text, name, told) -> None:
    with pytest.raises(RewardFunctionError, match=told):
        load(text, name)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RewardFunctionError, match=r"nowhere.py:compute_score: there is no such file"):
        RewardFunction(tmp_path / "nowhere.py")
    (tmp_path / "rewards.txt").write_text("")
    with pytest.raises(RewardFunctionError, match=r"its name ends in .py"):
        RewardFunction(tmp_path / "rewards.txt")


def test_reward_kwargs_that_do_not_fit_are_told(load) -> None:
    with pytest.raises(RewardFunctionError, match=r"unexpected keyword argument 'scale'.*reward_kwargs \['scale'\]"):
        load(returning("1.0"), scale=2.0)
    with pytest.raises(RewardFunctionError, match=r"reward_kwargs hold 'ground_truth'"):
        load(returning("1.0"), ground_truth="4")


def test_a_file_may_be_named_as_a_module_of_the_library_and_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("REWARD = 0.75\n")
    file = tmp_path / "math.py"
    file.write_text(f"from neighbour_of_rewards import REWARD\n{returning('REWARD')}")
    assert RewardFunction(file)([finished("4")]) == [{"reward": 0.75}]
    assert RewardFunction(file).function is RewardFunction(file).function, "the file was run twice"


def test_a_script_that_names_itself_is_not_run_again(tmp_path: Path) -> None:
    """Without a `__main__` guard: a second run of it would train a second time."""
    script = tmp_path / "train.py"
    script.write_text(
        "print('runs')\n"
        "from lightning_rl.rewards.functions import RewardFunction\n"
        f"{returning('1.0')}"
        "assert RewardFunction(__file__).function is compute_score\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "at_home.py").write_text(returning("1.0"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RewardFunction("~/at_home.py").file == tmp_path / "at_home.py"


def test_a_relative_path_is_looked_for_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.py").write_text(returning("len(solution_str)"))
    monkeypatch.chdir(tmp_path)
    assert RewardFunction("here.py")([finished("four", task=TASK)]) == [{"reward": 4.0}]
