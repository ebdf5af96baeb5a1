"""For all tests: no example of hypothesis is judged by the clock, since machines are busy at times; and SIGINT
interrupts, although a shell that started the tests in the background has it ignored, for them and their processes.
`--engine vllm` puts a real vLLM into the place of the gateway tests' scripted engine."""

import os
import signal
import tempfile
from pathlib import Path

import certifi
import pytest
from hypothesis import settings

from tests.random_examples import examples

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub; it is read when huggingface_hub is imported

settings.register_profile("unhurried", deadline=None, max_examples=examples(100))
settings.load_profile("unhurried")


# Every HTTP client of an SDK reads the certificates of all authorities, for 22 ms; the tests' ask this machine alone.
_CERTIFICATE = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115
_CERTIFICATE.write(Path(certifi.where()).read_text().partition("# Issuer:")[2].partition("# Issuer:")[0])
_CERTIFICATE.flush()
certifi.where = lambda: _CERTIFICATE.name

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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say why a test is tried again: nothing else would, once it has passed."""
    if report.outcome == "rerun":  # as pytest-rerunfailures has it
        print(f"\n{report.nodeid} is tried again:\n{report.longreprtext}")
