"""Agents that ask the run's engine themselves and trace it by OpenTelemetry. Runners import this file: no torch."""

import json
import os
import uuid
from pathlib import Path
from typing import Any

import httpx
import openai
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Tracer
from tokenizers import Tokenizer

import lightning_rl as lrl

CHECKPOINT = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"
ENGINE = "TEST_ENGINE_OF_SPANS"  # the environment variable with the engine's address
_TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@lrl.rollout
def asks_the_engine(task: int, llm: lrl.LLM) -> float:
    """Two turns at the engine beside the gateway, told of in GenAI's words."""
    provider, tracer = _traced(llm)
    prompt = _ids(f"<|im_start|>user\nnumber {task}<|im_end|>\n<|im_start|>assistant\n")
    first = _ask(tracer, llm.model, prompt)
    second = _ask(tracer, llm.model, [*prompt, *first, *_ids("<|im_end|>\n<|im_start|>user\nand<|im_end|>\n")])
    provider.shutdown()
    return float(sum(second) % 3)


@lrl.rollout
def asks_both(task: int, llm: lrl.LLM) -> float:
    """A call at the gateway that an instrumentation tells of with its ids, and one beside it."""
    provider, tracer = _traced(llm)
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"number {task}"}]
        answer = client.chat.completions.create(
            model=llm.model, messages=chat, logprobs=True, extra_body={"return_token_ids": True}
        )
    said = answer.model_dump()
    with tracer.start_as_current_span("ChatCompletion") as span:
        # A proxy between gave the answer an id of its own.
        span.set_attributes({"openinference.span.kind": "LLM", "output.value": json.dumps(said | {"id": "a-proxys"})})
    beside = _ask(tracer, llm.model, _ids(f"beside {task}"))
    provider.shutdown()
    return float(sum(beside) % 3)


def _traced(llm: lrl.LLM) -> tuple[TracerProvider, Tracer]:
    server = llm.base_url.partition("/rollout/")[0]
    exporter = OTLPSpanExporter(f"{server}/v1/traces", headers={"authorization": f"Bearer {llm.api_key}"})
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, provider.get_tracer("agent")


def _ask(tracer: Tracer, model: str, prompt: list[int]) -> list[int]:
    """Sample 8 tokens at the engine, and tell of it."""
    with tracer.start_as_current_span(f"chat {model}") as span:
        sampling = {"max_tokens": 8, "logprobs": 0, "temperature": 1.0, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": sampling}
        answer = httpx.post(f"{os.environ[ENGINE]}/inference/v1/generate", json=body, timeout=60).raise_for_status()
        [choice] = answer.json()["choices"]
        sampled: list[int] = choice["token_ids"]
        said = {
            "role": "assistant",
            "parts": [{"type": "text", "content": _TOKENIZER.decode(sampled)}],
            "finish_reason": choice["finish_reason"],
            "prompt_token_ids": prompt,
            "token_ids": sampled,
            "logprobs": choice["logprobs"],
        }
        span.set_attributes(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": model,
                "gen_ai.request.temperature": 1.0,
                "gen_ai.response.model": model,
                "gen_ai.response.id": f"chatcmpl-{uuid.uuid4().hex}",
                "gen_ai.output.messages": json.dumps([said]),
            }
        )
    return sampled


def _ids(text: str) -> list[int]:
    ids: list[int] = _TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids
