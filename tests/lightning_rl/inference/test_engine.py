import subprocess
import sys
import threading
from concurrent.futures import wait

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DeepseekV2Config, MistralConfig

from lightning_rl.inference import engine as engine_room
from lightning_rl.inference import fused, scheduler
from lightning_rl.inference.cache import ModelUnfit
from lightning_rl.inference.engine import EmbeddedEngine, EngineStopped
from lightning_rl.inference.sequence import GenerationRequest, GenerationSampling
from tests.random_examples import examples

from .models import CONFIGS, FUSED, SIZE, VOCAB, make, reference, true_logprobs

TIMEOUT = 250  # seconds; of a machine that is busy


def ask(engine, prompt, request_id="r", on_token=None, **sampling):
    request = GenerationRequest(request_id=request_id, token_ids=prompt, sampling=GenerationSampling(**sampling))
    return engine.submit(request, on_token)


def assert_exact(architecture, prompt, output, temperature=1.0, seed=0):
    expected = true_logprobs(reference(architecture, seed), prompt, output.token_ids, temperature)
    assert len(output.logprobs) == len(output.token_ids) == len(output.ranks)
    assert output.logprobs == pytest.approx(expected, abs=1e-5)


def hold_after(engine, tokens):
    """An on_token that pauses the engine's thread after so many tokens, until it is let go."""
    reached, go = threading.Event(), threading.Event()
    seen = []

    def on_token(token):
        seen.append(token)
        if len(seen) == tokens:
            reached.set()
            assert go.wait(TIMEOUT)

    return on_token, reached, go, seen


@pytest.mark.parametrize(("threads", "left"), [(2, {"engine", "trainer"}), (1, set())])
def test_with_several_cores_the_engine_and_who_gives_it_weights_leave_them_to_each_other(threads, left, monkeypatch):
    named, seen, idle = {threading.get_ident(): "trainer"}, set(), threading.Event()

    def noted():
        seen.add(named.get(threading.get_ident(), "engine"))
        if "engine" in seen:
            idle.set()

    monkeypatch.setattr(engine_room, "end_threads", noted)
    monkeypatch.setattr(engine_room, "LARGE", 1)
    with EmbeddedEngine(make("qwen2"), threads=threads) as engine:
        assert seen & {"trainer"} == left & {"trainer"}  # who made the model
        seen.discard("trainer")
        ask(engine, [1, 2], max_tokens=2).result(TIMEOUT)
        engine.update_weights(make("qwen2", seed=1), 1)
        assert threads == 1 or idle.wait(TIMEOUT)
    assert seen == left


@pytest.mark.parametrize(("parameters", "cores"), [(1, (8, 2)), (10**9, (1, 1))])
def test_the_cores_that_batches_leave_are_for_the_operations_of_a_large_model(parameters, cores, monkeypatch):
    monkeypatch.setattr(engine_room, "LARGE", parameters)
    engine = EmbeddedEngine(make("qwen2"), threads=8)
    assert (len(engine._threads.batches), engine._threads._cores_alone, engine._threads._cores_each) == (4, *cores)


