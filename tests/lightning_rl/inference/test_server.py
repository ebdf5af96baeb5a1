import http.client
import json
import threading

import msgspec
import pytest

from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.server import EngineServer

from .models import VOCAB, make, reference, true_logprobs

TIMEOUT = 60
PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def server():
    with EmbeddedEngine(make("qwen2"), max_num_seqs=4) as engine, EngineServer(engine) as server:
        yield server


def call(server, method, path, body=None):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT)
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, raw)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content else None


def generate(server, token_ids, **more):
    sampling = {"max_tokens": 12, "logprobs": 0, **more.pop("sampling_params", {})}
    body = {"token_ids": token_ids, "sampling_params": sampling, **more}
    return call(server, "POST", PATH, body)


def events(response):
    return [line[6:].strip() for line in response.read().splitlines() if line.startswith(b"data: ")]


def open_stream(server, request_id, **sampling):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT)
    body = {
        "token_ids": [1, 2],
        "sampling_params": sampling,
        "request_id": request_id,
        "stream": True,
    }
    connection.request("POST", PATH, json.dumps(body).encode())
    return connection, connection.getresponse()


def test_the_answer_has_vllms_shape(server):
    status, answer = generate(server, [1, 2, 3], request_id="mine", sampling_params={"seed": 3})
    assert status == 200
    (choice,) = answer.pop("choices")
    assert answer == {
        "request_id": "mine",
        "usage": {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15},
    }
    content = choice.pop("logprobs")["content"]
    ids = choice.pop("token_ids")
    assert choice == {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "weight_versions": [{"version": "0", "start": 0, "end": 12}],
    }
    assert [entry["token_id"] for entry in content] == ids
    assert all(entry["rank"] >= 1 and entry["top_logprobs"] == [] for entry in content)
    expected = true_logprobs(reference("qwen2"), [1, 2, 3], ids)
    assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=1e-5)


def test_a_stop_token_is_among_the_tokens_and_named(server):
    stops = list(range(0, VOCAB, 3))
    _, answer = generate(server, [1], sampling_params={"stop_token_ids": stops, "max_tokens": 60})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == choice["token_ids"][-1]
    assert choice["stop_reason"] in stops


def test_n_choices_are_separate_samples_each_with_its_own_seed(server):
    _, together = generate(server, [1, 2], sampling_params={"n": 3, "seed": 5})
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    assert together["usage"] == {"prompt_tokens": 2, "completion_tokens": 36, "total_tokens": 38}
    for index, choice in enumerate(together["choices"]):
        _, alone = generate(server, [1, 2], sampling_params={"seed": 5 + index})
        assert alone["choices"][0]["token_ids"] == choice["token_ids"]


def test_without_logprobs_there_are_none(server):
    _, answer = generate(server, [1], sampling_params={"logprobs": None})
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_has_one_chunk_per_token_then_usage_then_done(server, n):
    sampling = {"max_tokens": 8, "logprobs": 0, "seed": 1, "n": n}
    connection, response = open_stream(server, "s", **sampling)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response)
    connection.close()
    assert done == b"[DONE]"
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 8 * n
    _, whole = generate(server, [1, 2], sampling_params=sampling)
    pieces = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    for want in whole["choices"]:
        mine = [piece for piece in pieces if piece["index"] == want["index"]]
        assert [piece["token_ids"] for piece in mine] == [[i] for i in want["token_ids"]]
        content = [entry for piece in mine for entry in piece["logprobs"]["content"]]
        assert [entry["token_id"] for entry in content] == want["token_ids"]
        assert [piece["finish_reason"] for piece in mine] == [None] * 7 + ["length"]
        own = [{"version": "0", "start": 0, "end": 1}]
        assert [piece["weight_versions"] for piece in mine[:-1]] == [own] + [None] * 6
        assert mine[-1]["weight_versions"] == want["weight_versions"]


def test_a_piece_is_sent_as_its_token_is_there_and_tells_of_other_weights():
    with EmbeddedEngine(make("qwen2"), max_num_seqs=4) as engine, EngineServer(engine) as server:
        engine.pause("keep")
        connection, response = open_stream(server, "s", max_tokens=40, logprobs=0, seed=1)
        steps, go_on, step = [], threading.Event(), engine._threads.batches[0].step

        def one_step(rows):
            steps.append(rows)
            assert len(steps) < 2 or go_on.wait(TIMEOUT)
            return step(rows)

        engine._threads.batches[0].step = one_step
        engine.resume()
        pieces = (json.loads(line[6:]) for line in response if line.startswith(b"data: {"))
        first, second = (next(pieces)["choices"][0] for _ in range(2))  # while there is no third
        update = threading.Thread(target=engine.update_weights, args=(reference("qwen2"), 7))
        update.start()
        while not engine._threads.orders:
            pass
        go_on.set()
        update.join()
        spans = [versions for piece in pieces for one in piece["choices"] if (versions := one["weight_versions"])]
        connection.close()
    own = [{"version": "0", "start": 0, "end": 1}]
    assert (first["weight_versions"], second["weight_versions"]) == (own, None)
    assert spans[0] == [{"version": "7", "start": 0, "end": 1}]
    assert [(span["version"], span["end"]) for span in spans[-1]] == [("0", 3), ("7", 40)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [1], "lora": "x"}, "lora"),
        ({"token_ids": [1], "priority": 2**31}, "priority"),
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": []}, "prompt of 0 tokens"),
        ({"token_ids": [VOCAB]}, "token ids must be in"),
        ({"token_ids": [2**80]}, "token_ids"),
        ({"token_ids": [1] * 64}, "max_model_len is 64"),
        (b"{", "truncated"),
    ],
)
def test_bad_input_is_refused_by_name(server, body, message):
    status, answer = call(server, "POST", PATH, body)
    assert (status, answer["error"]["code"]) == (400, 400)
    assert message in answer["error"]["message"]


