"""What the Trainer takes for the servers of a run, before anything is started."""

from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.processes.service_keys import RUNNER_KEY

ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"server": "127.0.0.1:1"}, "server='127.0.0.1:1' is no URL"),
        ({"server": [ONE, "two"]}, "server='two' is no URL"),
        ({"server": []}, r"server=\[\] names no server"),
        ({"server": [ONE, TWO, f"{ONE}/"]}, f"server names one of {ONE}, {TWO}, {ONE}/ twice"),
        ({"server": ONE, "store": lrl.LightningStoreClient(ONE, "key")}, "give server or store, not both"),
        ({"server": [ONE, TWO], "port": 80}, "port: the server is elsewhere"),
        ({"server": [ONE, TWO], "n_runners": 1}, "n_runners is 1, for 2 servers: it takes one for each, or none here"),
    ],
)
def test_what_does_not_go_with_servers_elsewhere_is_said(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNNER_KEY, "a-runner-key-of-the-tests")
    with pytest.raises(ValueError, match=message):
        lrl.Trainer(**given)


def test_an_algorithm_that_is_a_function_works_at_one_server() -> None:
    @lrl.algo
    def search() -> None: ...

    with pytest.raises(
        ValueError, match=r"FunctionAlgorithm works at one server: give Trainer\(server=\.\.\.\) one URL"
    ):
        lrl.Trainer(server=[ONE, TWO]).fit(search, [])