@pytest.mark.parametrize(("parameters", "cores"), [(1, 3), (10**9, 1)])
def test_what_changes_the_weights_computes_with_as_many_cores_as_a_step(parameters, cores, monkeypatch):
    monkeypatch.setattr(engine_room, "LARGE", parameters)
    before = torch.get_num_threads()
    torch.set_num_threads(5)  # those that a new thread would have
    try:
        with EmbeddedEngine(make("qwen2"), threads=3) as engine:
            seen = []
            engine._threads.call(lambda: seen.append(torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    assert seen == [cores]


def test_an_engine_whose_threads_cannot_all_start_is_stopped(monkeypatch):
    engine, started = EmbeddedEngine(make("qwen2"), threads=2, max_num_seqs=scheduler.ALONE * 2), []

    def start(thread, begin=threading.Thread.start):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        begin(thread)

    assert len(engine._threads.batches) == 2
    asked = ask(engine, [1, 2])
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        engine.start()
    assert not started[0].is_alive()
    assert asked.exception(TIMEOUT) is not None or asked.result().finish_reason == "abort"
    engine.stop()


def test_a_process_that_never_stops_its_engine_ends():
    """As one does whose end was interrupted again and again; the interpreter waits for threads."""
    program = (
        "from lightning_rl.inference.engine import EmbeddedEngine\n"
        "from tests.lightning_rl.inference.models import make\n"
        "EmbeddedEngine(make('qwen2'), threads=2).start()\n"
        "print('left')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


@pytest.fixture(scope="module", params=["one batch", "two batches"])
def engine(request):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scheduler, "ALONE", 2 if request.param == "two batches" else 4)
        with EmbeddedEngine(make("qwen2"), max_num_seqs=4, threads=2) as engine:
            assert len(engine._threads.batches) == (2 if request.param == "two batches" else 1)
            yield engine


jobs = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
        st.integers(1, 30),
        st.sampled_from([0.0, 0.6, 1.0, 1.7]),
        st.sampled_from([1, 3]),
        st.sampled_from([(), (3, 5, 7), tuple(range(0, VOCAB, 3))]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.filterwarnings("error::FutureWarning")  # of arguments that transformers is about to rename
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_logprob_is_that_of_a_plain_forward_pass(architecture):
    with EmbeddedEngine(make(architecture), max_num_seqs=3) as engine:
        assert fused.fits(make(architecture)) == (architecture in FUSED)

        @settings(max_examples=examples(12), deadline=None)
        @given(jobs)
        def joins_leaves_and_waits(jobs):
            expected, futures = [], []
            for number, (prompt, most, temperature, copies, stops) in enumerate(jobs):
                for copy in range(copies):
                    sampling = {
                        "max_tokens": most,
                        "temperature": temperature,
                        "seed": copy,
                        "stop_token_ids": stops,
                    }
                    futures.append(ask(engine, prompt, f"{number}-{copy}", **sampling))
                    expected.append((prompt, most, temperature, stops))
            for future, (prompt, most, temperature, stops) in zip(futures, expected, strict=True):
                output = future.result(TIMEOUT)
                assert_exact(architecture, prompt, output, temperature)
                assert not set(output.token_ids[:-1]) & set(stops)
                if output.finish_reason == "stop":
                    assert output.token_ids[-1] in stops
                    assert output.stop_reason == output.token_ids[-1]
                else:
                    assert output.finish_reason == "length"
                    assert len(output.token_ids) == min(most, 64 - len(prompt))
                    assert output.stop_reason is None
                assert [(s.version, s.start, s.end) for s in output.versions] == [(0, 0, len(output.token_ids))]

        joins_leaves_and_waits()


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3", "mistral"])
def test_greedy_equals_generate(architecture):
    prompt = [1, 2, 3, 4, 5]
    with EmbeddedEngine(make(architecture)) as engine:
        got = ask(engine, prompt, max_tokens=30, temperature=0.0).result(TIMEOUT)
    want = reference(architecture).generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert prompt + got.token_ids == want[0].tolist()


def test_memory_grows_past_its_first_size_without_losing_what_it_holds():
    config = CONFIGS["qwen2"]()
    config.max_position_embeddings = 400
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.load_state_dict(model.state_dict())
    with EmbeddedEngine(model, max_num_seqs=64) as engine:
        prompts = [[(7 * i + k) % VOCAB for k in range(3 + i)] for i in range(50)]
        futures = [ask(engine, prompt, f"{i}", max_tokens=300) for i, prompt in enumerate(prompts)]
        for prompt, future in zip(prompts, futures, strict=True):
            output = future.result(TIMEOUT)
            assert len(output.token_ids) == 300
            assert output.logprobs == pytest.approx(true_logprobs(plain, prompt, output.token_ids), abs=1e-5)


def test_long_prompts_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr("lightning_rl.inference.policy.CHUNK_TOKENS", 7)
    with EmbeddedEngine(make("qwen3")) as engine:
        prompts = [[(i + k) % VOCAB for k in range(size)] for i, size in enumerate((50, 33, 1))]
        futures = [ask(engine, prompt, f"{i}") for i, prompt in enumerate(prompts)]
        for prompt, future in zip(prompts, futures, strict=True):
            assert_exact("qwen3", prompt, future.result(TIMEOUT))


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(engine):
    prompt = [9, 8, 7]
    alone = ask(engine, prompt, seed=11, max_tokens=40, top_p=0.95).result(TIMEOUT)
    crowd = [ask(engine, [i + 1] * (i + 1), f"c{i}", max_tokens=20) for i in range(9)]
    again = ask(engine, prompt, seed=11, max_tokens=40, top_p=0.95).result(TIMEOUT)
    other = ask(engine, prompt, seed=12, max_tokens=40, top_p=0.95).result(TIMEOUT)
    wait(crowd, TIMEOUT)
    assert alone.token_ids == again.token_ids
    assert alone.logprobs == pytest.approx(again.logprobs, abs=1e-5)
    assert other.token_ids != alone.token_ids


def test_requests_without_a_seed_differ(engine):
    futures = [ask(engine, [5], f"{i}", max_tokens=20) for i in range(4)]
    assert len({tuple(future.result(TIMEOUT).token_ids) for future in futures}) == 4


def test_end_tokens_stop_unless_ignored_and_are_no_stop_reason():
    with EmbeddedEngine(make("qwen2"), eos_token_ids=range(0, VOCAB, 2)) as engine:
        stopped = ask(engine, [1, 2], seed=0, max_tokens=50).result(TIMEOUT)
        ignored = ask(engine, [1, 2], seed=0, max_tokens=50, ignore_eos=True).result(TIMEOUT)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    assert stopped.token_ids[-1] % 2 == 0
    assert ignored.token_ids[: len(stopped.token_ids)] == stopped.token_ids
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 50)


def test_tokens_are_called_back_as_they_come(engine):
    seen = []
    output = ask(engine, [1, 2, 3], on_token=seen.append, max_tokens=12).result(TIMEOUT)
    assert [token.token_id for token in seen] == output.token_ids
    assert [token.logprob for token in seen] == output.logprobs
    assert [token.rank for token in seen] == output.ranks


def test_abort_ends_what_runs_and_what_waits(engine):
    on_token, reached, go, _ = hold_after(engine, 5)
    running = ask(engine, [1], "running", on_token, max_tokens=60)
    others = [ask(engine, [2, i], f"o{i}", max_tokens=30) for i in range(8)]
    assert reached.wait(TIMEOUT)
    waiting = ask(engine, [3], "waiting", max_tokens=30)
    engine.abort("running")
    engine.abort("waiting")
    engine.abort("unknown")
    go.set()
    cut, never = running.result(TIMEOUT), waiting.result(TIMEOUT)
    assert (cut.finish_reason, len(cut.token_ids)) == ("abort", 5)
    assert_exact("qwen2", [1], cut)
    assert (never.finish_reason, never.token_ids, never.versions) == ("abort", [], [])
    for i, other in enumerate(others):
        assert_exact("qwen2", [2, i], other.result(TIMEOUT))
    assert engine.in_flight == 0


def test_a_request_that_comes_while_an_order_is_carried_out_can_be_aborted(engine):
    begun, go = threading.Event(), threading.Event()

    def lasts() -> None:
        begun.set()
        assert go.wait(TIMEOUT)

    ordering = threading.Thread(target=engine._threads.call, args=(lasts,))
    ordering.start()
    assert begun.wait(TIMEOUT)
    late = ask(engine, [1], "late", max_tokens=60)
    engine.abort("late")
    go.set()
    ordering.join()
    output = late.result(TIMEOUT)
    assert (output.finish_reason, output.token_ids) == ("abort", [])


def test_new_weights_in_mid_generation_are_used_and_told_apart():
    with EmbeddedEngine(make("qwen2"), max_num_seqs=2) as engine:
        on_token, reached, go, _ = hold_after(engine, 6)
        running = ask(engine, [1, 2, 3], "running", on_token, max_tokens=20)
        waiting = [ask(engine, [4], f"w{i}", max_tokens=30) for i in range(3)]
        assert reached.wait(TIMEOUT)
        update = threading.Thread(target=engine.update_weights, args=(make("qwen2", 1), 7))
        update.start()
        # The order is left before the engine goes on: it is then taken before the next step.
        while not engine._threads.orders:
            assert update.is_alive()
        go.set()
        update.join(TIMEOUT)
        output = running.result(TIMEOUT)
        spans = [(span.version, span.start, span.end) for span in output.versions]
        assert spans == [(0, 0, 6), (7, 6, 20)]
        before = true_logprobs(reference("qwen2"), [1, 2, 3], output.token_ids)
        assert output.logprobs[:6] == pytest.approx(before[:6], abs=1e-5)
        assert output.logprobs[6:] != pytest.approx(before[6:], abs=1e-2)
        for future in waiting:
            spans = future.result(TIMEOUT).versions
            edges = [0, *(span.end for span in spans)]
            assert [span.start for span in spans] == edges[:-1]
            assert edges[-1] == 30
        fresh = ask(engine, [9, 9], max_tokens=20).result(TIMEOUT)
        assert_exact("qwen2", [9, 9], fresh, seed=1)
        assert [span.version for span in fresh.versions] == [7]
        assert engine.version() == 7


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_state_dict_replaces_every_weight(architecture):
    with EmbeddedEngine(make(architecture)) as engine:
        engine.update_weights(reference(architecture, 1).state_dict(), 1)
        output = ask(engine, [1, 2, 3], max_tokens=25).result(TIMEOUT)
        assert_exact(architecture, [1, 2, 3], output, seed=1)
        engine.update_weights(reference(architecture), 2)
        output = ask(engine, [1, 2, 3], max_tokens=25).result(TIMEOUT)
        assert_exact(architecture, [1, 2, 3], output)


def test_of_tied_weights_one_name_is_enough(engine):
    state = dict(make("qwen2").state_dict())
    del state["lm_head.weight"]
    engine.update_weights(state, 0)
    assert_exact("qwen2", [1], ask(engine, [1], max_tokens=20).result(TIMEOUT))


def test_a_bad_update_names_what_is_wrong_and_changes_nothing(engine):
    good = make("qwen2", 1).state_dict()
    norm = "model.norm.weight"
    bad = {
        "missing.*norm": {name: tensor for name, tensor in good.items() if name != norm},
        "does not have.*extra": {**good, "extra": torch.zeros(1)},
        "model.norm.weight has shape": {**good, norm: torch.zeros(5)},
        "one weight": {**good, "lm_head.weight": torch.zeros(VOCAB, 32)},
    }
    for message, state in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.update_weights(state, 99)
    assert engine.version() != 99
    assert_exact("qwen2", [1], ask(engine, [1], max_tokens=20).result(TIMEOUT))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_partial_update_changes_what_is_given_and_nothing_else(architecture):
    new, names = reference(architecture, 1).state_dict(), ("q_proj", "v_proj", "up_proj", "fc1", "norm")
    some = {name: tensor for name, tensor in new.items() if any(part in name for part in names)}
    expected = make(architecture)
    assert not expected.load_state_dict(some, strict=False).unexpected_keys
    prompt = list(range(20))
    with EmbeddedEngine(make(architecture)) as engine:
        assert_exact(architecture, prompt, ask(engine, prompt, max_tokens=20).result(TIMEOUT))
        engine.update_weights(some, 5, partial=True)
        output = ask(engine, prompt, max_tokens=20).result(TIMEOUT)  # its prompt was kept, by the old weights
        assert output.logprobs == pytest.approx(true_logprobs(expected, prompt, output.token_ids), abs=1e-5)
        assert [span.version for span in output.versions] == [5]


def test_a_partial_update_is_held_to_names_and_shapes_too(engine):
    norm = make("qwen2", 1).state_dict()["model.norm.weight"]
    for message, state in {
        "does not have.*q_proj.lora": {"model.norm.weight": norm, "q_proj.lora_A.weight": norm},
        "model.norm.weight has shape": {"model.norm.weight": torch.zeros(5)},
    }.items():
        with pytest.raises(ValueError, match=message):
            engine.update_weights(state, 99, partial=True)
    with pytest.raises(ValueError, match="missing from the update"):
        engine.update_weights({"model.norm.weight": norm}, 99)
    assert_exact("qwen2", [1], ask(engine, [1], max_tokens=20).result(TIMEOUT))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "llama-biased", "mistral"])
