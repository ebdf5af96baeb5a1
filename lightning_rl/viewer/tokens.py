"""The tokens of one call in columns, each with its text and what sampler and trainer said of it.

Pure. Columns, not records: a page colours thousands of tokens, and a list of numbers is a tenth of as many objects.
A token whose bytes are no whole character has the text of its run on the first, and none on the others.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lightning_rl.inspect.call import CallDetail, trainer_logprobs
from lightning_rl.trajectories.step_record import CallRecord
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.span import unpack_logprobs

Decode = Callable[[list[int]], str]
PROMPT_TOKENS = 2048  # of a prompt that are shown, its last ones
SAMPLED_TOKENS = 4096  # of an answer that are shown at once
_BEFORE = 3  # tokens that a token's text is read behind: some tokenizers drop a text's first space
_BROKEN = "\ufffd"
_LONGEST_RUN = 8  # tokens of one character


def texts(ids: Sequence[int], decode: Decode | None) -> list[str | None]:
    """The text of each token; None for all where no tokenizer is at hand."""
    if decode is None:
        return [None] * len(ids)
    pieces: list[str | None] = []
    place = 0
    while place < len(ids):
        context = list(ids[max(place - _BEFORE, 0) : place])
        before = decode(context) if context else ""
        for length in range(1, _LONGEST_RUN + 1):
            after = decode([*context, *ids[place : place + length]])
            text = after[len(before) :] if after.startswith(before) else decode(list(ids[place : place + length]))
            if not text.endswith(_BROKEN) or place + length >= len(ids):
                break
        else:
            length, text = 1, _BROKEN
        pieces += [text, *([""] * (length - 1))]
        place += length
    return pieces[: len(ids)]


def columns(
    call: Call, view: CallDetail, record: CallRecord | None, decode: Decode | None, start: int = 0
) -> dict[str, Any]:
    """The call's tokens from `start` on, with the end of what its prompt adds."""
    tokens = view.tokens[start : start + SAMPLED_TOKENS]
    trainers = trainer_logprobs(record, len(call.response_ids))
    prompt = call.prompt_ids[-PROMPT_TOKENS:] if start == 0 else []
    text = texts([*prompt, *(token.token_id for token in tokens)], decode)
    sampled: dict[str, Any] = {
        "id": [token.token_id for token in tokens],
        "text": text[len(prompt) :],
        "mask": [int(token.trained) for token in tokens],
        "version": [token.policy_version for token in tokens],
        "logprob": _rounded(token.logprob for token in tokens),
        "trainer": _rounded(trainers.get(token.place) for token in tokens),
        "advantage": _rounded(_advantages(view, record)[start : start + SAMPLED_TOKENS]),
    }
    entropies = {} if record is None else _placed(record, record.entropies, len(call.response_ids))
    if entropies:
        sampled["entropy"] = _rounded(entropies.get(token.place) for token in tokens)
    return {
        "start": start,
        "total": len(view.tokens),
        "prompt": {"id": prompt, "text": text[: len(prompt)], "total": len(call.prompt_ids)},
        "sampled": sampled,
    }


def _advantages(view: CallDetail, record: CallRecord | None) -> list[float | None]:
    """Of each sampled token, None where it is not trained."""
    if record is None:
        return [None] * len(view.tokens)
    of_tokens = _placed(record, record.advantages, len(view.tokens))
    return [of_tokens.get(token.place, record.advantage) if token.trained else None for token in view.tokens]


def _placed(record: CallRecord, packed: bytes, sampled: int) -> dict[int, float]:
    """Numbers of a call's trained tokens by their places in the answer."""
    if not packed:
        return {}
    places = range(sampled) if record.kept is None else record.kept
    return dict(zip(places, unpack_logprobs(packed), strict=True))


def _rounded(values: Any) -> list[float | None]:
    return [None if value is None or value != value else float(f"{value:.5g}") for value in values]
