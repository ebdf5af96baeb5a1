"""An agent that asks the policy, a user simulator and a judge, each by its name behind one base URL: only the policy is
trained.

The simulator is at an OpenAI-compatible service, the judge at an Anthropic-compatible one behind litellm.
"""

import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

import lightning_rl as lrl
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.store.errors import Conflict
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories.trace_views import rows_of, triplets_of
from lightning_rl.trajectories.trajectory import trajectory_of
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.span import Span
from tests.lightning_rl.cli.test_serve import serving
from tests.proxy.engines.service import Service, running

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "helpers.md"

KEYS = {"USER_KEY": "sk-of-the-simulator", "JUDGE_KEY": "sk-ant-of-the-judge", "LOCKED_KEY": "sk-that-is-wrong"}
TASKS = [0, 1, 2, 3]


@lrl.rollout
async def judged(task: int, llm: lrl.LLM) -> float:
    """Asks the policy, a simulated user about the answer, the policy again, and a judge for the reward."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"number {task}"}]
        first = await client.chat.completions.create(model=llm.model, messages=chat)
        said = first.choices[0].message.content or ""
        asked: Any = [{"role": "user", "content": f"you were told: {said}"}]
        user = await client.chat.completions.create(model="user", messages=asked, temperature=0.25)
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": user.choices[0].message.content}]
        await client.chat.completions.create(model=llm.model, messages=chat)
        if task == 3:  # an agent that fails with what the service said
            await client.chat.completions.create(model="locked", messages=asked, n=2)
    async with anthropic.AsyncAnthropic(base_url=llm.anthropic_base_url, api_key=llm.api_key) as judge:
        question: Any = {"role": "user", "content": f"score number {task}"}
        verdict = await judge.messages.create(model="judge", max_tokens=9, messages=[question])
    return float(verdict.content[0].text)  # type: ignore[union-attr]


class Run(NamedTuple):
    folder: Path
    user: Service
    judge: Service
    traces: list[RolloutTrace]
    policy: str

    def spans(self, model: str) -> list[Span]:
        """The calls of a model, over all attempts."""
        spans = [span for trace in self.traces for attempt in trace.attempts for span in attempt.spans]
        return [span for span in spans if span.attributes.get(semconv.RESPONSE_MODEL) == model]


def backends(user: Service, judge: Service, locked: Service) -> dict[str, Any]:
    return {
        "user": {"kind": "openai", "url": user.url, "remote_model": "a-user", "api_key_env": "USER_KEY"},
        "judge": {
            "kind": "litellm",
            "remote_model": "anthropic/claude-3-5-haiku-20241022",
            "url": judge.url.removesuffix("/v1"),
            "api_key_env": "JUDGE_KEY",
        },
        "locked": {"kind": "openai", "url": locked.url, "api_key_env": "LOCKED_KEY"},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("helped") / "run"
    with running() as user, running() as judge, running() as locked, pytest.MonkeyPatch.context() as environment:
        for name, key in KEYS.items():
            environment.setenv(name, key)
        user.tokens = False
        judge.reply = lambda body: str(int(body["messages"][-1]["content"][-1]["text"][-1]) % 2)
        locked.status, locked.error = 401, f"Incorrect API key provided: {KEYS['LOCKED_KEY']}"
        config = {
            "data": {"train_batch_size": 4, "max_response_length": 8},
            "actor_rollout_ref": {"rollout": {"n": 2, "renderer": "qwen3", "max_model_len": 256}},
            "trainer": {"total_training_steps": 2, "logger": ["jsonl"]},
            "gateway": {"backends": backends(user, judge, locked)},
        }
        algorithm = lrl.PPO(config)
        lrl.Trainer(judged, n_runners=4, run_dir=folder).fit(algorithm, TASKS, val_dataset=[1])
        store = SqlStore(f"sqlite:///{folder / 'store.db'}")
        found, _ = store.page(limit=100)
        traces = [store.traces([rollout.rollout_id])[rollout.rollout_id] for rollout in found]
        yield Run(folder, user, judge, traces, algorithm.policy.name)


@pytest.mark.long
def test_each_name_goes_to_its_model_with_its_own_key(run: Run) -> None:
    assert Counter(run.user.keys) == {f"Bearer {KEYS['USER_KEY']}": len(run.spans("user"))}
    assert Counter(run.judge.keys) == {KEYS["JUDGE_KEY"]: len(run.spans("judge"))}
    assert {request["model"] for request in run.user.requests} == {"a-user"}
    assert {request["model"] for request in run.judge.requests} == {"claude-3-5-haiku-20241022"}
    rollouts = len(TASKS) * 2 * 2 + 2
    assert [len(run.spans(model)) for model in (run.policy, "user", "judge", "locked")] == [
        2 * rollouts, rollouts, rollouts - 4, 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "dialect", "usage", "asked"),
    [("user", "chat_completions", (11, 5), {"temperature": 0.25}), ("judge", "messages", (7, 2), {"max_tokens": 9})],
)
def test_their_calls_are_recorded_with_messages_and_usage_and_without_tokens(
    run: Run, model: str, dialect: str, usage: tuple[int, int], asked: dict[str, Any]
) -> None:
    for span in run.spans(model):
        found = span.attributes
        assert found[semconv.REQUEST_MODEL] == model
        assert found[semconv.DIALECT] == dialect
        assert (found[semconv.INPUT_TOKENS], found[semconv.OUTPUT_TOKENS]) == usage
        [message] = found[semconv.INPUT_MESSAGES]
        assert message["content"].startswith(("you were told: ", "score number "))
        assert found[semconv.OUTPUT_MESSAGES][0]["content"] in ("ok", "0", "1")
        assert found[semconv.SAMPLING_REQUESTED] == asked, "a helper keeps the sampling that it was asked with"
        assert (found[semconv.EXACT], found[semconv.TRAINABLE], found[semconv.POLICY_VERSIONS]) == (False, False, [])
        assert (found[semconv.PROMPT_IDS], found[semconv.RESPONSE_IDS], found[semconv.LOGPROBS]) == (b"", b"", None)


def test_none_of_it_is_trained_and_the_account_of_tokens_knows_nothing_of_it(run: Run) -> None:
    rows = read(run.folder / "metrics.jsonl")
    tokens: Counter[str] = Counter()
    for trace in run.traces:
        for attempt in trace.attempts:
            for call in calls_of(attempt.spans):
                tokens[call.model if trace.rollout.mode == "train" else trace.rollout.mode] += len(call.response_ids)
    assert rows[-1]["tokens/received"] == tokens.total() > 0
    assert rows[-1]["tokens/trained"] == tokens[run.policy]
    assert rows[-1]["tokens/excluded/validation"] == tokens["val"]
    assert tokens["user"] == tokens["judge"] == 0
    assert [row["rollouts/rows"] for row in rows if row["step"]] == [8, 8], (
        "one of each rollout: the policy's two calls"
    )


def test_their_triplets_have_no_ids_and_their_rows_are_left_out(run: Run) -> None:
    for trace in run.traces:
        [attempt] = trace.attempts
        triplets = list(triplets_of(attempt))
        assert [one.exact for one in triplets] == [one.model == run.policy for one in triplets]
        for one in triplets:
            if one.model != run.policy:
                assert one.prompt_token_ids == one.response_token_ids == []
                assert one.response_logprobs is None
        for row in rows_of(trace.rollout, attempt):
            if row.model != run.policy:
                assert (row.excluded, row.token_ids, row.policy_versions) == ("inexact", [], [])


def test_the_judges_word_is_the_reward_of_the_policys_calls(run: Run) -> None:
    for trace in run.traces:
        task = trace.rollout.task
        read_back = trajectory_of(trace, agent_failure=0.0, model=run.policy)
        assert (read_back.reward, read_back.agent_failed) == (task % 2 if task < 3 else 0.0, task == 3)
        assert (read_back.calls, read_back.other_calls) == (2, 1 if task == 3 else 2)
        [row] = read_back.rows
        assert row.model == run.policy
        assert sum(row.rewards) == 2 * (read_back.reward or 0.0)  # credit `final`: both calls
        assert len(set(row.call_ids) - {None}) == 2


def test_an_agent_hears_the_service_and_no_key_is_kept_told_or_written(run: Run) -> None:
    errors = [trace.rollout.error for trace in run.traces if trace.rollout.task == 3]
    assert {error.type for error in errors if error} == {"AuthenticationError"}
    assert all("asked for 'locked', answered 401: Incorrect API key" in error.message for error in errors if error)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "server.log", "store.db", "runner-0.log"} <= {path.name for path in files}
    assert "JUDGE_KEY" in (run.folder / "config.yaml").read_text()
    for key in KEYS.values():
        assert [path.name for path in files if key.encode() in path.read_bytes()] == []


@pytest.mark.long
def test_a_command_serves_litellms_models_with_keys_of_the_environment(tmp_path: Path) -> None:
    with running() as service:
        service.script.append("Three.")
        model = "anthropic/claude-3-5-haiku-20241022"
        words = ["--engine", f"litellm:{model}={service.url.removesuffix('/v1')}"]
        with serving(tmp_path, *words, ANTHROPIC_API_KEY=KEYS["JUDGE_KEY"]) as server:
            llm = server.post("/api/v1/rollouts/start", {"task": 1}, server.key).json()["resources"]["main_llm"]
            sdk = openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0)
            question: Any = [{"role": "user", "content": "How many?"}]
            answer = sdk.chat.completions.create(model=model, messages=question)
            assert answer.choices[0].message.content == "Three."
            service.status, service.error = 401, f"you sent {KEYS['JUDGE_KEY']}"
            with pytest.raises(openai.AuthenticationError, match="you sent"):
                sdk.chat.completions.create(model=model, messages=question)
            server.stop(signal.SIGTERM)
        assert service.keys == [KEYS["JUDGE_KEY"]] * 2
        kept = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [path.name for path in kept if KEYS["JUDGE_KEY"].encode() in path.read_bytes()] == []
        with serving(tmp_path, *words, ANTHROPIC_API_KEY="") as server:
            llm = server.post("/api/v1/rollouts/start", {"task": 1}, server.key).json()["resources"]["main_llm"]
            sdk = openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0)
            with pytest.raises(openai.AuthenticationError, match="ANTHROPIC_API_KEY"):
                sdk.chat.completions.create(model=model, messages=question)
            server.stop(signal.SIGTERM)


@pytest.mark.long
def test_a_helper_may_not_have_the_policys_name(tmp_path: Path) -> None:
    config = {
        "data": {"train_batch_size": 4},
        "gateway": {"backends": {"checkpoint": {"kind": "openai", "url": "http://127.0.0.1:1/v1"}}},
    }
    with pytest.raises(Conflict, match="'checkpoint' has token engines already; give the chat backend another"):
        lrl.Trainer(judged, n_runners=1, run_dir=tmp_path).fit(lrl.PPO(config), TASKS)


def test_the_pages_example_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), page)
    with running() as customer, running() as judge:
        customer.reply = lambda _: "I might."
        judge.reply = lambda body: "1" if "a boat sold" in body["messages"][0]["content"] else "0"
        models = page["config"]["gateway"]["backends"]
        for name, service in (("customer", customer.url.removesuffix("/v1")), ("judge", judge.url)):
            monkeypatch.setenv(models[name]["api_key_env"], KEYS["JUDGE_KEY"])
            models[name]["url"] = service
        config = page["config"] | {
            "data": {"train_batch_size": 2, "max_response_length": 8},
            "actor_rollout_ref": {"rollout": {"n": 2, "max_model_len": 512}},
            "trainer": {"total_training_steps": 1, "logger": ["jsonl"]},
        }
        lrl.Trainer(page["seller"], n_runners=2, run_dir=tmp_path).fit(lrl.PPO(config), ["a car", "a boat"])
        [row] = read(tmp_path / "metrics.jsonl")
        assert (row["critic/rewards/mean"], row["rollouts/agent_failed"]) == (0.5, 0)
        assert row["tokens/received"] == row["tokens/trained"] > 0
        assert (len(customer.requests), len(judge.requests)) == (2 * 4, 4)
        assert customer.requests[0]["system"][0]["text"].startswith("You want to buy a ")
