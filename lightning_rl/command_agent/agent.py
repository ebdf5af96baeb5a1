"""A program as an agent: started for each rollout, told where its model is, and judged."""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from lightning_rl.agents.agent import Agent
from lightning_rl.agents.emitted import running
from lightning_rl.agents.resources import LLM
from lightning_rl.command_agent import harbor
from lightning_rl.command_agent.programs import settings_of
from lightning_rl.command_agent.reward import REWARD_VARIABLE, judged, reward_of
from lightning_rl.command_agent.script import check_scripts, filled_words
from lightning_rl.command_agent.template import CommandError, Values, check, is_the_same_for_all
from lightning_rl.command_agent.workspace import Workspace, existing, prepared, print_as_it_comes
from lightning_rl.config.schema import SandboxSection
from lightning_rl.sandboxes import NOT_FOUND, Sandbox, SandboxUnusable, sandbox_class
from lightning_rl.store.contract import ErrorInfo

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


class CommandAgent(Agent):
    """A program as an agent: `lrl.Trainer(lrl.CommandAgent("claude -p {prompt}", reward="pytest -q"))`.

    Args:
        command: the program with its arguments, split as a shell does; no shell runs it. `{field}` is the task's field
            of that name (`{a.b}` one inside it, `{prompt}` also the text of a list of messages), `{llm.model}`,
            `{llm.base_url}`, `{llm.anthropic_base_url}`, `{llm.endpoint}` and `{llm.api_key}` where its model is; `{{`
            and `}}` are braces. Its environment has `llm.env()`; programs that are named in the command get what they
            read besides (`claude_code_env`, `codex_config`).
        reward: a shell command that runs after it in the same folder. Its reward is what it writes to the file that
            LIGHTNING_RL_REWARD names: a number, or JSON with `reward` and more by name; where it writes nothing, 1 for
            the exit status 0 and 0 for any other. LIGHTNING_RL_TASK names a file with the task as JSON. Without it the
            program itself gives its reward in these two ways.
        sandbox: where it runs: the keys of the configuration's `sandbox`, or that section.
        judged_elsewhere: a function or a judge of the configuration gives the reward; the program gives none.
        model_context_window: tokens of the model's window, for programs that shorten their conversation in time.

    Raises CommandError or SandboxUnusable for what cannot run.
    """

    starts_processes = True

    def __init__(
        self,
        command: str,
        *,
        reward: str | None = None,
        sandbox: SandboxSection | Mapping[str, Any] | None = None,
        judged_elsewhere: bool = False,
        model_context_window: int | None = None,
    ) -> None:
        self.command = command
        self.reward = reward
        self.sandbox = sandbox if isinstance(sandbox, SandboxSection) else _section(sandbox or {})
        self.judged_elsewhere = judged_elsewhere
        self.model_context_window = model_context_window
        self.__name__ = command
        self._words = check(command, local=self.sandbox.kind == "local")
        check_scripts(self._words)
        for key, source in (("sandbox.files", self.sandbox.files), ("sandbox.tests", self.sandbox.tests)):
            if source is not None and is_the_same_for_all(source):
                existing(source, key)
        if self.sandbox.image is not None or self.sandbox.kind != "docker":  # a Harbor task names an image of its own
            self._box(self.sandbox)

    async def rollout(self, task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        """Start the program on the task, wait for its end, and judge what it did."""
        of_harbor = harbor.of_task(task)
        settings = self.sandbox if of_harbor is None else of_harbor.settings(self.sandbox)
        reward = self.reward if of_harbor is None else of_harbor.reward
        box = self._box(settings)
        llm = reached(resources["main_llm"].resolve(rollout), settings.gateway_url, shares_network=box.shares_network)
        try:
            await box.open()
            space = await prepared(box, settings, Values(task, llm))
            program_reward = await self._played(space, llm, own_reward=reward is None)
            if self.judged_elsewhere:
                return None
            return program_reward if reward is None else await judged(space, task, reward, of_harbor)
        finally:
            await asyncio.shield(box.close())

    def _box(self, settings: SandboxSection) -> Sandbox:
        return sandbox_class(settings.kind)(settings.image, settings.options)

    async def _played(self, space: Workspace, llm: LLM, *, own_reward: bool) -> Any:
        """The reward that the program gives itself. Raises CommandError where it cannot run."""
        box = space.box
        own = settings_of(self.command, llm, box.home, self.model_context_window)
        for path, text in own.files.items():
            await box.write(path, text.encode())
        file = f"{box.home}/reward-{uuid.uuid4().hex}"
        variables = own.variables | space.environment | ({REWARD_VARIABLE: file} if own_reward else {})
        words, fields = filled_words(self._words, space.values)
        seconds = space.settings.timeout_seconds
        status = await box.run(
            words,
            environment=variables | fields,
            folder=space.folder,
            timeout_seconds=seconds,
            output=print_as_it_comes,
        )
        if status in NOT_FOUND:
            raise CommandError(f"the program {words[0]!r} cannot be run (status {status}): is it in the sandbox?")
        if status != 0:
            ended = f"was ended after {seconds:g} s" if status is None else f"ended with status {status}"
            print_as_it_comes(f"[{words[0]} {ended}]\n")
            if (emitted := running()) is not None:
                emitted.trouble = ErrorInfo(type="ProgramFailed", message=f"the program {words[0]!r} {ended}")
        return reward_of(await box.read(file), status) if own_reward else None


def reached(llm: LLM, gateway_url: str | None, *, shares_network: bool) -> LLM:
    """The endpoint as a sandbox reaches it: at `gateway_url`, where one is given. Raises SandboxUnusable for a gateway
    on this machine's own address, which another network does not reach."""
    if gateway_url is None:
        host = urlsplit(llm.base_url).hostname
        if shares_network or host not in _LOOPBACK:
            return llm
        raise SandboxUnusable(
            f"the gateway is at {llm.base_url}, which leads elsewhere from inside the sandbox: set sandbox.gateway_url "
            "to a URL that leads here from there (a tunnel, http://host.docker.internal:PORT), or Trainer(url=...)"
        )
    moved = {name: _moved(getattr(llm, name), gateway_url) for name in ("base_url", "anthropic_base_url")}
    return LLM(model=llm.model, api_key=llm.api_key, sampling_parameters=llm.sampling_parameters, **moved)


def _moved(url: str, to: str) -> str:
    parts, there = urlsplit(url), urlsplit(to)
    return urlunsplit((there.scheme, there.netloc, there.path.rstrip("/") + parts.path, "", ""))


def _section(settings: Mapping[str, Any]) -> SandboxSection:
    try:
        return msgspec.convert(dict(settings), SandboxSection)
    except msgspec.ValidationError as error:
        raise SandboxUnusable(f"CommandAgent(sandbox={dict(settings)}): {error}") from error