def test_a_bfloat16_engine_is_within_a_tenth_of_a_nat_of_float32_and_of_a_plain_pass(architecture):
    held = make(architecture).bfloat16()
    with EmbeddedEngine(make(architecture).bfloat16()) as engine:
        output = ask(engine, [1, 2, 3], max_tokens=40).result(TIMEOUT)
        for truth in (reference(architecture), held):
            expected = true_logprobs(truth, [1, 2, 3], output.token_ids)
            assert output.logprobs == pytest.approx(expected, abs=0.1)
        engine.update_weights(reference(architecture, 1), 1)  # float32 weights are rounded on their way in
        output = ask(engine, [1, 2, 3], max_tokens=40).result(TIMEOUT)
        expected = true_logprobs(reference(architecture, 1), [1, 2, 3], output.token_ids)
        assert output.logprobs == pytest.approx(expected, abs=0.1)


def test_pause_keep_freezes_and_resume_goes_on(engine):
    reached, seen = threading.Event(), []

    def on_token(token):
        seen.append(token)
        reached.set()

    future = ask(engine, [1, 2], "r", on_token, max_tokens=62)
    assert reached.wait(TIMEOUT)
    engine.pause("keep")
    frozen = len(seen)
    late = ask(engine, [3], "late", max_tokens=5)
    engine.update_weights(reference("qwen2"), 0)  # runs while paused
    assert len(seen) == frozen
    assert not late.done()
    engine.resume()
    assert_exact("qwen2", [1, 2], future.result(TIMEOUT))
    assert_exact("qwen2", [3], late.result(TIMEOUT))


