"""Requests made from the OpenAPI document, right by it and wrong by it: what comes back is what the document says."""

from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from lightning_rl_proxy.http import openapi
from tests.fuzz.bodies import plans
from tests.fuzz.laws import TIMEOUT, Answer, Fuzzed, share

DOCUMENT = schemathesis.openapi.from_dict(openapi.document())
PATHS = (
    "/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens", "/embeddings", "/models",
    "/models/{model}",
)  # fmt: skip
DOORS = ("/v1", "/rollout/{rollout}/attempt/{attempt}/v1", "/rollout/{rollout}/attempt/{attempt}/agent/{agent}/v1")
load_all_checks()
CONFORMANCE = [
    CHECKS.get_one(name)
    for name in (
        "status_code_conformance", "content_type_conformance", "response_schema_conformance",
        "response_headers_conformance",
    )
]  # fmt: skip


def cases(path: str) -> st.SearchStrategy[Any]:
    """Requests for `path` behind any door, with keys and ids that are right or made up."""
    method = "GET" if "models" in path else "POST"
    operations = [DOCUMENT[door + path][method] for door in DOORS]
    modes = [GenerationMode.POSITIVE] if method == "GET" else [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    return st.one_of([each.as_strategy(generation_mode=mode) for each in operations for mode in modes])


@pytest.mark.parametrize("path", PATHS)
@share(0.015)
@given(data=st.data())
def test_requests_by_the_document_get_answers_by_the_document(fuzzed: Fuzzed, path: str, data: st.DataObject) -> None:
    case = data.draw(cases(path))
    with fuzzed.attempt(*data.draw(plans)) as attempt:
        # A URL with ids that are none is no door, and knows no dialect: so the ids are sound, right or of others.
        ids = data.draw(st.sampled_from([(attempt.rollout_id, "a")] * 4 + [("unknown", "a"), ("other", "~")]))
        sound = {"rollout": ids[0], "attempt": ids[1], "agent": "judge"}
        case.path_parameters |= {name: value for name, value in sound.items() if f"{{{name}}}" in case.path}
        keys = {"authorization": f"Bearer {attempt.key}"}, {"x-api-key": attempt.key}, {"authorization": "Bearer x"}
        headers = data.draw(st.sampled_from([*keys[:2] * 3, keys[2]]))
        fuzzed.requests += 1
        # `case.call` reads no more than 20 events of a stream.
        request = case.as_transport_kwargs(base_url=fuzzed.served.url, headers=headers)
        response = requests.request(**request, timeout=TIMEOUT)
        behind = "/v1" + path
        attempt.judge(
            behind, Answer(response.status_code, {k.lower(): v for k, v in response.headers.items()}, response.content)
        )
        case.validate_response(response, checks=CONFORMANCE)
