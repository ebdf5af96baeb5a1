"""Heads that no SDK sends, byte by byte: every one is answered or the connection is closed, and nothing breaks."""

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.laws import Fuzzed, share

BODY = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
NAMES = ("authorization", "x-api-key", "content-length", "transfer-encoding", "content-type", "expect", "host", "x-odd")
VALUES = (
    "", "0", "-1", "1e3", str(len(BODY)), "999999999999999999999", "chunked", "100-continue", "Bearer", "Bearer  ", "é",
    "Bearer lrl-attempt:a:b:c:d", "Bearer lrl-attempt:r1:a:99999999999999999999:x", "\x00", "a" * 9000,
)  # fmt: skip
PATHS = (
    "/v1/chat/completions", "/v1/messages", "//", "/v1/", "/v1/../v1/models", "/v1/models/%00", "/v1/models/%ff", "*",
    "/rollout/%2e/attempt/a/v1/models", "/openapi.json", "/v1/chat/completions?x=%zz#y", "http://x/v1/models",
)  # fmt: skip


@share(0.04)
@given(
    method=st.sampled_from(["POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "post", "P", "PRI"]),
    path=st.sampled_from(PATHS),
    extra=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=4),
    keyed=st.booleans(),
)
def test_any_head_is_answered_or_refused(
    fuzzed: Fuzzed, method: str, path: str, extra: list[tuple[str, str]], keyed: bool
) -> None:
    with fuzzed.attempt() as attempt:
        attempt.left = True  # whether these bytes are a request at all is the server's to say
        lines = [*(f"{name}: {value}" for name, value in extra), "connection: close"]
        if keyed:
            lines.append(f"authorization: Bearer {attempt.key}")
        if "content-length" not in dict(extra) and "transfer-encoding" not in dict(extra):
            lines.append(f"content-length: {len(BODY)}")
        head = "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *lines, "", ""])
        answered = attempt.raw(head.encode("utf-8") + BODY, patience=0.2)
        assert not answered.startswith(b"HTTP/1.1 5"), answered
