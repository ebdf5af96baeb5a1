"""What an engine server's tokens are marked with: who sampled them, and logprobs that say what they should.

Pure, and the same for vLLM and SGLang. A mark is never guessed: what a server does not say is what was registered.
"""

from collections.abc import Sequence

import msgspec

from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.sampling import Sampling

_NO_LOGPROB = -9999.0  # which vLLM says where it has none; in SGLang, what lies below is a probability of 0


class Labelled(msgspec.Struct):
    """Which tokens of an answer were sampled under a label, as both vLLM and SGLang tell it."""

    version: str | int | None
    start: int
    end: int


class Labels:
    """The policy versions behind a server's labels.

    What has no label that is a number is believed to be of the version that the server was registered with.
    """

    def __init__(self, version: int) -> None:
        self._registered = version
        self.current = version  # what the server labels its tokens with from now on

    def ranges(self, labelled: Sequence[Labelled] | None, version: int, sampled: int) -> list[VersionRange]:
        """Who sampled which of the `sampled` tokens; `version` is believed of a server that does not say."""
        if labelled:
            return [VersionRange(self.number(v.version), v.start, v.end) for v in labelled if v.end > v.start]
        return [VersionRange(version, 0, sampled)] if sampled else []

    def fingerprint_of(self, label: str | int | None) -> int:
        """The version behind the label that the server says it has: not the one told, if it was started anew."""
        self.current = self.number(label)
        return self.current

    def number(self, label: str | int | None) -> int:
        """The version that a label says."""
        text = str(label).removeprefix("v")
        return int(text) if text.isdecimal() else self._registered


def known(logprobs: Sequence[float | None]) -> list[float] | None:
    """The logprobs, unless one of them stands for there being none."""
    values = [logprob for logprob in logprobs if logprob is not None and logprob > _NO_LOGPROB]
    return values if len(values) == len(logprobs) else None


def is_biased(sampling: Sampling) -> bool:
    """Whether penalties, a bias, a least length or a grammar change the logits, before any temperature."""
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty not in (None, 1)
        or sampling.logit_bias
        or sampling.constrained
        or sampling.min_tokens
        or sampling.bad_words
        or sampling.allowed_token_ids
    )
