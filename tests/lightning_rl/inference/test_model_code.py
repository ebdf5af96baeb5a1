"""Models that come with Python code of their own: run where it is trusted, named where it is not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl.config import ConfigError, compose
from lightning_rl.inference import model_code
from lightning_rl.inference.load import load_model
from lightning_rl.ppo.local_workers import register_model_code
from lightning_rl.ppo.models import Models
from lightning_rl.tutorial import checkpoint
from tests.lightning_rl.inference.models import make

CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from .parts_of_{kind} import SCALE


class {name}Config(Qwen2Config):
    model_type = "{kind}"


class {name}Model(Qwen2Model):
    config_class = {name}Config


class {name}ForCausalLM(Qwen2ForCausalLM):
    config_class = {name}Config

    def forward(self, input_ids=None, logits_to_keep=0, **named):
        found = super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **named)
        found.logits = found.logits * SCALE
        return found
"""


def of_own_code(folder: Path, kind: str, *, parts: str = "SCALE = 2.0\n") -> Path:
    """A model of the type `kind`, which its own folder alone has the classes of: Qwen2 with twice its logits."""
    name = kind.title()
    make("qwen2").save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint() / file, folder / file)
    (folder / f"modeling_{kind}.py").write_text(CODE.format(kind=kind, name=name))
    (folder / f"parts_of_{kind}.py").write_text(parts)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    named = {auto: f"modeling_{kind}.{name}{what}" for auto, what in classes.items()}
    changed = config | {"model_type": kind, "architectures": [f"{name}ForCausalLM"], "auto_map": named}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def settings(folder: Path, **model: Any) -> Any:
    return compose(
        {
            "actor_rollout_ref": {"model": {"path": str(folder)} | model, "actor": {"use_kl_loss": True}},
            "critic": {"model": {"path": str(folder)} | model},
            "trainer": {"device": "cpu"},
        }
    )


@pytest.mark.long
def test_a_trusted_model_is_trained_sampled_and_exported_with_its_code(tmp_path: Path) -> None:
    folder = of_own_code(tmp_path / "strange", "strange")
    made = Models(settings(folder, trust_remote_code=True), tmp_path, with_critic=True)
    made.train(1)
    ids = torch.tensor([[1, 2, 3]])
    plain = make("qwen2")
    plain.load_state_dict(made.model.state_dict())
    with torch.inference_mode():
        assert torch.equal(made.model(input_ids=ids).logits, 2 * plain.eval()(input_ids=ids).logits)
    assert made.reference is not None
    assert made.critic is not None
    assert {type(part).__name__ for part in (made.model, made.reference._forward.model, made.critic.model.trunk)} == {
        "StrangeForCausalLM",
        "StrangeModel",
    }
    made.export(tmp_path / "export")
    # A process that knows nothing of it, as whoever serves the trained model.
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, transformers as t;"
            "print(type(t.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__)",
            str(tmp_path / "export"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split()[-1] == "StrangeForCausalLM"


def test_without_trust_nothing_of_it_is_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = of_own_code(tmp_path / "unread", "unread", parts=f"open({str(ran)!r}, 'w')\nSCALE = 1\n")
    with pytest.raises(
        ConfigError,
        match=r"(?s)actor_rollout_ref.model.path=.*type 'unread'.*modeling_unread.py.*trust_remote_code=true",
    ):
        register_model_code(settings(folder))
    assert not ran.exists()
    register_model_code(settings(folder, trust_remote_code=True))
    assert ran.exists()


def test_code_that_fails_is_named(tmp_path: Path) -> None:
    folder = of_own_code(tmp_path / "broken", "broken", parts="raise ZeroDivisionError('their own')\n")
    with pytest.raises(ConfigError, match=r"the code of the model in .*broken fails: ZeroDivisionError: their own"):
        register_model_code(settings(folder, trust_remote_code=True))


def test_a_model_that_transformers_has_needs_no_trust(tmp_path: Path) -> None:
    make("qwen2").save_pretrained(tmp_path)
    model_code.refuse_unknown(tmp_path)
    model_code.register(tmp_path)
    assert type(load_model(tmp_path)).__name__ == "Qwen2ForCausalLM"
