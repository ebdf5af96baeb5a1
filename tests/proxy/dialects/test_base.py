"""What every dialect shares: the decoding of a body."""

import pytest

from lightning_rl_proxy.dialects.base import decode
from lightning_rl_proxy.errors import GatewayError


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"a": 1', b'{"m\xbc": 1}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"a": NaN}', b"[" * 9999],
)
def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        decode(body)
    assert refused.value.status == 400