def test_pause_wait_lets_what_runs_finish_and_holds_the_rest(engine):
    reached = threading.Event()
    running = ask(engine, [1, 2], "r", lambda _: reached.set(), max_tokens=62)
    assert reached.wait(TIMEOUT)
    engine.pause("wait")
    assert running.done()
    late = ask(engine, [3], "late", max_tokens=5)
    engine.update_weights(reference("qwen2"), 0)
    assert not late.done()
    engine.resume()
    assert running.result().finish_reason == "length"
    assert_exact("qwen2", [3], late.result(TIMEOUT))


def test_pause_abort_ends_what_runs(engine):
    reached = threading.Event()
    running = ask(engine, [1, 2], "r", lambda _: reached.set(), max_tokens=62)
    assert reached.wait(TIMEOUT)
    engine.pause("abort")
    assert running.result(TIMEOUT).finish_reason in ("abort", "length")
    engine.resume()
    assert engine.in_flight == 0


def test_bad_requests_are_refused_with_numbers(engine):
    with pytest.raises(ValueError, match=r"prompt of 64 tokens.*max_model_len is 64"):
        ask(engine, [1] * 64)
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        ask(engine, [])
    with pytest.raises(ValueError, match=r"must be in 0\.\.47, got 1\.\.48"):
        ask(engine, [1, VOCAB])
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            GenerationSampling(**bad)
    engine.pause("keep")
    first = ask(engine, [1], "twice", max_tokens=1)
    with pytest.raises(ValueError, match="'twice' is already in flight"):
        ask(engine, [1], "twice")
    engine.resume()
    first.result(TIMEOUT)


