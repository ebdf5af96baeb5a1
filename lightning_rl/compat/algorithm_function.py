"""`algo`: a function as algorithm, as Agent-lightning has it. It enqueues rollouts at the store, reads what became of
them, publishes resources, and returns when it is done; the Trainer runs server and runners around it.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_rl.agents.agent import called
from lightning_rl.algorithms.base import Algorithm, Dataset, Endpoint
from lightning_rl.compat.lightning_store import LightningStore
from lightning_rl.errors import Explained
from lightning_rl.processes.event_loop import AsyncAgents
from lightning_rl.store.client import HttpStore

_FILLED = ("store", "train_dataset", "val_dataset", "llm_proxy", "adapter", "initial_resources")


class AlgorithmSignature(Explained, TypeError):
    """A function's parameters cannot be filled by what an algorithm is given."""


class FunctionAlgorithm(Algorithm):
    """A function, sync or async, as an algorithm. Calling it calls the function.

    It is given by name, as far as it has parameters of these names: `store` (a `LightningStore`), `train_dataset`,
    `val_dataset`, `adapter` and `initial_resources` (the Trainer's), and `llm_proxy`, which is None: the gateway is
    always there, and `store.add_resources` takes an `LLM`. Raises AlgorithmSignature for another parameter without a
    default.
    """

    takes_parts = True
    needs_one_server = True
    resources = None

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self._open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = {parameter.name for parameter in parameters}
        for parameter in parameters:
            variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.name not in _FILLED and parameter.default is parameter.empty and not variable:
                raise AlgorithmSignature(
                    f"{called(function)}: nothing fills parameter {parameter.name!r}; an algorithm is given "
                    f"{', '.join(_FILLED)}: take one of them, or give it a default"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def open(self, run_dir: Path) -> Endpoint:
        """A gateway without engines: `store.add_resources` registers the model of each `LLM` that it publishes."""
        return Endpoint(model="main_llm", tokenizer=None, renderer="auto", engines=[], unknown_model="refuse")

    def run(self, train_dataset: Dataset, val_dataset: Dataset) -> None:
        """Publish the initial resources, and call the function: in this thread, so that Ctrl-C ends it."""
        assert isinstance(self.store, HttpStore)
        store = LightningStore(self.store, check=self.check)
        offered: Mapping[str, Any] = {
            "store": store,
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
            "llm_proxy": None,
            "adapter": self.adapter,
            "initial_resources": self.initial_resources,
        }
        if self.initial_resources:
            _finish(store.add_resources(self.initial_resources))
        arguments = {name: value for name, value in offered.items() if self._open or name in self._names}
        returned = self.function(**arguments)
        if inspect.isawaitable(returned):
            _finish(returned)


def _finish(returned: Awaitable[Any]) -> None:
    """Wait for what an async function does; Ctrl-C ends it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(_awaited(returned))
        return
    future = AsyncAgents().submit(returned)  # a notebook's cell runs within a loop
    try:
        future.result()
    except BaseException:
        future.cancel()
        raise


async def _awaited(returned: Awaitable[Any]) -> None:
    await returned


def algo(function: Callable[..., Any]) -> FunctionAlgorithm:
    """A function as an algorithm: `Trainer(algorithm=function).fit(agent, train_dataset)`."""
    return FunctionAlgorithm(function)
