"""A task's images stand where its prompt says `<image>`, and nothing that a task shows is left out without a word."""

from pathlib import Path
from typing import Any

import pytest

from lightning_rl.agents.task_fields import LoopTaskError, shown_messages_of
from tests import seeing

ONE, TWO = (seeing.data_url(seeing.picture(seed)) for seed in (1, 2))


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_images_stand_where_the_prompt_says_so(tmp_path: Path) -> None:
    for name in ("two.png", "2 2.png"):
        (tmp_path / name).write_bytes(seeing.picture(2))
    prompt = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "<image>Is this <image>?"},
        {"role": "user", "content": [text("<image> is a word here")]},
        {"role": "user", "content": "or <image>"},
    ]
    images = [ONE, str(tmp_path / "two.png"), {"image": "http://there/a.png"}]
    assert shown_messages_of({"prompt": prompt, "images": images}) == [
        prompt[0],
        {"role": "user", "content": [shown(ONE), text("Is this "), shown(TWO), text("?")]},
        prompt[2],
        {"role": "user", "content": [text("or "), shown("http://there/a.png")]},
    ]
    assert shown_messages_of({"prompt": "<image>?", "images": [{"path": f"file://{tmp_path}/2%202.png"}]}) == [
        {"role": "user", "content": [shown(TWO), text("?")]}
    ]


@pytest.mark.parametrize("images", [None, [], "what a tool reads"])
def test_without_images_the_prompt_stays_as_it_is(images: Any) -> None:
    task = {"prompt": "An <image> tag", "images": images, "videos": None}
    assert shown_messages_of(task) == [{"role": "user", "content": "An <image> tag"}]
    parts = [{"role": "user", "content": [shown(ONE), text("what?")]}]
    assert shown_messages_of({"prompt": parts, "images": [ONE]}) == parts
    assert shown_messages_of("An <image> tag") == [{"role": "user", "content": "An <image> tag"}]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"prompt": "<image>", "images": [ONE, TWO]}, "has 2 `images`, and its prompt says `<image>` 1 times"),
        ({"prompt": "what is it?", "images": [ONE]}, "has 1 `images`, and its prompt says `<image>` 0 times"),
        ({"prompt": "<video>", "videos": ["a.mp4"]}, "says `<video>`, and models are shown images alone"),
        (
            {"prompt": "<image>", "images": ["/nowhere/a.png"]},
            "image 0 of the task's `images` cannot be shown: .*No such",
        ),
        ({"prompt": "<image>", "images": [3]}, "image 0 .* cannot be shown: it is no URL and no path"),
        ({"prompt": "<image>", "images": [__file__]}, "is no PNG, JPEG, GIF or WebP file"),
    ],
)
def test_what_cannot_be_shown_is_named(task: dict[str, Any], message: str) -> None:
    with pytest.raises(LoopTaskError, match=message):
        shown_messages_of(task)