def test_of_requests_that_wait_the_lowest_priority_is_first_then_the_first_that_came():
    engine, order, all_ended = EmbeddedEngine(make("qwen2"), max_num_seqs=1), [], threading.Event()

    def outbox(events):
        order.extend(event.request_id for event in events)
        if len(order) == 5:
            all_ended.set()

    with engine:
        engine.pause("keep")
        for name, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 0), ("e", -1)):
            once = GenerationSampling(max_tokens=1)
            request = GenerationRequest(request_id=name, token_ids=[1], sampling=once, priority=priority)
            engine.post([request], outbox)
        engine.resume()
        assert all_ended.wait(TIMEOUT)
    assert order == ["c", "e", "a", "d", "b"]


def test_stop_ends_what_is_in_flight():
    engine = EmbeddedEngine(make("qwen2"), max_num_seqs=1)
    early = ask(engine, [1], "early", max_tokens=60)
    engine.start()
    engine.pause("keep")
    late = ask(engine, [1], "late")
    engine.stop()
    assert early.result(TIMEOUT).finish_reason in ("abort", "length")
    assert late.result(TIMEOUT).finish_reason == "abort"
    with pytest.raises(EngineStopped):
        ask(engine, [1])


def test_a_broken_model_fails_its_requests_and_says_why():
    engine = EmbeddedEngine(make("mistral"))
    engine.start()
    engine._policy.model.model.norm = None
    with pytest.raises(EngineStopped) as failure:
        ask(engine, [1, 2]).result(TIMEOUT)
    assert isinstance(failure.value.__cause__, TypeError)
    assert not engine.running
    with pytest.raises(EngineStopped):
        engine.update_weights(reference("mistral"), 1)
    with pytest.raises(TypeError):
        engine.stop()


def test_windows_shorter_than_the_length_are_refused():
    model = AutoModelForCausalLM.from_config(MistralConfig(**SIZE, sliding_window=16))
    with pytest.raises(ValueError, match="max_model_len=16"):
        EmbeddedEngine(model)
    with EmbeddedEngine(model, max_model_len=16) as engine:
        assert len(ask(engine, [1] * 6).result(TIMEOUT).token_ids) == 10


def test_attention_whose_keys_and_values_are_of_two_shapes_is_refused():
    heads = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    config = DeepseekV2Config(**SIZE | {"num_key_value_heads": SIZE["num_attention_heads"]}, **heads)
    config.first_k_dense_replace = SIZE["num_hidden_layers"]
    with pytest.raises(ModelUnfit, match=r"keys are 8 numbers wide, its values 4: .*; use vLLM"):
        EmbeddedEngine(AutoModelForCausalLM.from_config(config))


