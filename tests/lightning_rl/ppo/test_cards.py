"""The GPUs of a run reach the processes that are to use them: a stand-in `nvidia-smi` lists some, and real processes in
the place of vLLM report what they were told."""

import stat
import sys
from pathlib import Path

import pytest

from lightning_rl.config import ConfigError, compose
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.cards import Cards
from lightning_rl.processes import gpus

NVIDIA_SMI = """#!/bin/sh
i=0
while [ $i -lt {count} ]; do echo $i; i=$((i + 1)); done
"""
VLLM = """
import http.server, os, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
print("it was given", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
CHECKPOINT = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"
ROLLOUT = "actor_rollout_ref.rollout."


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four of them."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "nvidia-smi", NVIDIA_SMI.format(count=4))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(gpus.torch.version, "cuda", None)  # also where this torch would look for itself


def given(tmp_path: Path, *words: str) -> list[str]:
    """What each server of a run was told."""
    (tmp_path / "vllm.py").write_text(VLLM)
    python = program(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} {tmp_path / "vllm.py"} "$@"\n')
    always = [f"{ROLLOUT}name=vllm", f"{ROLLOUT}python={python}", "trainer.device=cuda"]
    config = compose(command_line=[*always, *words])
    cards = Cards(config, {"actor"})
    options = resolved_config.vllm_options(config, cards.placement, cards.names)
    policy = VllmPolicy(ModelSource(CHECKPOINT, device="cpu"), options, tmp_path)
    try:
        policy.start()
    finally:
        policy.close()
    logs = [(tmp_path / f"vllm-{number}.log").read_text() for number in range(len(cards.placement.engines))]
    return [log.rpartition("it was given ")[2].splitlines()[0] for log in logs]


@pytest.mark.usefixtures("four_gpus")
def test_every_server_is_told_its_own_gpus(tmp_path: Path) -> None:
    two = (f"{ROLLOUT}data_parallel_size=2", f"{ROLLOUT}tensor_model_parallel_size=2")
    assert given(tmp_path, *two, f"{ROLLOUT}devices=colocated") == ["0,1", "2,3"]


@pytest.mark.usefixtures("four_gpus")
def test_a_single_server_stays_off_the_trainers_gpu(tmp_path: Path) -> None:
    assert given(tmp_path) == ["1"]


@pytest.mark.usefixtures("four_gpus")
def test_indices_count_among_the_gpus_that_the_run_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5e,2")
    assert given(tmp_path, "trainer.devices=[1]", f"{ROLLOUT}devices=[2]") == ["2"]
    assert given(tmp_path, f"{ROLLOUT}devices=[1]") == ["GPU-5e"]


@pytest.mark.usefixtures("four_gpus")
def test_the_trainer_takes_its_own_gpu_and_says_so() -> None:
    cards = Cards(compose(command_line=["trainer.device=cuda", "trainer.devices=[2]"]), {"actor"})
    assert (cards.device, cards.line()) == ("cuda:2", "training on GPU 2")
    assert Cards(compose(command_line=["trainer.device=cpu"]), {"actor"}).line() is None


@pytest.mark.usefixtures("four_gpus")
def test_gpus_that_this_torch_cannot_use_are_not_passed_over_in_silence() -> None:
    config = compose(command_line=["trainer.device=auto"])
    if Cards(config, {"actor"}).placement.trainer:
        pytest.skip("there is a GPU that this torch uses")
    assert Cards(config, {"actor"}).line() == (
        "training on the CPU: there are 4 GPUs, and this torch is built without CUDA"
    )


def test_a_gpu_that_is_asked_for_and_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"1 processes train, a GPU each .* and there is none"):
        Cards(compose(command_line=["trainer.device=cuda"]), {"actor"})


@pytest.mark.parametrize("text", ["exit 9", "echo broken; exit 1", "true"])
def test_a_driver_without_gpus_lists_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "nvidia-smi", f"#!/bin/sh\n{text}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.nvidia_smi("index") == []
