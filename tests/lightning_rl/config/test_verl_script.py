"""The command of a script that starts verl's trainer: bash fills it in, and nothing is carried out."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from lightning_rl.config import verl_script
from lightning_rl.config.verl_script import ScriptError, VerlCommand

SCRIPT = """#!/usr/bin/env bash
# it's a script (with an apostrophe in its first comment)
set -xeuo pipefail
ulimit -n 65535
cd "$(dirname "${BASH_SOURCE[0]}")"
pip install something && touch "$HOME/installed"
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
size=$((2 * 512))  # tokens
EXTRA=()
case "$DEVICE" in
  gpu) EXTRA+=(trainer.n_gpus_per_node=4) ;;
  npu) EXTRA+=(trainer.device=npu) ;;
esac
if (( size > 1000 )); then EXTRA+=(data.seed=1); fi
DATA=(
    data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']"
    # data.shuffle=False
    data.max_prompt_length=${size}
)
echo started > "$HOME/written"
/bin/touch "$HOME/touched"
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer.yaml \\
    "${DATA[@]}" "${EXTRA[@]}" \\
    trainer.logger='["console","wandb"]' \\
    actor_rollout_ref.model.path="$MODEL_PATH" $@ > log.txt 2>&1
"""


def command(tmp_path: Path, text: str, **environment: str) -> VerlCommand:
    script = tmp_path / "run.sh"
    script.write_text(text)
    return verl_script.command_of(script, {"HOME": str(tmp_path), **environment})


def test_variables_arrays_and_conditions_are_filled_in_and_nothing_is_done(tmp_path: Path) -> None:
    found = command(tmp_path, SCRIPT)
    assert found == VerlCommand(
        [
            f"data.train_files=['{tmp_path}/a.parquet', '{tmp_path}/b.parquet']",
            "data.max_prompt_length=1024",
            "trainer.n_gpus_per_node=4",
            "data.seed=1",
            'trainer.logger=["console","wandb"]',
            "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        ],
        None,
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.sh"]
    assert not Path("log.txt").exists()


def test_variables_of_the_environment_count(tmp_path: Path) -> None:
    found = command(tmp_path, SCRIPT, DEVICE="npu", MODEL_PATH="mine").overrides
    assert found[-1] == "actor_rollout_ref.model.path=mine"
    assert "trainer.device=npu" in found


def test_a_configuration_beside_the_script_is_found(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "grpo.yaml").write_text("{}")
    found = command(tmp_path, "python -m verl.trainer.main_ppo --config-path=./config --config-name grpo data.seed=1\n")
    assert found == VerlCommand(["data.seed=1"], tmp_path / "config" / "grpo.yaml")


def test_the_trainer_of_dapos_recipe_is_read_as_verls(tmp_path: Path) -> None:
    text = "ray job submit -- python3 -m recipe.dapo.main_dapo --config-name dapo_trainer data.seed=1\n"
    assert command(tmp_path, text) == VerlCommand(["data.seed=1"], None)


def test_verls_own_configuration_is_no_file_and_a_blank_word_no_override(tmp_path: Path) -> None:
    text = "python -m verl.trainer.main_ppo --config-path=config --config-name='ppo_trainer.yaml' data.seed=1 ' '\n"
    assert command(tmp_path, text) == VerlCommand(["data.seed=1"], None)
    empty = 'python -m verl.trainer.main_ppo data.seed=1 "" name=$(date -u +%Y)\n'
    assert command(tmp_path, empty).overrides == ["data.seed=1", f"name={datetime.now(UTC):%Y}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo nothing\n", "holds no command of the form `python -m verl"),
        (2 * "python -m verl.trainer.main_ppo a=1\n", "holds 2 commands"),
        ("python -m verl.trainer.sft_trainer a=1\n", r"starts verl\.trainer\.sft_trainer: only the training"),
        (": ${DATA:?set it}\npython -m verl.trainer.main_ppo a=$DATA\n", "set the environment variables that"),
        (
            "python -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' a=1\n",
            "ppo_megatron_trainer, and models are trained by FSDP2",
        ),
        ("python -m verl.trainer.main_ppo --config-name=mine a=1\n", "the configuration mine.yaml, which is not there"),
    ],
)
def test_what_cannot_be_translated_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        command(tmp_path, text)


@pytest.mark.parametrize("shell", ["bash -c", "ssh host"])
def test_a_command_in_one_word_is_read_too(tmp_path: Path, shell: str) -> None:
    inner = "cd /x && python3 -m verl.trainer.main_ppo data.train_batch_size=$N 'a=b c' 2>&1 | tee log.txt; echo done"
    assert command(tmp_path, f'N=16\n{shell} "{inner}"\n').overrides == ["data.train_batch_size=16", "a=b c"]


def test_what_scripts_set_and_compute_of_names_is_as_in_bash(tmp_path: Path) -> None:
    text = (
        "set -euo pipefail; set -x\nfalse\nset -- data.seed=7\n"
        'python -m verl.trainer.main_ppo name=$(basename /a/b.sh .sh) file=$(basename "$DATA/") "$@"\n'
    )
    assert command(tmp_path, text, DATA="/a/c.parquet").overrides == ["name=b", "file=c.parquet", "data.seed=7"]


def test_paths_are_computed_as_the_scripts_own_commands_would(tmp_path: Path) -> None:
    text = """
source activate.sh
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd sub
python -m verl.trainer.main_ppo here=$HERE up=$(dirname file) at=$(pwd)
"""
    assert command(tmp_path, text).overrides == [f"here={tmp_path}", "up=.", f"at={Path.cwd() / 'sub'}"]


def test_what_other_commands_would_say_is_taken_for_no(tmp_path: Path) -> None:
    text = "python3 -c 'import flash_attn' && X=yes || X=no\npython -m verl.trainer.main_ppo x=$X\n"
    assert command(tmp_path, text).overrides == ["x=no"]


def test_what_a_script_takes_in_is_not_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("activate").write_text("exit 0\n")
    text = "source activate\nulimit -n 0\npython -m verl.trainer.main_ppo x=1\n"
    assert command(tmp_path, text).overrides == ["x=1"]


def test_a_script_that_stops_at_the_first_failure_is_read_to_its_end(tmp_path: Path) -> None:
    assert command(tmp_path, "set -euo pipefail\nfalse\npython -m verl.trainer.main_ppo_sync x=${UNSET} y=1\n") == (
        ["x=", "y=1"],
        None,
    )


def test_a_text_that_only_names_verl_is_no_command(tmp_path: Path) -> None:
    text = "python -m verl.trainer.main_ppo a='verl.is a name' b='x > y' > log.txt\n"
    assert command(tmp_path, text).overrides == ["a=verl.is a name", "b=x > y"]


def test_a_configuration_above_the_script_or_where_one_stands_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script := tmp_path / "examples" / "deep" / "run.sh").parent.mkdir(parents=True)
    script.write_text("python -m verl.trainer.main_ppo --config-path=config --config-name=mine.yaml a=1\n")
    for place in (tmp_path / "config", tmp_path / "here" / "config"):
        place.mkdir(parents=True)
        (place / "mine.yaml").write_text("{}")
    assert verl_script.command_of(script, {}).config == tmp_path / "config" / "mine.yaml"
    monkeypatch.chdir(tmp_path / "here")
    assert verl_script.command_of(script, {}).config == Path("config/mine.yaml")
