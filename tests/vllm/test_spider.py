"""The Spider tutorial's command with vLLM as its engine: a step is trained on what vLLM sampled."""

from pathlib import Path

import pytest

from tests.e2e.test_spider import check_run, small_run, write_folder, write_model
from tests.vllm.server import PYTHON


@pytest.mark.long
def test_a_step_is_trained_as_the_page_says(tmp_path: Path) -> None:
    folder, model = write_folder(tmp_path / "spider"), write_model(tmp_path / "model")
    done = small_run(folder, model, tmp_path / "run", "--engine", "vllm", "--python", str(PYTHON))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Application startup complete" in (tmp_path / "run" / "vllm-0.log").read_text()
    check_run(tmp_path / "run")
