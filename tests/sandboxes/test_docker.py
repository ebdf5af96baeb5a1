"""Containers, real ones: the contract of sandboxes, a program that asks its model from inside, a task of Harbor's."""

import asyncio
import subprocess
from pathlib import Path

import pytest

import lightning_rl as lrl
from lightning_rl.command_agent.template import CommandError
from lightning_rl.sandboxes import Sandbox, SandboxError
from lightning_rl.sandboxes.docker import DockerSandbox
from tests.lightning_rl.command_agent.conftest import Recorded, Run, llm, recorded, renderer, run, served, tokenizer
from tests.lightning_rl.command_agent.test_harbor import harbor_task
from tests.lightning_rl.sandboxes.contract import SandboxContract, killed_owner, ran, soon
from tests.proxy.conftest import Served
from tests.sandboxes.containers import IMAGE

__all__ = ["llm", "recorded", "renderer", "run", "served", "tokenizer"]

pytestmark = pytest.mark.sandboxes

ASK = """
wget -q -O answer --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
  --post-data '{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}' $OPENAI_BASE_URL/chat/completions
"""


class TestDocker(SandboxContract):
    def make(self) -> Sandbox:
        return DockerSandbox(IMAGE)

    def test_it_begins_in_the_images_folder(self) -> None:
        async def use(box: Sandbox) -> None:
            assert await ran(box, "sh", "-c", "pwd") == (0, "/work\n")
            await box.write("here", b"x")
            assert await box.read("/work/here") == b"x"

        self.inside(use)

    def test_a_container_that_ends_while_a_program_runs_is_an_error_and_no_status(self, program: str) -> None:
        async def use(box: DockerSandbox) -> None:
            running = asyncio.create_task(ran(box, "sh", "-c", "sleep 60"))
            await asyncio.sleep(1)
            await asyncio.to_thread(subprocess.run, [program, "kill", box.name], check=True, capture_output=True)
            with pytest.raises(SandboxError, match="ended while a program ran in it"):
                await running

        self.inside(use)

    def test_nothing_is_left_of_it(self, program: str) -> None:
        async def use(box: DockerSandbox) -> str:
            return box.name

        name = self.inside(use)
        listed = subprocess.run([program, "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True)
        assert name not in listed.stdout

    def test_it_ends_with_the_process_that_started_it_however_that_ends(self, program: str) -> None:
        name, _ = killed_owner("lightning_rl.sandboxes.docker:DockerSandbox", IMAGE)
        listing = [program, "ps", "--all", "--format", "{{.Names}}"]
        assert soon(lambda: name not in subprocess.run(listing, capture_output=True, text=True).stdout)

    def test_an_image_that_is_not_there_is_said(self) -> None:
        box = DockerSandbox("localhost/no-such-image:1")
        with pytest.raises(SandboxError, match="no-such-image"):
            asyncio.run(box.open())
        asyncio.run(box.close())


def test_a_program_in_a_container_asks_its_model_and_is_judged_there(
    run: Run, served: Served, recorded: Recorded
) -> None:
    served.engine.script.append("good day")
    agent = lrl.CommandAgent(
        "sh ask", reward="grep -q 'good day' answer", sandbox={"kind": "docker", "image": IMAGE, "folder": "/work/a"}
    )
    assert run(agent, {"prompt": "", "files": {"ask": ASK}}).returned == 1.0
    calls, rows = recorded()
    assert len(calls) == len(rows) == 1


@pytest.mark.parametrize(
    ("command", "reward"),
    [("sh -c 'echo hello > said'", 0.5), ("sh -c 'mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt'", 0.0)],
)
def test_a_task_of_harbors_is_built_run_and_judged(command: str, reward: float, run: Run, tmp_path: Path) -> None:
    folder = harbor_task(tmp_path)
    (folder / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\nWORKDIR /app\n")
    judge = "grep -q hello said && echo 0.5 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    test = f"#!/bin/sh\n{judge}\n"
    (folder / "tests" / "test.sh").write_text(test)
    agent = lrl.CommandAgent(command, sandbox={"kind": "docker"})
    assert run(agent, {"prompt": "", "harbor": str(folder)}).returned == reward


def test_tests_of_harbors_that_write_nothing_are_an_error(run: Run, tmp_path: Path) -> None:
    folder = harbor_task(tmp_path, toml=f'[environment]\ndocker_image = "{IMAGE}"\n')
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(CommandError, match=r"wrote no reward\.txt or reward\.json"):
        run(lrl.CommandAgent("true", sandbox={"kind": "docker"}), {"prompt": "", "harbor": str(folder)})
