"""Renderers that do not do the same have other fingerprints; and the files that are named make one that does."""

import json
import shutil
from pathlib import Path

import pytest

from lightning_rl.tutorial import checkpoint
from lightning_rl_proxy.rendering.fingerprint import Fingerprint, fingerprint_of
from lightning_rl_proxy.rendering.load import FILES, load_renderer
from tests import seeing


def fingerprint(folder: Path) -> Fingerprint:
    return fingerprint_of(load_renderer(folder, "template", "m"))


@pytest.mark.parametrize("sees", [False, True])
def test_the_named_files_of_a_model_make_the_renderer_of_its_whole_folder(tmp_path: Path, sees: bool) -> None:
    whole = seeing.make_folder(tmp_path / "whole") if sees else tmp_path / "whole"
    if not sees:
        shutil.copytree(checkpoint(), whole, ignore=shutil.ignore_patterns("*.safetensors"))
    (whole / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (tmp_path / "named").mkdir()
    for name in FILES:
        if (whole / name).exists():
            shutil.copy(whole / name, tmp_path / "named" / name)
    assert fingerprint(tmp_path / "named") == fingerprint(whole)
    assert (load_renderer(tmp_path / "named", "template", "m").vision is not None) == sees


@pytest.mark.parametrize(
    ("file", "content"),
    [("generation_config.json", {"eos_token_id": [5]}), ("preprocessor_config.json", {"patch_size": 8})],
)
def test_a_model_that_ends_elsewhere_or_sees_otherwise_is_another_one(
    tmp_path: Path, file: str, content: dict[str, object]
) -> None:
    folder = seeing.make_folder(tmp_path / "model")
    before = fingerprint(folder)
    there = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(there | content))
    after = fingerprint(folder)
    assert after.settings != before.settings
    assert after._replace(settings=before.settings) == before
