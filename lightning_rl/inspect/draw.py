"""An explained rollout as text: trees of calls, forks, rows. Pure; what is in brackets is what is trained."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from lightning_rl.inspect.explain import AttemptView, CallView, Fork, RolloutView, RowView
from lightning_rl.inspect.recorded import RunForks
from lightning_rl_adapters.rows import Row

_SAID = 48  # characters of what was asked, and of what was answered
_TASK = 200
_WHY = {
    "superseded": "does not count, superseded by a later attempt",
    "infrastructure": "does not count, the infrastructure failed",
    "cancelled": "does not count, cancelled",
    "open": "still open, nothing of it is trained",
    "validation": "counts, and is not trained: validation",
}


def rollout(view: RolloutView) -> list[str]:
    """The whole rollout as lines."""
    reward = "no reward" if view.reward is None else f"reward {view.reward:g}"
    lines = [
        f"rollout {view.rollout_id}: {view.status}, {view.mode}, {reward}",
        f"  task  {first_words(json.dumps(view.task, ensure_ascii=False), _TASK)}",
    ]
    if view.error is not None:
        lines.append(f"  error  {first_words(view.error, _TASK)}")
    for each in view.attempts:
        lines += ["", *(f"  {line}".rstrip() for line in attempt(each))]
    return lines


def attempt(view: AttemptView) -> Iterator[str]:
    """An attempt as lines: whether it counts, its trees, forks and rows."""
    why = "counts" if view.excluded is None else _WHY.get(view.excluded, view.excluded)
    yield f"attempt {view.sequence} ({view.attempt_id}), {view.status}: {why}"
    if view.error is not None:
        yield f"  error  {first_words(view.error, _TASK)}"
    yield from (f"  {line}" for line in trees(view.calls))
    for title, lines in (("forks", forks(view.forks)), ("rows", _rows(view.rows))):
        told = [f"    {line}" for line in lines]
        yield f"  {title}  {'' if told else 'none'}"
        yield from told


def run(found: RunForks) -> list[str]:
    """The forks of a run as lines."""
    lines = [f"{found.run_dir}: {found.rollouts} rollouts, {found.calls} calls"]
    lines += [f"  {count:>7}  calls began anew: {cause}" for cause, count in found.causes.items()]
    lines.append(f"  {found.branches:>7}  calls continue one that an earlier call continues too (branches)")
    if found.most:
        lines += ["", "rollouts with most (lightning-rl explain ROLLOUT):"]
    for rollout_id, counts in found.most.items():
        lines.append(f"  {rollout_id}  {', '.join(f'{what} {n}' for what, n in counts.items())}")
    return lines


def trees(calls: Sequence[CallView]) -> Iterator[str]:
    """The calls as trees: a conversation goes straight down, and steps in where it forks."""
    following: defaultdict[int | None, list[CallView]] = defaultdict(list)
    for call in calls:
        following[call.continues].append(call)
    for number, root in enumerate(following[None], start=1):
        yield f"tree {number}, model {root.model}"
        stack = [(root, "  ", "  ")]
        while stack:
            call, head, lead = stack.pop()
            yield head + _call(call)
            after = following[call.number]
            if len(after) == 1:
                stack.append((after[0], lead, lead))
            elif after:
                stack.append((after[-1], f"{lead}└─ ", f"{lead}   "))
                stack += [(branch, f"{lead}├─ ", f"{lead}│  ") for branch in after[-2::-1]]


def forks(found: Sequence[Fork]) -> Iterator[str]:
    """One line for each fork: which calls, and why."""
    for fork in found:
        if fork.cause is not None:
            yield f"call {fork.calls[0]} begins anew: {fork.cause}{_at(fork)}"
        else:
            what = "samples of one prompt" if fork.same_prompt else "different ways on"
            yield f"calls {_listed(fork.calls)} continue call {fork.after}: {len(fork.calls)} {what}"


def row(view: RowView) -> str:
    """A row's length and fate in one line."""
    left_out = f", left out: {view.excluded}" if view.excluded else ""
    exact = json.dumps(view.exact)
    return f"row {view.number}: {view.tokens} tokens, {view.trained} to be trained, exact: {exact}{left_out}"


def row_calls(view: RowView) -> str:
    """The calls that a row holds, those that it trains in brackets; a call left out for itself with its reason."""
    told = {"trained": "[{}]", "context": "{}", view.excluded: "{}"}
    return " ".join(told.get(call.part, f"{{}} ({call.part})").format(call.number) for call in view.calls)


def row_words(cut: Row, decode: Callable[[list[int]], str]) -> Iterator[tuple[str, bool]]:
    """The row's text in pieces, and whether each is trained: then it is in brackets."""
    start = 0
    while start < len(cut.token_ids):
        mask, end = cut.loss_mask[start], start
        while end < len(cut.token_ids) and cut.loss_mask[end] == mask:
            end += 1
        piece = decode(cut.token_ids[start:end]).replace("\n", "\\n")
        yield (f"[{piece}]" if mask else piece), bool(mask)
        start = end


def first_words(text: str, limit: int) -> str:
    """The text on one line, cut to `limit` characters."""
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _rows(views: Sequence[RowView]) -> Iterator[str]:
    for view in views:
        yield row(view)
        yield f"  calls {row_calls(view)}"


def _call(call: CallView) -> str:
    agent = f" ({call.agent})" if call.agent else ""
    versions = f"version {_listed(call.policy_versions)}" if call.policy_versions else "version unknown"
    facts = [f"+{call.prompt_tokens} prompt", f"{call.sampled_tokens} sampled", call.finish_reason, versions]
    answered = first_words(call.answered, _SAID)
    said = f"{first_words(call.asked, _SAID)} → {f'[{answered}]' if call.trained else answered}"
    return f"call {call.number}{agent}: {', '.join([*facts, *call.marks])} | {said}"


def _at(fork: Fork) -> str:
    if not fork.at:
        return ""
    return ", at " + ", ".join(f"{name} {value}" for name, value in fork.at.items() if value is not None)


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
