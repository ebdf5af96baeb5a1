"""A model from disk that SGLang servers sample: they run already, and read weights from a folder that both sides see.

The place of an update is after the gateway's pause and before its resume: that pause retracts the requests, so that the
cache of the old weights can be flushed while they wait. What was sampled keeps its version, what comes next has the new
one. An invariant as with vLLM: after an update a server's log probabilities are compared with the model's. A `Scorer`
asks such a server what its model says of rows: a teacher's.
"""

import shutil
from collections.abc import Mapping, Sequence
from functools import partial as bind
from pathlib import Path
from typing import Any

import msgspec
import urllib3
from torch import Tensor, nn

from lightning_rl.errors import Explained
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.weights.check import FLOAT32, LogProbs, SampledTokens, Tolerance, log_probs_of, prove
from lightning_rl.inference.weights.stream import WeightStream, as_saved, export_model, stream_of

_PATH = "/update_weights_from_disk"
_CONNECT_SECONDS = 10.0
_SAMPLE_SECONDS = 60.0
_SCORE_SECONDS = 600.0
_SCORED_AT_ONCE = 16


class WeightsNotUpdated(Explained, RuntimeError):
    """The server did not say that it took the weights and flushed its caches: it must not sample for training."""


class ScoresRefused(Explained, RuntimeError):
    """The server gave no log probabilities of a row; `status` is that of its HTTP answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _SglangReply(msgspec.Struct):
    success: bool
    message: str = ""


class SGLangPolicy:
    """The model of `source`, sampled by the SGLang servers at `urls`.

    Args:
        source: of `model`; servers get its weights in its format, and whole where they are in 4 bits here.
        run_dir: where the weights on their way to the servers are, which must be able to read them there.
        tolerance: how far log probabilities of server and model may be apart.

    `name` is what the gateway calls it, `folder` holds its tokenizer, `model` is the one that is trained. `score` is
    what the model says of tokens, by which servers are judged; None: nobody can say yet.
    """

    takes_adapter = False

    def __init__(
        self,
        source: ModelSource,
        run_dir: Path,
        *,
        urls: Sequence[str],
        tolerance: Tolerance = FLOAT32,
    ) -> None:
        self.folder, self.name = source.located
        self.model = model = source.model()
        self.score: LogProbs | None = None if source.elsewhere else bind(log_probs_of, model)
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._version: int | None = None
        self._proven = False
        self._urls = [url.rstrip("/") for url in urls]
        self._outbox = (run_dir / "weights").resolve()
        self._tolerance = tolerance

    def start(self) -> None:
        """Nothing: the servers run already. Whoever calls this calls `close`, whatever comes between."""

    def registrations(self) -> list[dict[str, Any]]:
        """What the gateway is told of the servers."""
        return [{"model": self.name, "kind": "sglang", "url": url, "policy_version": 0} for url in self._urls]

    def update_weights(
        self, weights: nn.Module | Mapping[str, Tensor] | WeightStream, version: int, *, partial: bool = False
    ) -> None:
        """Give every server new weights; returns when all sample with them. Calls should wait meanwhile.

        Args:
            weights: the model, its whole state dict, or a stream of all under their names in the checkpoint.
            version: the policy version of every token sampled from here on.
            partial: not possible here, since a server reads whole checkpoints.

        Raises WeightsNotUpdated or EngineMismatch.
        """
        if partial:
            raise ValueError("SGLang takes the whole model's weights, not some of them")
        own = weights if isinstance(weights, WeightStream) else as_saved(self.model, stream_of(weights))
        folder = self._outbox / f"version-{version}"
        export_model(self.model, own, folder)
        self._version = version
        for url in self._urls:
            update_from_disk(url, folder, version)
        self._compare()
        shutil.rmtree(folder)

    def prove(self) -> None:
        """Compare what servers sample with what the model says, where that was never done. Raises EngineMismatch."""
        if not self._proven:
            self._compare()

    def _compare(self) -> None:
        if self.score is None or self._version is None:
            return
        for url in self._urls:
            if not _is_paused(url):
                prove(
                    self.score,
                    self._vocabulary,
                    lambda prompt, n, url=url: _sample(url, prompt, n),  # type: ignore[misc]
                    engine=f"SGLang at {url}",
                    version=self._version,
                    tolerance=self._tolerance,
                )
                self._proven = True

    def check(self) -> None:
        """Nothing: the gateway watches servers that are not ours."""

    def close(self) -> None:
        """Remove what was on its way."""
        shutil.rmtree(self._outbox, ignore_errors=True)


class ScorerUnreached(ScoresRefused):
    """The server does not answer."""


class Scorer:
    """What the model of the SGLang server at `url` says of rows that others sampled."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=_SCORE_SECONDS)
        self._pool = urllib3.PoolManager(maxsize=_SCORED_AT_ONCE, retries=False, timeout=timeout)

    def is_there(self) -> bool:
        """Whether an SGLang server answers at `url`; others do not know what is asked."""
        try:
            return self._pool.request("GET", self.url + "/model_info", timeout=_CONNECT_SECONDS).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def score(self, token_ids: list[int], top: int) -> list[dict[str, Any]]:
        """For each of these tokens what the model gives for its place at temperature 1: by token id the log probability
        and the rank, of the `top` most likely ones and of the token (behind them, where it is none of them). Nothing is
        known of the first. Raises ScoresRefused, ScorerUnreached where nobody answers.
        """
        body: dict[str, Any] = {"input_ids": token_ids, "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
        body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top}
        meta = self._ask("/generate", body).get("meta_info") or {}
        of_tokens = meta.get("input_token_logprobs") or []
        likely = meta.get("input_top_logprobs") or [[]] * len(of_tokens)
        by_place: list[dict[str, Any]] = []
        for (own, token, _), ranked in zip(of_tokens, likely, strict=False):  # of fewer the caller says it
            entries = {str(each): {"logprob": value, "rank": n} for n, (value, each, _) in enumerate(ranked or (), 1)}
            by_place.append({str(token): {"logprob": own, "rank": top + 1}} | entries)
        return by_place

    def tokenize(self, text: str) -> list[int]:
        """The token ids that the server writes a text with. Raises ScoresRefused."""
        token_ids: list[int] = self._ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return token_ids

    def _ask(self, path: str, body: Any) -> dict[str, Any]:
        try:
            answer = self._pool.request("POST", self.url + path, json=body)
        except urllib3.exceptions.HTTPError as error:
            raise ScorerUnreached(f"SGLang at {self.url}{path} does not answer: {error}") from error
        if answer.status != 200:
            text = answer.data[:500].decode(errors="replace")
            raise ScoresRefused(f"SGLang at {self.url}: POST {path} answered {answer.status}: {text}", answer.status)
        try:
            return msgspec.json.decode(answer.data, type=dict)
        except msgspec.DecodeError as error:  # of a proxy before it
            text = answer.data[:200].decode(errors="replace")
            raise ScorerUnreached(f"SGLang at {self.url}{path} answers with no JSON object: {text}") from error


