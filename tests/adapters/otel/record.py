"""Records what real instrumentations export of real clients' calls: the JSON files beside this script.

Run in an environment that has them (`pip install openai litellm openinference-instrumentation-openai
opentelemetry-instrumentation-openai opentelemetry-instrumentation-openai-v2 opentelemetry-exporter-otlp-proto-http`):
`python record.py`. The service they ask answers as vLLM does when it was asked for token ids and logprobs.

Each file is an OTLP request in JSON, ids in hexadecimal, of three calls: one with a tool call in its answer, for which
token ids were asked; one for which they were not; and a stream for which they were. Attempt ids are not in it: tests
add them. `openllmetry_before_1_0` is of opentelemetry-instrumentation-openai 0.40.14, which needs openai below 3.
"""

import base64
import importlib.metadata
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPT, ANSWER, LOGPROBS = [11, 12, 13, 14], [21, 22, 23], [-0.5, -0.25, -1.0]
MODEL = "policy"
_NOISE = ("metadata.", "hidden_params")  # of litellm: its proxy's, and the headers of the answer
_HEX_IDS = ("traceId", "spanId", "parentSpanId")


class Service(BaseHTTPRequestHandler):
    """Chat Completions in vLLM's words."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked.get("stream"):
            body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(asked)) + "data: [DONE]\n\n"
            self._send("text/event-stream", body.encode())
        else:
            self._send("application/json", json.dumps(_answer(asked)).encode())

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


_numbers = itertools.count(1)


def _head(kind: str, number: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": 1, "model": MODEL}


def _usage() -> dict[str, int]:
    return {"prompt_tokens": len(PROMPT), "completion_tokens": len(ANSWER), "total_tokens": len(PROMPT) + len(ANSWER)}


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    message = {"role": "assistant", "content": "I add.", "tool_calls": [call] if asked.get("tools") else None}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    answer = _head("chat.completion", next(_numbers)) | {"choices": [choice], "usage": _usage()}
    if asked.get("logprobs"):
        choice["logprobs"] = {"content": [
            {"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for text, logprob in zip(("I", " add", "."), LOGPROBS, strict=True)
        ]}  # fmt: skip
    if asked.get("return_token_ids"):
        choice["token_ids"] = ANSWER
        answer["prompt_token_ids"] = PROMPT
    return answer


def _chunks(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    ids, logprobs = asked.get("return_token_ids"), asked.get("logprobs")
    head = _head("chat.completion.chunk", next(_numbers))
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    yield head | {"choices": [first]} | ({"prompt_token_ids": PROMPT} if ids else {})
    for place, text in enumerate(("I", " add", ".")):
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"content": text},
            "finish_reason": "stop" if place == 2 else None,
        }
        if logprobs:
            choice["logprobs"] = {"content": [{"token": text, "logprob": LOGPROBS[place], "bytes": None}]}
        yield head | {"choices": [choice | ({"token_ids": [ANSWER[place]]} if ids else {})]}
    yield head | {"choices": [], "usage": _usage()}


MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]


def by_openai(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=url, api_key="k")
    ask = client.chat.completions.create
    with_ids = {"return_token_ids": True}
    ask(model=MODEL, messages=MESSAGES, temperature=1.0, tools=TOOLS, logprobs=True, extra_body=with_ids)
    ask(model=MODEL, messages=MESSAGES, temperature=1.0)
    for _ in ask(model=MODEL, messages=MESSAGES, stream=True, logprobs=True, extra_body=with_ids):
        pass


def by_litellm(url: str) -> None:
    import litellm

    more = {"api_base": url, "api_key": "k", "messages": MESSAGES, "model": f"openai/{MODEL}"}
    with_ids = {"return_token_ids": True}
    litellm.completion(**more, temperature=1.0, tools=TOOLS, logprobs=True, extra_body=with_ids)
    litellm.completion(**more, temperature=1.0)
    for _ in litellm.completion(**more, stream=True, logprobs=True, extra_body=with_ids):
        pass


@contextmanager
def _serving() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()


def record(name: str) -> None:
    """One instrumentation, in a process of its own: they change the clients' classes."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "agent"}))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    package, play = INSTRUMENTATIONS[name](provider)
    with _serving() as url:
        play(url)
        if name == "litellm":
            _wait_for_litellm(kept)
    told = _as_otlp_json(encode_spans(kept.get_finished_spans()))
    about = {"package": package, "version": importlib.metadata.version(package)}
    text = json.dumps({"recorded": about, "request": told}, indent=1).replace(url, "http://127.0.0.1:1/v1")
    port = url.rsplit(":", 1)[1].removesuffix("/v1")
    text = text.replace(f'"intValue": "{port}"', '"intValue": "1"')
    (HERE / f"{name}.json").write_text(text + "\n")


def _wait_for_litellm(kept: Any) -> None:
    import time

    for _ in range(100):  # it tells from threads of its own
        if sum(span.name == "litellm_request" for span in kept.get_finished_spans()) >= 3:
            break
        time.sleep(0.1)
    time.sleep(0.5)


def _as_otlp_json(request: Any) -> Any:
    from google.protobuf import json_format

    told = json_format.MessageToDict(request)
    for of_resource in told["resourceSpans"]:
        for of_scope in of_resource["scopeSpans"]:
            for span in of_scope["spans"]:
                span["attributes"] = [each for each in span.get("attributes", []) if not each["key"].startswith(_NOISE)]
                for name in _HEX_IDS:
                    if name in span:
                        span[name] = base64.b64decode(span[name]).hex()
    return told


def _openinference(provider: Any) -> tuple[str, Callable[[str], None]]:
    from openinference.instrumentation.openai import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)
    return "openinference-instrumentation-openai", by_openai


def _openllmetry(provider: Any) -> tuple[str, Callable[[str], None]]:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)
    return "opentelemetry-instrumentation-openai", by_openai


def _gen_ai(provider: Any) -> tuple[str, Callable[[str], None]]:
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "SPAN_ONLY"
    os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)
    return "opentelemetry-instrumentation-openai-v2", by_openai


def _litellm(provider: Any) -> tuple[str, Callable[[str], None]]:
    import litellm

    litellm.callbacks = ["otel"]
    return "litellm", by_litellm


INSTRUMENTATIONS = {
    "openinference": _openinference,
    "openllmetry": _openllmetry,
    "openllmetry_before_1_0": _openllmetry,
    "gen_ai": _gen_ai,
    "litellm": _litellm,
}

if __name__ == "__main__":
    if len(sys.argv) > 1:
        record(sys.argv[1])
    else:
        import subprocess

        for each in sorted(INSTRUMENTATIONS.keys() - {"openllmetry_before_1_0"}):
            subprocess.run([sys.executable, __file__, each], check=True)
