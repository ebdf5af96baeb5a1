"""Which renderer a model gets: by its name, by its folder's word, by its own template, or one clear error."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_rl_proxy.rendering import FastTokenizer, LibraryRenderer, load_renderer
from lightning_rl_proxy.templates import TemplateRenderer
from tests.proxy.conftest import TOKENIZER

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = CHATML.replace("m.content", "m.content.split('</think>')[-1]")


def folder(path: Path, **config: Any) -> Path:
    shutil.copy(TOKENIZER / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_auto_takes_the_models_own_then_the_folders_word_then_the_template(tmp_path: Path) -> None:
    word = folder(tmp_path, chat_template=CHATML, renderer="qwen3")
    assert isinstance(load_renderer(word, "auto", "mine"), LibraryRenderer)
    template = folder(tmp_path, chat_template=CHATML)
    assert isinstance(load_renderer(template, "auto", "mine"), TemplateRenderer)
    assert isinstance(load_renderer(template, "auto", "Qwen/Qwen3-8B"), LibraryRenderer)


def test_the_template_can_be_asked_for_by_name(tmp_path: Path) -> None:
    path = folder(tmp_path, chat_template=CHATML, renderer="qwen3")
    assert isinstance(load_renderer(path, "template", "Qwen/Qwen3-8B"), TemplateRenderer)


@pytest.mark.parametrize("name", ["auto", "template"])
def test_a_folder_without_a_template_says_so_and_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no renderer is known for model 'bare'; name one that fits its chat") as bare:
        load_renderer(folder(tmp_path), name, "bare")
    assert f"{tmp_path} has no chat template" in str(bare.value)


def test_an_unknown_renderer_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="renderer 'quen3' is unknown; did you mean 'qwen3'"):
        load_renderer(folder(tmp_path), "quen3", "mine")
    with pytest.raises(ValueError, match="renderer 'templte' is unknown; did you mean 'template'"):
        load_renderer(folder(tmp_path), "templte", "mine")


def test_history_is_kept_unless_the_template_is_to_be_followed(tmp_path: Path) -> None:
    path = folder(tmp_path, chat_template=STRIPPING)
    proven = [load_renderer(path, "auto", "mine").append_only["thinking"]]  # type: ignore[union-attr]
    proven.append(load_renderer(path, "auto", "mine", history="template").append_only["thinking"])  # type: ignore[union-attr]
    assert proven == [True, False]


def test_a_library_format_follows_its_template_when_asked_to() -> None:
    """Qwen3 drops the reasoning of earlier turns at a new question, so that question cannot be appended."""
    prompt_and_answer = []
    for history in ("keep", "template"):
        renderer = load_renderer(TOKENIZER, "qwen3", "mine", history=history)  # type: ignore[arg-type]
        prompt = renderer.render([{"role": "user", "content": "one"}], None)
        answer = FastTokenizer(TOKENIZER).encode("<think>\nso\n</think>\n\nthe answer<|im_end|>")
        prompt_and_answer.append(renderer.extend(prompt, answer, [{"role": "user", "content": "two"}], None))
    kept, followed = prompt_and_answer
    assert kept is not None
    assert followed is None


def test_the_models_tutorial_template_renders_as_its_renderer_does() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    rendered = [load_renderer(TOKENIZER, name, "policy").render(messages, None) for name in ("qwen3", "template")]
    assert rendered[0] == rendered[1]