def update_from_disk(url: str, folder: Path, version: int, *, seconds: float = 600.0) -> None:
    """Let the SGLang server at `url` load the checkpoint in `folder` and call it `version`; its caches are flushed.

    `folder` is a path on the server's machine, with the layout of a Hugging Face checkpoint. A server that was not
    paused ends its requests first. Raises WeightsNotUpdated.
    """
    url = url.rstrip("/")
    body = {
        "model_path": str(folder),
        "weight_version": str(version),
        "flush_cache": True,
        "abort_all_requests": False,
    }
    answer = _ask("POST", url, _PATH, seconds, body)
    reply = _reply_of(answer.data)
    if answer.status != 200 or reply is None or not reply.success:
        message = reply.message if reply else answer.data[:500].decode(errors="replace")
        raise WeightsNotUpdated(
            f"SGLang server {url} did not take version {version} from {folder} ({answer.status}): {message}"
        )


def _reply_of(body: bytes) -> _SglangReply | None:
    try:
        return msgspec.json.decode(body, type=_SglangReply)
    except msgspec.DecodeError:
        return None


def _ask(method: str, url: str, path: str, seconds: float, body: Any = None) -> urllib3.BaseHTTPResponse:
    timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=seconds)
    try:
        return urllib3.request(method, url + path, json=body, timeout=timeout, retries=False)
    except urllib3.exceptions.HTTPError as error:
        raise WeightsNotUpdated(f"SGLang server {url} gave no answer to {path}: {error}") from error


def _is_paused(url: str) -> bool:
    return _ask("GET", url, "/ready", _CONNECT_SECONDS).status == 503


def _sample(url: str, prompt: list[int], n: int) -> SampledTokens:
    """Some tokens behind a prompt, whatever they are."""
    parameters = {"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
    answer = _ask("POST", url, "/generate", _SAMPLE_SECONDS, body)
    if answer.status != 200:
        raise WeightsNotUpdated(f"SGLang server {url} does not sample after the update: {answer.data[:500]!r}")
    reply = answer.json()
    return SampledTokens(reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