def test_the_engines_seed_fixes_what_requests_without_one_get():
    answers = []
    for seed in (3, 3, 4):
        with EmbeddedEngine(make("qwen2"), seed=seed) as engine:
            answers.append(ask(engine, [1], max_tokens=20).result(TIMEOUT).token_ids)
    assert answers[0] == answers[1] != answers[2]


def read_tokens(engine, monkeypatch):
    """The widths of the passes that read prompts, as they happen."""
    widths, forward = [], engine._policy.forward

    def counted(cache, tokens, positions, first_row, *places, **adapters):
        if tokens.shape[1] > 1:
            widths.append((positions >= 0).sum())
        return forward(cache, tokens, positions, first_row, *places, **adapters)

    monkeypatch.setattr(engine._policy, "forward", counted)
    return widths


def test_a_next_turn_reads_only_what_it_adds(monkeypatch):
    with EmbeddedEngine(make("qwen2")) as engine:
        first = ask(engine, list(range(20)), max_tokens=10).result(TIMEOUT)
        widths = read_tokens(engine, monkeypatch)
        prompt = list(range(20)) + first.token_ids + [5, 6, 7]
        second = ask(engine, prompt, max_tokens=10).result(TIMEOUT)
        assert_exact("qwen2", prompt, second)
        assert widths == [4]  # the last sampled token had not been read yet
        engine.update_weights(reference("qwen2", 1), 1)
        third = ask(engine, prompt, max_tokens=10).result(TIMEOUT)
        assert_exact("qwen2", prompt, third, seed=1)
        assert widths == [4, 33]


def test_what_old_weights_wrote_is_never_reused(monkeypatch):
    with EmbeddedEngine(make("qwen2")) as engine:
        on_token, reached, go, _ = hold_after(engine, 3)
        running = ask(engine, list(range(20)), "running", on_token, max_tokens=10)
        assert reached.wait(TIMEOUT)
        update = threading.Thread(target=engine.update_weights, args=(make("qwen2", 1), 1))
        update.start()
        while not engine._threads.orders:
            assert update.is_alive()
        go.set()
        update.join(TIMEOUT)
        prompt = list(range(20)) + running.result(TIMEOUT).token_ids
        after = ask(engine, prompt, "after", max_tokens=10).result(TIMEOUT)
        assert_exact("qwen2", prompt, after, seed=1)


turns = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 24), st.integers(1, 12)), min_size=1, max_size=20)


@pytest.mark.parametrize("prefix_rows", [0, 3, 64])
@pytest.mark.parametrize("architecture", ["qwen2", "mistral"])
def test_shared_beginnings_change_no_logprob(architecture, prefix_rows):
    stories = [[(3 * story + k) % VOCAB for k in range(30)] for story in range(2)]
    stories += [stories[0][:15] + stories[1][15:], stories[0][:9] + [1] * 21]
    engine = EmbeddedEngine(make(architecture), max_num_seqs=4, prefix_rows=prefix_rows)
    with engine:

        @settings(max_examples=examples(15), deadline=None)
        @given(turns)
        def share(turns):
            prompts = [stories[story][: cut + 6] for story, cut, _ in turns]
            futures = [
                ask(engine, prompt, f"{i}", max_tokens=turn[2])
                for i, (prompt, turn) in enumerate(zip(prompts, turns, strict=True))
            ]
            for prompt, future in zip(prompts, futures, strict=True):
                assert_exact(architecture, prompt, future.result(TIMEOUT))

        share()


@pytest.mark.parametrize(
    ("positions", "given", "length"),
    [
        (512, {}, 512),
        (9000, {}, 2048),
        (9000, {"expected_len": 100}, 2048),
        (9000, {"expected_len": 4000}, 4000),
        (9000, {"expected_len": 10000}, 9000),
        (9000, {"expected_len": 4000, "max_model_len": 300}, 300),
    ],
)
def test_sequences_are_as_long_as_is_expected_and_the_model_was_made_for(
    positions: int, given: dict[str, int], length: int
) -> None:
    model = AutoModelForCausalLM.from_config(
        MistralConfig(**SIZE | {"max_position_embeddings": positions, "sliding_window": None})
    )
    with EmbeddedEngine(model, **given) as engine:
        assert engine.max_model_len == length