def test_an_id_in_flight_is_refused(server):
    server.engine.pause("keep")
    connection, _ = open_stream(server, "twice", max_tokens=3)
    status, answer = generate(server, [1], request_id="twice")
    assert (status, "twice" in answer["error"]["message"]) == (400, True)
    server.engine.resume()
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(server, stream):
    server.engine.pause("keep")
    body = {"token_ids": [1], "request_id": f"gone-{stream}", "stream": stream}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT)
    connection.request("POST", PATH, json.dumps(body).encode())
    aborted = threading.Event()
    abort = server.engine.abort

    def watched(request_id):
        abort(request_id)
        aborted.set()

    server.engine.abort = watched
    try:
        while not server.engine.in_flight:
            pass
        connection.close()
        assert aborted.wait(TIMEOUT)
        server.engine.resume()  # an order behind the abort: it has been carried out when this returns
        assert server.engine.in_flight == 0
    finally:
        del server.engine.abort


def test_pause_and_resume_over_http(server):
    assert call(server, "POST", "/pause?mode=never")[0] == 400
    assert call(server, "POST", "/pause?mode=keep")[0] == 200
    assert call(server, "GET", "/is_paused")[1] == {"is_paused": True}
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(generate(server, [1, 2])))
    waiting.start()
    while not server.engine.in_flight:
        pass
    assert not answers
    assert call(server, "POST", "/resume")[0] == 200
    waiting.join(TIMEOUT)
    assert answers[0][0] == 200
    assert call(server, "GET", "/is_paused")[1] == {"is_paused": False}


def test_the_model_is_described(server):
    assert call(server, "GET", "/health") == (200, None)
    (model,) = call(server, "GET", "/v1/models")[1]["data"]
    assert (model["id"], model["max_model_len"], model["policy_version"]) == ("policy", 64, 0)


def test_what_has_no_place_waits_and_is_counted(server):
    def told():
        (model,) = call(server, "GET", "/v1/models")[1]["data"]
        return model["max_num_seqs"], model["waiting"]

    assert told() == (4, 0)
    server.engine.pause("keep")
    clients = [threading.Thread(target=generate, args=(server, [1, n])) for n in range(2, 9)]
    for client in clients:
        client.start()
    while server.engine.in_flight < 7:
        pass
    assert told() == (4, 3)
    server.engine.resume()
    for client in clients:
        client.join(TIMEOUT)
    assert told() == (4, 0)


def test_versions_are_strings_of_the_policy_version():
    with EmbeddedEngine(make("qwen2"), version=4) as engine, EngineServer(engine) as server:
        engine.update_weights(reference("qwen2"), 5)
        _, answer = generate(server, [1])
        assert answer["choices"][0]["weight_versions"][0]["version"] == "5"
        assert call(server, "GET", "/v1/models")[1]["data"][0]["policy_version"] == 5


def test_a_stopped_engine_answers_503():
    engine = EmbeddedEngine(make("qwen2"))
    with EngineServer(engine) as server:
        engine.start()
        engine.stop()
        assert call(server, "GET", "/health")[0] == 503
        assert generate(server, [1])[0] == 503
        assert call(server, "POST", "/resume")[0] == 503


def test_many_clients_at_once_get_their_own_answers(server):
    answers = {}

    def client(number):
        for turn in range(5):
            prompt = [number, turn]
            answers[number, turn] = generate(server, prompt)[1]

    threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(answers) == 60
    for prompt, answer in answers.items():
        (choice,) = answer["choices"]
        expected = true_logprobs(reference("qwen2"), list(prompt), choice["token_ids"])
        got = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert got == pytest.approx(expected, abs=1e-5)


def test_the_wire_is_plain_json():
    from lightning_rl.inference import wire

    body = wire.decode_request(b'{"token_ids": [1], "sampling_params": {"temperature": 0}}')
    assert body.sampling_params.temperature == 0.0
    assert msgspec.to_builtins(body)["sampling_params"]["max_tokens"] == wire.DEFAULT_MAX_TOKENS
