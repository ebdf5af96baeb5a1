"""A model from disk that SGLang servers sample: they run already, and read weights from a folder that both sides see.

The place of an update is after the gateway's pause and before its resume: that pause retracts the requests, so that the
cache of the old weights can be flushed while they wait. What was sampled keeps its version, what comes next has the new
one. Invariants as with vLLM: after an update a server's log probabilities are compared with the model's, and a server
that was started anew takes calls only when it has the present weights. A `Scorer` asks a teacher's server what its
model says of rows.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial as bind
from pathlib import Path
from typing import Any

import msgspec
import urllib3
from torch import Tensor, nn

from lightning_rl.errors import Explained
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.servers.errors import ServerRefused, Unreached, WeightsRefused
from lightning_rl.inference.servers.replicas import Member, Replicas
from lightning_rl.inference.weights.check import FLOAT32, LogProbs, SampledTokens, Tolerance, log_probs_of, prove
from lightning_rl.inference.weights.stream import WeightStream, as_saved, export_model, stream_of

_AWAY = (502, 503, 504)  # of a proxy before it, or of a server that starts
_READY = "/ready"  # answered with 503 while it is paused, too
_CONNECT_SECONDS = 10.0
_WORD_SECONDS = 30.0  # for what it only has to say
_SAMPLE_SECONDS = 60.0
_UPDATE_SECONDS = 600.0  # a large model is read from a slow disk
_SCORE_SECONDS = 600.0
_SCORED_AT_ONCE = 16
_log = logging.getLogger(__name__)


class ScoresRefused(Explained, RuntimeError):
    """The server gave no log probabilities of a row; `status` is that of its HTTP answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _SglangReply(msgspec.Struct):
    success: bool
    message: str = ""


