"""A reward model scores conversations as `transformers` does; what is none is named before anything is trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

import lightning_rl as lrl
from lightning_rl.config import ConfigError, compose
from lightning_rl.rewards.checked import RewardError
from lightning_rl.rewards.grading import from_config, grade
from lightning_rl.rewards.reward_model import RewardModel
from lightning_rl.tutorial import checkpoint
from tests.lightning_rl.rewards.rollouts import finished, group

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small reward model, whose padding token is the one that every message ends with."""
    return made(tmp_path_factory.mktemp("scorer"))


def made(folder: Path, *, labels: int = 1) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint() / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=labels,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder


def settings(**keys: Any) -> Any:
    return compose({"reward": {"reward_model": {"enable": True, "dtype": "float32"} | keys}}).reward


def test_each_rollout_has_the_score_of_its_own_conversation(folder: Path) -> None:
    reward = from_config(settings(model_path=str(folder)))
    assert isinstance(reward, RewardModel)
    rollouts = group("4", "5", "four", "4")
    [graded] = grade(reward, [rollouts], concurrency=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for rollout, found in zip(rollouts, graded, strict=True):
        written = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in rollout.messages)
        ids = tokenizer(written, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            assert found == {"reward": model(input_ids=ids).logits[0, 0].item()}
    assert len({found["reward"] for found in graded}) == 3


def test_the_keys_say_how_it_is_computed(folder: Path) -> None:
    assert from_config(compose({"reward": {"reward_model": {"model_path": str(folder)}}}).reward) is None
    reward = from_config(settings(model_path=str(folder), dtype="bfloat16", device="cpu"))
    assert isinstance(reward, RewardModel)
    assert (reward._model.dtype, reward._device.type) == (torch.bfloat16, "cpu")
    assert RewardModel(str(folder), device="cuda")._device.type == "cuda"


def test_the_model_is_placed_once_for_all_groups_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward, moved = RewardModel(str(folder), device="cpu"), list[str]()
    to = reward._model.to
    monkeypatch.setattr(reward._model, "to", lambda device: moved.append(str(device)) or to(device))
    grade(reward, [[finished("4")], [finished("5")], [finished("6")]], concurrency=2)
    assert moved == ["cpu", "cpu"]


def test_a_model_for_which_there_was_no_room_is_placed_when_it_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward, moved = RewardModel(str(folder), device="cpu"), list[str]()

    def to(device: object) -> None:
        moved.append(str(device))
        if len(moved) == 1:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(reward._model, "to", to)
    with pytest.raises(RuntimeError, match="out of memory"):
        reward([finished("4")])
    assert reward([finished("4")]) != []
    assert moved == ["cpu", "cpu", "cpu"]


def test_a_rollout_without_a_call_has_nothing_to_score(folder: Path) -> None:
    silent = msgspec.structs.replace(finished(""), messages=[])
    assert RewardModel(str(folder))([silent]) == [0.0]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "user", "content": "a b " * 100}], r"has \d+ tokens, and the reward model .* takes 64"),
        ([{"role": "tool", "content": "3"}], "the chat template of .* cannot write its conversation: .*no tools here"),
    ],
)
def test_a_conversation_that_cannot_be_scored_is_named(folder: Path, messages: Any, told: str) -> None:
    rollout = msgspec.structs.replace(finished("4", "r7"), messages=messages)
    with pytest.raises(RewardError, match=f"rollout r7: .*{told}"):
        RewardModel(str(folder))([rollout])


def test_what_is_no_reward_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    two = made(tmp_path, labels=2)
    for path, told in (
        (two, "Qwen2ForSequenceClassification with 2"),
        (checkpoint(), "is no reward model: .*ForCausalLM"),
        (tmp_path / "nothing", "neither the folder of a model nor a model id"),
    ):
        with pytest.raises(ConfigError, match=f"reward.reward_model.model_path=.*{told}"):
            from_config(settings(model_path=str(path)))
    with pytest.raises(ConfigError, match=r"name the model, reward\.reward_model\.model_path"):
        from_config(settings())


def test_what_is_wrong_with_a_reward_model_is_told_before_any_rollout(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(path: str) -> BaseException:
        algorithm = lrl.PPO({"reward": {"reward_model": {"enable": True, "model_path": path}}})
        with pytest.raises((OSError, ConfigError)) as raised:
            algorithm.open(tmp_path)
        return raised.value

    silent = Path(shutil.copytree(folder, tmp_path / "silent"))
    (silent / "chat_template.jinja").unlink()
    (silent / "tokenizer_config.json").write_text("{}")
    assert "its tokenizer has no chat template" in str(told(str(silent)))

    def at_the_hub(path: str) -> str:
        if path == "Owner/judge":
            return str(checkpoint())
        raise OSError("not found")

    monkeypatch.setattr("huggingface_hub.snapshot_download", at_the_hub)
    assert told("Owner/typo").__notes__ == ["model 'Owner/typo' is no folder here, and could not be taken from the hub"]
    assert "reward.reward_model.model_path='Owner/judge' is no reward model" in str(told("Owner/judge"))


def test_a_config_that_says_nothing_of_labels_has_two(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ConfigError, match="with 2"):
        RewardModel(str(tmp_path))


def test_a_model_with_one_number_that_is_no_classifier_is_none(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="this is LlamaForCausalLM with 1"):
        RewardModel(str(tmp_path))


def test_a_folder_that_is_named_as_a_model_of_the_hub_is_not_looked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="'owner/model' is neither the folder of a model nor a model id"):
        RewardModel("owner/model")


def test_a_conversation_may_be_as_long_as_the_model_takes(folder: Path) -> None:
    model = RewardModel(str(folder))
    model._model.config.max_position_embeddings = len(model.token_ids(finished("4")))
    assert len(model([finished("4")])) == 1
    model._model.config.max_position_embeddings -= 1
    with pytest.raises(RewardError, match="takes"):
        model([finished("4")])


def test_the_template_alone_writes_special_tokens(folder: Path, tmp_path: Path) -> None:
    """Of a tokenizer that begins every text with one there would be two."""
    begins = Path(shutil.copytree(folder, tmp_path / "begins"))
    tokenizer = Tokenizer.from_file(str(begins / "tokenizer.json"))
    first = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[first])
    tokenizer.save(str(begins / "tokenizer.json"))
    assert RewardModel(str(begins)).token_ids(finished("4")) == RewardModel(str(folder)).token_ids(finished("4"))
