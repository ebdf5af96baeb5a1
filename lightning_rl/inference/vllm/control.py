"""What is asked of a vLLM server over HTTP beside sampling: to take weights, to name their version, to prove them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import urllib3

from lightning_rl.inference.servers.errors import ServerRefused, Unreached, WeightsRefused
from lightning_rl.inference.weights.check import SampledTokens

_SECONDS = 600.0  # a large file is read from a slow disk
_WORD_SECONDS = 30.0  # for what it only has to say
_CONNECT_SECONDS = 10.0
_AWAY = (502, 503, 504)  # of a proxy before it, or of a server whose engine has ended or starts
_WITH_ADAPTERS = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
# After an error vLLM cuts the connection: each question has its own.
_HEADERS = {"content-type": "application/json", "connection": "close"}


class VllmRefused(ServerRefused):
    """A vLLM server answered with an error."""

    def __init__(self, prefix: str, response: urllib3.BaseHTTPResponse) -> None:
        super().__init__(prefix + _message(response.data), response.status)


class Control:
    """The server at `url`, which must run with VLLM_SERVER_DEV_MODE=1 and our plugin (`docs/engines.md`)."""

    engine = "vLLM"

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._pool = urllib3.PoolManager(maxsize=16, retries=False)

    def initialise(self, info: Any) -> None:
        """Make weights receivable; `info` is as the server's backend wants it.

        Raises WeightsRefused where the server has no such backend.
        """
        self._order("/init_weight_transfer_engine", {"init_info": info})

    def begin(self) -> None:
        """Weights come now. Raises WeightsRefused."""
        self._order("/start_weight_update")

    def update(self, info: Any) -> None:
        """Take weights; `info` says where they are. Raises WeightsRefused."""
        self._order("/update_weights", {"update_info": info})

    def finish(self, version: int) -> None:
        """That was all of policy version `version`; nothing that older weights computed is used again.

        Generations that a pause froze are read anew from their first token when they go on. Raises WeightsRefused.
        """
        self._order("/finish_weight_update", {"weight_version": str(version)})
        answer = self._order("/reset_prefix_cache?reset_running_requests=true")
        if not answer.get("success"):
            raise WeightsRefused(f"vLLM at {self.url} kept what the old weights computed: /reset_prefix_cache {answer}")
        self._order("/reset_encoder_cache")  # the features of images that were shown before

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Meanwhile it samples nothing; answers that are under way end as aborted. Raises WeightsRefused."""
        self._order("/pause?mode=abort")
        yield
        self._order("/resume")

    def sleep(self, *, keep_weights: bool) -> None:
        """Leave the GPU to others: weights and cache are given up until `wake`. Weights are kept in main memory, or
        else by nobody: whoever wakes it then sends all of them. Raises WeightsRefused."""
        self._order(f"/sleep?level={1 if keep_weights else 2}")

    def wake(self, *tags: str) -> None:
        """Take the memory of `weights` or of `kv_cache` again. Raises WeightsRefused."""
        self._order("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    def load_adapter(self, name: str, folder: Path) -> None:
        """Sample the adapter in a `peft` folder for requests of that name, and for no older one of the name.

        Answers that were begun with others end with these. Raises WeightsRefused.
        """
        self.unload_adapter(name)
        try:
            self._send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except VllmRefused as error:
            advice = f"; start it with {_WITH_ADAPTERS}, as docs/engines.md says" if error.status == 404 else ""
            raise WeightsRefused(f"{error}{advice}") from error

    def unload_adapter(self, name: str) -> None:
        """Take no more requests of that name, where there is one; those under way end with it."""
        if name in self.adapters():
            self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def adapters(self) -> set[str]:
        """The names that it samples, of adapters too. Raises VllmRefused and Unreached."""
        return {each["id"] for each in self._ask("GET", "/v1/models", seconds=_WORD_SECONDS)["data"]}

    def weight_version(self) -> str:
        """The label of its weights, `default` where it was given none. Raises VllmRefused and Unreached."""
        return str(self._ask("GET", "/weight_info", seconds=_WORD_SECONDS)["weight_version"])

    def world_size(self) -> int:
        """Processes that hold a share of its weights."""
        return int(self._ask("GET", "/get_world_size")["world_size"])

    def paused(self) -> bool:
        """Whether it samples nothing until it is resumed."""
        return bool(self._ask("GET", "/is_paused")["is_paused"])

    def sample(self, prompt: list[int], n: int, seed: int, *, model: str | None = None) -> SampledTokens:
        """`n` tokens behind a prompt at temperature 1, whatever they are; `model` is an adapter's name, if need be."""
        parameters = {"max_tokens": n, "temperature": 1.0, "seed": seed, "logprobs": 0, "ignore_eos": True}
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": parameters | {"detokenize": False}}
        if model is not None:
            body["model"] = model
        [choice] = self._ask("POST", "/inference/v1/generate", body)["choices"]
        return SampledTokens(choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]])

    def score(self, token_ids: list[int], top: int) -> list[dict[str, Any]]:
        """For each of these tokens what the model gives for its place at temperature 1: by token id the log probability
        and the rank, of the token and of the `top` most likely ones. Nothing is known of the first.

        vLLM samples one token for it, which nobody reads. Raises VllmRefused and Unreached.
        """
        parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top, "detokenize": False}
        answer = self._ask("POST", "/inference/v1/generate", {"token_ids": token_ids, "sampling_params": parameters})
        return [each or {} for each in answer.get("prompt_logprobs") or ()]

    def tokenize(self, text: str) -> list[int]:
        """The token ids that the server writes a text with. Raises VllmRefused and Unreached."""
        body = {"prompt": text, "add_special_tokens": False}
        token_ids: list[int] = self._ask("POST", "/tokenize", body)["tokens"]
        return token_ids

    def close(self) -> None:
        """Free its connections."""
        self._pool.clear()

    def _order(self, path: str, body: Any = None) -> dict[str, Any]:
        try:
            return self._ask("POST", path, body)
        except VllmRefused as error:
            unable = error.status == 404 or "Weight transfer not configured" in str(error)
            advice = "; start it with VLLM_SERVER_DEV_MODE=1 and the plugin, as docs/engines.md says" if unable else ""
            raise WeightsRefused(f"{error}{advice}") from error

    def _ask(self, method: str, path: str, body: Any = None, seconds: float = _SECONDS) -> dict[str, Any]:
        content = self._send(method, path, body, seconds) or b"{}"
        try:
            answer: dict[str, Any] = msgspec.json.decode(content, type=dict)
        except msgspec.DecodeError as error:  # of a proxy before it
            raise Unreached(f"vLLM at {self.url}{path} answers with no JSON object: {content[:200]!r}") from error
        return answer

    def _send(self, method: str, path: str, body: Any = None, seconds: float = _SECONDS) -> bytes:
        sent = None if body is None else json.dumps(body).encode()
        limits = urllib3.Timeout(connect=_CONNECT_SECONDS, read=seconds)
        try:
            response = self._pool.request(method, self.url + path, body=sent, headers=_HEADERS, timeout=limits)
        except urllib3.exceptions.HTTPError as error:
            raise Unreached(f"vLLM at {self.url}{path} does not answer: {error}") from error
        if response.status in _AWAY:
            raise Unreached(f"vLLM at {self.url}{path} does not answer: HTTP status {response.status}")
        if response.status != 200:
            raise VllmRefused(f"vLLM at {self.url}: {method} {path} answered {response.status}: ", response)
        return response.data


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:500].decode(errors="replace")
