"""A run whose agent shows its model images: a user's, a tool's, and another one in the same words; recorded, trained,
read back."""

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import torch
from typer.testing import CliRunner

import lightning_rl as lrl
from lightning_rl.cli import app
from lightning_rl.inference.load import load_model
from lightning_rl.inspect import recorded
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl_adapters import forest, rows, semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.media import media_of
from lightning_rl_proxy.rendering.load import load_renderer
from tests import seeing

pytestmark = pytest.mark.e2e

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ROLLOUTS, STEPS = 4, 2  # of a step


@lrl.rollout
def looker(task: dict[str, int], llm: lrl.LLM) -> float:
    """Shows an image, then a tool's; then, in the same words, another one instead of that."""
    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)

    def ask(messages: list[Any]) -> str:
        answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, max_tokens=8)
        return answer.choices[0].message.content or ""

    shown = [seeing.asked("see", seeing.picture(task["seed"]))]
    first = ask(shown)
    shown.append({"role": "assistant", "content": first})
    lengths = [len(first)]
    for seed in (1000, 2000):
        more = {"role": "tool", "tool_call_id": "look", "content": [seeing.part(seeing.picture(seed, 24, 16))]}
        lengths.append(len(ask([*shown, more])))
    return float(sum(lengths) % 5)


@pytest.mark.long
def test_a_model_that_sees_is_trained_on_what_it_saw(tmp_path: Path) -> None:
    folder = seeing.make_folder(tmp_path / "model")
    config = {
        "actor_rollout_ref": {
            "model": {"path": str(folder)},
            "rollout": {"n": 2, "max_model_len": 600},
            "actor": {"ppo_mini_batch_size": 2, "use_kl_loss": True, "optim": {"lr": 1e-3}},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 2},
        "trainer": {"total_training_steps": STEPS, "save_freq": 1, "logger": ["console", "jsonl"]},
    }
    trainer = lrl.Trainer(looker, n_runners=2, run_dir=tmp_path / "run")
    trainer.fit(lrl.PPO(config), [{"seed": seed} for seed in range(4)])
    run = tmp_path / "run"

    # What the trainer computes of the rows is what the engine sampled with, before and after an update.
    metrics = jsonl.read(run / "metrics.jsonl")
    assert len(metrics) == STEPS
    assert all(line["training/rollout_probs_diff_max"] < 1e-4 for line in metrics)

    # Every image once an attempt, every row with its own, every sampled token in one mask.
    with recorded.opened(run) as connection:
        names = [row[0] for row in connection.exec_driver_sql("SELECT rollout_id FROM rollouts WHERE mode = 'train'")]
        traces = [recorded.trace(connection, name) for name in names]
    assert len(traces) == ROLLOUTS * STEPS
    for trace in traces:
        [attempt] = trace.attempts
        calls = calls_of(attempt.spans)
        assert [len(call.media) for call in calls] == [1, 1, 1]
        assert calls[1].prompt_ids == calls[2].prompt_ids
        held = media_of(attempt.spans)
        assert set(held.values()) == {
            seeing.picture(trace.rollout.task["seed"]),
            seeing.picture(1000, 24, 16),
            seeing.picture(2000, 24, 16),
        }
        assert sum(span.name == semconv.MEDIA_SPAN for span in attempt.spans) == 3
        cut = rows.cut(forest.build(calls), {})
        assert [[one.sha256 for one in row.media] for row in cut] == [
            [calls[0].media[0].sha256, call.media[0].sha256] for call in calls[1:]
        ]
        assert sum(sum(row.loss_mask) for row in cut) == sum(call.sampled_tokens for call in calls)
    last = metrics[-1]
    assert last["tokens/received"] == sum(call.sampled_tokens for t in traces for call in calls_of(t.attempts[0].spans))
    assert last["tokens/trained"] == last["tokens/received"]

    # The tower has learnt, and what is left behind is a folder that a gateway and `transformers` take.
    before, after = load_model(folder).state_dict(), load_model(run / "model").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("visual" in name for name in changed)
    assert any("language_model" in name for name in changed)
    assert load_renderer(run / "model", "auto", "m").vision == load_renderer(folder, "auto", "m").vision

    shown = CliRunner().invoke(app, ["explain", traces[-1].rollout.rollout_id, "--run-dir", str(run)])
    assert "1 image" in shown.output
    assert "different ways on" in shown.output  # which equal token ids alone would take for samples of one prompt
    one = CliRunner().invoke(
        app, ["explain", traces[-1].rollout.rollout_id, "--run-dir", str(run), "--call", "2", "--now", "--json"]
    )
    assert one.exit_code == 0, one.output
    tokens = msgspec.json.decode(one.output)["tokens"]
    assert all(token["now_logprob"] != token["logprob"] for token in tokens)


@pytest.mark.long
def test_a_data_file_of_verls_shows_its_images(tmp_path: Path) -> None:
    """Rows as verl's `examples/data_preprocess/geo3k.py` writes them, and no agent: the loop shows the image."""
    datasets = pytest.importorskip("datasets")
    folder = seeing.make_folder(tmp_path / "model")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"<image>How many {seed}?"}],
            "images": [{"bytes": seeing.picture(seed), "path": None}],
            "reward_model": {"style": "rule", "ground_truth": "3"},
        }
        for seed in range(2)
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    config = {
        "actor_rollout_ref": {
            "model": {"path": str(folder)},
            "rollout": {"n": 2, "max_model_len": 600, "agent": {"default_agent_loop": "single_turn_agent"}},
            "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}},
        },
        "data": {"train_batch_size": 2, "train_files": str(tmp_path / "train.parquet"), "max_response_length": 8},
        "trainer": {"total_training_steps": 1},
    }
    lrl.Trainer(run_dir=tmp_path / "run").fit(
        lrl.PPO(config, reward=lambda rollouts: [float(len(each.answer) % 3) for each in rollouts])
    )
    with recorded.opened(tmp_path / "run") as connection:
        names = [row[0] for row in connection.exec_driver_sql("SELECT rollout_id FROM rollouts")]
        traces = [recorded.trace(connection, name) for name in names]
    shown = [set(media_of(trace.attempts[0].spans).values()) for trace in traces]
    assert sorted(map(sorted, shown)) == sorted([seeing.picture(seed)] for seed in (0, 0, 1, 1))
