"""For all tests: no example of hypothesis is judged by the clock, since machines are busy at times; and SIGINT
interrupts, although a shell that started the tests in the background has it ignored, for them and their processes.
`--engine vllm` puts a real vLLM into the place of the gateway tests' scripted engine."""

import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine", choices=("scripted", "vllm"), default="scripted", help="what samples in the gateway's tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("engine") != "vllm":
        return
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("--engine vllm starts one server for all tests: leave -n out")
    from tests.vllm.forced import ForcedSession  # its modules are of no use to anything else

    folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    config.pluginmanager.register(ForcedSession(folder), "forced-vllm")
