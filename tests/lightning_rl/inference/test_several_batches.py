"""An engine that writes several batches at once, in threads: what it tells is what one batch would tell."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lightning_rl.inference import scheduler
from lightning_rl.inference.batch import LONG_PROMPT
from lightning_rl.inference.engine import EmbeddedEngine, EngineStopped
from lightning_rl.inference.sequence import Output

from .models import make, reference, true_logprobs
from .test_adapters import adapted, with_adapters
from .test_adapters import ask as ask_adapter
from .test_engine import TIMEOUT, ask, assert_exact, hold_after

BATCHES = 3


@pytest.fixture(autouse=True)
def _few_rows_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ALONE", 1)


@pytest.fixture
def engine() -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(make("qwen3"), max_num_seqs=9, threads=BATCHES) as engine:
        yield engine


def rows(engine: EmbeddedEngine) -> list[int]:
    return [len(batch.adapters) for batch in engine._threads.batches]


def held(engine: EmbeddedEngine, count: int, **sampling: Any) -> tuple[list[Any], Any]:
    """So many requests that have rows, in an engine whose threads stand still until the event is set."""
    on_token, reached, go, _ = hold_after(engine, 1)
    engine.pause("keep")
    futures = [ask(engine, [1 + i, 2], f"r{i}", on_token, **sampling) for i in range(count)]
    engine.resume()
    assert reached.wait(TIMEOUT)
    while sum(rows(engine)) < count:  # the other batches take theirs meanwhile
        assert engine.running
    return futures, go


def test_requests_are_divided_among_the_batches(engine: EmbeddedEngine) -> None:
    futures, go = held(engine, 9, max_tokens=40)
    assert len(engine._threads.batches) == BATCHES
    assert max(rows(engine)) <= 3
    go.set()
    for number, future in enumerate(futures):
        assert_exact("qwen3", [1 + number, 2], future.result(TIMEOUT))


@pytest.mark.parametrize(("architecture", "batches"), [("qwen2", 3), ("mistral", 1)])
def test_a_model_that_computes_by_its_own_modules_is_written_by_one_batch(architecture: str, batches: int) -> None:
    assert len(EmbeddedEngine(make(architecture), max_num_seqs=9, threads=3)._threads.batches) == batches
    assert len(EmbeddedEngine(make(architecture), max_num_seqs=9, threads=1)._threads.batches) == 1
    assert len(EmbeddedEngine(make(architecture), max_num_seqs=1, threads=3)._threads.batches) == 1


def test_new_weights_are_in_all_batches_at_once_and_told_apart_in_each(engine: EmbeddedEngine) -> None:
    futures, go = held(engine, 9, max_tokens=50)
    update = threading.Thread(target=engine.update_weights, args=(make("qwen3", 1), 7))
    update.start()
    go.set()
    update.join(TIMEOUT)
    seen = set()
    for number, future in enumerate(futures):
        output = future.result(TIMEOUT)
        assert [span.version for span in output.versions] == [0, 7]
        (_, _, cut), (_, after, end) = [(span.version, span.start, span.end) for span in output.versions]
        assert (cut, end) == (after, 50)
        before = true_logprobs(reference("qwen3"), [1 + number, 2], output.token_ids)
        assert output.logprobs[:cut] == pytest.approx(before[:cut], abs=1e-5)
        assert output.logprobs[cut:] != pytest.approx(before[cut:], abs=1e-2)
        seen.add(cut)
    assert_exact("qwen3", [5, 6], ask(engine, [5, 6], max_tokens=20).result(TIMEOUT), seed=1)


def test_a_pause_is_quiet_when_every_batch_is(engine: EmbeddedEngine) -> None:
    for mode in ("wait", "keep", "abort"):
        futures, go = held(engine, 9, max_tokens=30)
        go.set()
        engine.pause(mode)  # type: ignore[arg-type]
        still = rows(engine)
        assert mode == "keep" or [future.done() for future in futures] == [True] * 9
        assert rows(engine) == still == (still if mode == "keep" else [0] * BATCHES)
        engine.resume()
        for future in futures:
            future.result(TIMEOUT)
    assert engine.in_flight == 0


def test_a_prompt_that_one_batch_has_read_is_copied_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make("qwen3").config
    assert config.max_position_embeddings <= LONG_PROMPT  # so short prompts count as long here
    monkeypatch.setattr("lightning_rl.inference.batch.LONG_PROMPT", 20)
    with EmbeddedEngine(make("qwen3"), max_num_seqs=9, threads=BATCHES) as engine:
        read, forward = [], engine._policy.forward

        def counted(cache: Any, tokens: Any, positions: Any, *others: Any, **named: Any) -> Any:
            read.append(int((positions >= 0).sum()) if tokens.shape[1] > 1 else 0)
            return forward(cache, tokens, positions, *others, **named)

        monkeypatch.setattr(engine._policy, "forward", counted)
        prompt = list(range(30))
        engine.pause("keep")
        futures = [ask(engine, prompt, f"{i}", seed=i, max_tokens=20) for i in range(9)]
        engine.resume()
        for future in futures:
            assert_exact("qwen3", prompt, future.result(TIMEOUT))
        assert sum(read) == 30  # of the others at most the last token, which is a pass of one column
        assert len(engine._threads.batches) == BATCHES


def test_each_batch_computes_its_rows_with_their_own_adapters() -> None:
    models = {adapter: adapted("qwen3", adapter) for adapter in (1, 2)}
    with with_adapters("qwen3", models, max_num_seqs=9, threads=BATCHES) as engine:
        futures = [ask_adapter(engine, [1 + number, 2], f"{number}", number % 3, max_tokens=40) for number in range(9)]
        for number, future in enumerate(futures):
            output = future.result(TIMEOUT)
            true = true_logprobs(models.get(number % 3, reference("qwen3")), [1 + number, 2], output.token_ids)
            assert output.logprobs == pytest.approx(true, abs=1e-5)


def test_a_batch_that_breaks_ends_all_of_them_by_name(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rows: Any) -> Any:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(engine._threads.batches[1], "step", broken)
    engine.pause("keep")
    futures = [ask(engine, [1 + i], f"{i}", max_tokens=40) for i in range(9)]
    engine.resume()
    failures = [future.exception(TIMEOUT) for future in futures]
    assert any(isinstance(one, EngineStopped) and isinstance(one.__cause__, ZeroDivisionError) for one in failures)
    assert not engine.running
    with pytest.raises(ZeroDivisionError):
        engine.check()
    monkeypatch.setattr(engine._threads, "_cause", None)  # the fixture stops it


def test_whatever_is_asked_meanwhile_every_answer_is_that_of_its_weights(engine: EmbeddedEngine) -> None:
    """Four threads ask, abort and pause; one gives weights whose version says which they are."""
    answers: list[tuple[list[int], Output]] = []
    ended = threading.Event()

    def agent(number: int) -> None:
        chance = random.Random(number)
        for turn in range(12):
            prompt = [chance.randrange(4) for _ in range(chance.randrange(1, 30))]
            names = [f"{number}-{turn}-{k}" for k in range(chance.choice([1, 1, 4]))]
            futures = [ask(engine, prompt, name, max_tokens=chance.randrange(1, 25)) for name in names]
            if chance.random() < 0.2:
                engine.abort(names[0])
            if chance.random() < 0.15:
                engine.pause(chance.choice(["keep", "wait"]))  # type: ignore[arg-type]
                engine.resume()
            answers.extend((prompt, future.result(TIMEOUT)) for future in futures)

    def trainer() -> None:
        version = 0
        while not ended.is_set():
            version += 1
            engine.update_weights(reference("qwen3", version % 2), version)
            ended.wait(0.02)

    asking = [threading.Thread(target=agent, args=(number,)) for number in range(4)]
    training = threading.Thread(target=trainer)
    for thread in [training, *asking]:
        thread.start()
    for thread in asking:
        thread.join(TIMEOUT)
    ended.set()
    training.join(TIMEOUT)
    assert len(answers) >= 4 * 12
    assert engine.in_flight == 0
    for prompt, output in answers:
        edges = [0, *(span.end for span in output.versions)]
        assert [span.start for span in output.versions] == edges[:-1]
        assert edges[-1] == len(output.token_ids) == len(output.logprobs)
        if output.versions and output.versions[-1].start == 0:
            true = true_logprobs(reference("qwen3", output.versions[0].version % 2), prompt, output.token_ids)
            assert np.abs(np.subtract(output.logprobs, true)).max() < 1e-5