class _Control:
    """The SGLang server at `url`."""

    engine = "SGLang"

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._pool = urllib3.PoolManager(retries=False)

    def update(self, folder: Path, version: int, *, abort: bool = False, seconds: float = _UPDATE_SECONDS) -> None:
        """Load the checkpoint in `folder` under the name of `version`, and flush all caches. What is under way ends
        before, unless it is paused; with `abort` at once. Raises WeightsRefused or Unreached."""
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": abort,
        }
        status, data = self._ask("POST", "/update_weights_from_disk", seconds, body)
        reply = _reply_of(data)
        if status != 200 or reply is None or not reply.success:
            message = reply.message if reply else data[:500].decode(errors="replace")
            raise WeightsRefused(
                f"SGLang server {self.url} did not take version {version} from {folder} ({status}): {message}"
            )

    def weight_version(self) -> str:
        """The label of its weights, `default` where it was given none. Raises ServerRefused and Unreached."""
        return str(self._told("GET", "/model_info", _WORD_SECONDS)["weight_version"])

    def paused(self) -> bool:
        """Whether it samples nothing until it goes on. Raises Unreached."""
        return self._ask("GET", _READY, _CONNECT_SECONDS)[0] == 503

    def sample(self, prompt: list[int], n: int) -> SampledTokens:
        """`n` tokens behind a prompt at temperature 1, whatever they are. Raises ServerRefused and Unreached."""
        parameters = {"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
        reply = self._told("POST", "/generate", _SAMPLE_SECONDS, body)
        return SampledTokens(reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])

    def close(self) -> None:
        """Free its connections."""
        self._pool.clear()

    def _told(self, method: str, path: str, seconds: float, body: Any = None) -> dict[str, Any]:
        status, data = self._ask(method, path, seconds, body)
        if status != 200:
            raise ServerRefused(f"SGLang at {self.url}: {method} {path} answered {status}: {data[:500]!r}", status)
        try:
            return msgspec.json.decode(data, type=dict)
        except msgspec.DecodeError as error:  # of a proxy before it
            raise Unreached(f"SGLang at {self.url}{path} answers with no JSON object: {data[:200]!r}") from error

    def _ask(self, method: str, path: str, seconds: float, body: Any = None) -> tuple[int, bytes]:
        timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=seconds)
        try:
            answer = self._pool.request(method, self.url + path, json=body, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            raise Unreached(f"SGLang at {self.url}{path} does not answer: {error}") from error
        if answer.status in _AWAY and path != _READY:
            raise Unreached(f"SGLang at {self.url}{path} does not answer: HTTP status {answer.status}")
        return answer.status, answer.data


class SGLangPolicy:
    """The model of `source`, sampled by the SGLang servers at `urls`.

    Args:
        source: of `model`; servers get its weights in its format, and whole where they are in 4 bits here.
        run_dir: where the weights on their way to the servers are, which must be able to read them there.
        tolerance: how far log probabilities of server and model may be apart.

    `name` is what the gateway calls it, `folder` holds its tokenizer, `model` is the one that is trained. `score` is
    what the model says of tokens, by which servers are judged; None: nobody can say yet. `on_outage` is called, from
    another thread, with True when no server is left that could answer, and with False when one is back.
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
        self.on_outage: Callable[[bool], None] = lambda away: None
        self.replicas = Replicas([Member(_Control(url)) for url in urls])
        self.replicas.policies.append(self)
        self._outbox = (run_dir / "weights").resolve()
        self._tolerance = tolerance

    def start(self) -> None:
        """Watch the servers, which run already. Whoever calls this calls `close`, whatever comes between."""
        shutil.rmtree(self._outbox, ignore_errors=True)
        self.replicas.start()

    def registrations(self) -> list[dict[str, Any]]:
        """What the gateway is told of the servers."""
        return [
            {"model": self.name, "kind": "sglang", "url": member.control.url, "policy_version": 0}
            for member in self.replicas.members
        ]

    def update_weights(
        self, weights: nn.Module | Mapping[str, Tensor] | WeightStream, version: int, *, partial: bool = False
    ) -> None:
        """Give every server new weights; returns when all that answer sample with them. Calls should wait meanwhile.

        Args:
            weights: the model, its whole state dict, or a stream of all under their names in the checkpoint.
            version: the policy version of every token sampled from here on.
            partial: not possible here, since a server reads whole checkpoints.

        A server that is away is given them when it is back; the first time all must be there.

        Raises WeightsRefused, Unreached or EngineMismatch.
        """
        if partial:
            raise ValueError("SGLang takes the whole model's weights, not some of them")
        own = weights if isinstance(weights, WeightStream) else as_saved(self.model, stream_of(weights))
        with self.replicas.lock:
            first, former = self._version is None, self._version
            export_model(self.model, own, self._folder_of(version))
            self._version = version
            self.replicas.order_all(lambda control: control.update(self._folder_of(version), version), _tell_nothing)
            if former not in (None, version):
                shutil.rmtree(self._folder_of(former))
        self.replicas.updated(first=first)
        self._compare()

    def prove(self) -> None:
        """Compare what servers sample with what the model says, where that was never done. Raises EngineMismatch."""
        if not self._proven:
            self._compare()

    def _compare(self) -> None:
        if self.score is None or self._version is None:
            return
        for member in self.replicas.members:
            if not member.away:
                self._prove(member, self.score, self._version)

    def _prove(self, member: Member[_Control], score: LogProbs, version: int) -> None:
        """Compare a server's log probabilities with the model's, unless it is paused. It may have ended."""
        control = member.control
        try:
            if not control.paused() and self.has_weights(control):
                prove(
                    score,
                    self._vocabulary,
                    control.sample,
                    engine=str(member),
                    version=version,
                    tolerance=self._tolerance,
                )
                self._proven = True
        except (Unreached, ServerRefused) as error:  # it is the watcher's
            _log.warning("%s: what it samples is not compared with the model this time", error)

    def has_weights(self, control: _Control) -> bool:
        """See `SampledPolicy`."""
        return control.weight_version() == str(self._version) or self._version is None

    def renew(self, control: _Control) -> bool:
        """See `SampledPolicy`."""
        if self._version is not None:
            control.update(self._folder_of(self._version), self._version, abort=True)
        return True

    def tell_outage(self, away: bool) -> None:
        """See `SampledPolicy`."""
        self.on_outage(away)

    def check(self) -> None:
        """Raise that all servers have been away for long, when they have."""
        self.replicas.check()

    def close(self) -> None:
        """Watch no longer, and remove what was on its way."""
        self.replicas.close()
        shutil.rmtree(self._outbox, ignore_errors=True)

    def _folder_of(self, version: int) -> Path:
        return self._outbox / f"version-{version}"


def _tell_nothing(_: _Control) -> None:
    """A server is told all of an update at once."""


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


def update_from_disk(url: str, folder: Path, version: int, *, seconds: float = _UPDATE_SECONDS) -> None:
    """Let the SGLang server at `url` load the checkpoint in `folder` and call it `version`; its caches are flushed.

    `folder` is a path on the server's machine, with the layout of a Hugging Face checkpoint. A server that was not
    paused ends its requests first. Raises WeightsRefused, and Unreached where it does not answer.
    """
    _Control(url).update(folder, version, seconds=seconds)


def _reply_of(body: bytes) -> _SglangReply | None:
    try:
        return msgspec.json.decode(body, type=_SglangReply)
    except msgspec.DecodeError:
        return None
