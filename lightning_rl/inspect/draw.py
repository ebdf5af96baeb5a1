"""An explained rollout or call as text: trees of calls, forks, rows, tokens. Pure; in brackets is what is trained."""

import json
import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_rl.inspect.call import CallDetail, TokenView
from lightning_rl.inspect.doctor import SEVERITIES, Diagnosis, Finding
from lightning_rl.inspect.explain import AttemptView, CallView, ExplainedFork, RolloutView, RowView, words_of
from lightning_rl.inspect.recorded import RunForks
from lightning_rl.inspect.trained import CallTraining, RolloutTraining
from lightning_rl.store.contract import Log
from lightning_rl.trajectories.step_record import PlusRecord
from lightning_rl_adapters.credit import is_prompt, is_state
from lightning_rl_adapters.rows import Row

_SAID = 48  # characters of what was asked, and of what was answered
_TASK = 200
_MESSAGE = 2000
_LOG_LINES = 12
_ENDS = 16  # tokens of a long call at its beginning, and at its end
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
    if view.run_dir is not None:
        lines.insert(1, f"  run  {view.run_dir}")
    if view.error is not None:
        lines.append(f"  error  {first_words(view.error, _TASK)}")
    if view.training is not None:
        lines.append(f"  {rollout_training(view.training)}")
    if view.not_recorded is not None:
        lines.append(f"  not told what training made of it: {view.not_recorded}")
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
        indented = [f"    {line}" for line in lines]
        yield f"  {title}  {'' if indented else 'none'}"
        yield from indented
    yield from _rewritten(view)
    yield from _log(view.log)


def _rewritten(view: AttemptView) -> Iterator[str]:
    """What it costs where an agent writes its history anew for every call."""
    tokens = [call.prompt_tokens + call.sampled_tokens for call in view.calls]
    if len(tokens) > 2 and sum(fork.cause is not None for fork in view.forks) == len(tokens) - 1:
        times = sum(tokens) / max(*tokens, 1)
        yield f"  every call begins anew: {len(tokens)} rows with {times:.1f} times the tokens of the longest"


def _log(log: Log) -> Iterator[str]:
    """The last lines of what an attempt printed, and of its traceback."""
    for name in ("stdout", "stderr", "traceback"):
        lines = str(getattr(log, name)).rstrip().splitlines()
        if lines:
            shown = lines[-_LOG_LINES:]
            cut = f"  the last {_LOG_LINES} of {len(lines)} lines" if len(shown) < len(lines) else ""
            yield f"  {name}{cut}"
            yield from (f"    {line}" for line in shown)


def run(run_forks: RunForks) -> list[str]:
    """The forks of a run as lines."""
    lines = [f"{run_forks.run_dir}: {run_forks.rollouts} rollouts, {run_forks.calls} calls"]
    lines += [f"  {count:>7}  calls began anew: {cause}" for cause, count in run_forks.causes.items()]
    lines.append(f"  {run_forks.branches:>7}  calls continue one that an earlier call continues too (branches)")
    if run_forks.most:
        lines += ["", f"rollouts with most (lightning-rl explain ROLLOUT --run-dir {shlex.quote(run_forks.run_dir)}):"]
    for rollout_id, counts in run_forks.most.items():
        lines.append(f"  {rollout_id}  {', '.join(f'{kind} {n}' for kind, n in counts.items())}")
    return lines


def diagnosis(result: Diagnosis) -> list[str]:
    """What keeps a run from learning as lines, worst first, then the numbers that were looked at."""
    lines = [result.run_dir]
    if not result.findings:
        lines += ["", "nothing was found that keeps this run from learning"]
    for severity in SEVERITIES:
        of_it = [finding for finding in result.findings if finding.severity == severity]
        lines += ["", f"{severity}:"] if of_it else []
        for finding in of_it:
            lines += _finding(finding, result.run_dir)
    return [*lines, "", "looked at:", *map(_looked_at, result.looked_at.items())]


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
            if call.training is not None:
                yield f"{lead}{'│' if len(after) > 1 else ' '}    {call_training(call.training)}"
            if len(after) == 1:
                stack.append((after[0], lead, lead))
            elif after:
                stack.append((after[-1], f"{lead}└─ ", f"{lead}   "))
                stack += [(branch, f"{lead}├─ ", f"{lead}│  ") for branch in after[-2::-1]]


def forks(explained: Sequence[ExplainedFork]) -> Iterator[str]:
    """One line for each fork: which calls, and why."""
    for fork in explained:
        if fork.cause is not None:
            yield f"call {fork.calls[0]} begins anew: {fork.cause}{_at(fork)}"
        else:
            kind = "samples of one prompt" if fork.same_prompt else "different ways on"
            yield f"calls {_listed(fork.calls)} continue call {fork.after}: {len(fork.calls)} {kind}"


def row(view: RowView) -> str:
    """A row's length and fate in one line."""
    left_out = f", left out: {view.excluded}" if view.excluded else ""
    exact = json.dumps(view.exact)
    return f"row {view.number}: {view.tokens} tokens, {view.trained} to be trained, exact: {exact}{left_out}"


def row_calls(view: RowView) -> str:
    """The calls that a row holds, those that it trains in brackets; a call left out for itself with its reason."""
    templates = {"trained": "[{}]", "context": "{}", view.excluded: "{}"}
    return " ".join(templates.get(call.part, f"{{}} ({call.part})").format(call.number) for call in view.calls)


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


def rollout_training(training: RolloutTraining) -> str:
    """The step that a rollout was trained in, in one line."""
    reward = "took no part in its group" if training.reward is None else f"counted with reward {_n(training.reward)}"
    if training.overlong_penalty:
        reward += f" ({_n(training.overlong_penalty)} of it for its length)"
    if training.kl_penalty:
        reward += f" ({_n(training.kl_penalty)} of it for its distance from the reference)"
    failed = ", its agent failed" if training.agent_failed else ""
    left_out = f"; left out: {training.left_out}" if training.left_out else ""
    return (
        f"step {training.step}  updated version {training.policy_version}; {reward} in group {training.group_id}"
        f"{failed}{left_out}"
    )


def call_training(training: CallTraining) -> str:
    """Which reward reached a call by which rule, and what became of it, in one line."""
    facts = ["no credit"] if training.credit is None else [_credit(training.credit, training)]
    if training.plus is not None:
        facts.append(f"and {_credit(training.plus.credit, training.plus)}")
    facts.append(f"advantage {_n(training.advantage)} by {training.estimator}")
    if training.left_out is not None:
        facts.append(f"not trained: {training.left_out}")
    else:
        facts.append(f"weight {_n(training.weight)} in mini-batch {training.mini_batch}")
        facts.append(f"{training.trained_tokens} tokens trained")
    return f"rule {training.rule}: {', '.join(facts)}"


def _credit(credit: float, part: CallTraining | PlusRecord) -> str:
    """A credit, and what it is compared with."""
    if part.compared_with is None:
        return f"credit {_n(credit)}, relative already"
    others = part.compared_with
    if is_state(others):
        others = "calls with the same prompt"
    elif is_prompt(others):
        others = "rollouts with the same prompt"
    if math.isinf(part.scale):
        return f"credit {_n(credit)}, nobody in {others} to compare with"
    return f"credit {_n(credit)}, compared with {others}, baseline {_n(part.baseline)}, scale {_n(part.scale)}"


def call(view: CallDetail, *, whole: bool = False) -> list[str]:
    """A call in full as lines; a long one is cut in the middle unless `whole`."""
    lines = [f"call {view.number} ({view.call_id}) of rollout {view.rollout_id}, {_counts(view)}"]
    lines += [f"  {name:<13}{value}" for name, value in _facts(view)]
    for title, messages in (("adds", view.messages), ("answers", view.answer)):
        for message in messages:
            text = words_of(message)
            text = text if whole else first_words(text, _MESSAGE)
            lines.append(f"  {title:<13}{message.get('role', '?')}: {text}".replace("\n", "\\n"))
    return [*lines, "", *(f"  {line}".rstrip() for line in tokens(view, whole=whole))]


def tokens(view: CallDetail, *, whole: bool = False) -> Iterator[str]:
    """The tokens of a call as a table."""
    if not view.tokens:
        yield "no tokens are known of it" if "inexact" in view.marks else "it has no tokens"
        return
    now = view.checkpoint is not None
    names = ["sampler", "trainer", "difference", *(["now"] if now else [])]
    columns = " ".join(f"{name:>10}" for name in names)
    yield f"{'token':>6} {'id':>7} {'trained':>8} {'version':>7} {columns}  text"
    cut = not whole and len(view.tokens) > 2 * _ENDS + 1
    for token in view.tokens[:_ENDS] if cut else view.tokens:
        yield _token(token, now=now)
    if cut:
        yield f"   ... {len(view.tokens) - 2 * _ENDS} more, all of them with --all"
        for token in view.tokens[-_ENDS:]:
            yield _token(token, now=now)


def token(view: CallDetail) -> list[str]:
    """The one token that a call's view was narrowed to, in words."""
    [one] = view.tokens
    text = "" if one.text is None else f", {json.dumps(one.text, ensure_ascii=False)}"
    version = "unknown weights" if one.policy_version is None else f"policy version {one.policy_version}"
    lines = [
        f"token {one.place} of call {view.number} ({view.call_id}), rollout {view.rollout_id}: id {one.token_id}{text}",
        f"  sampled by {view.model} under {version} at temperature {_n(view.temperature)}: {_chance(one.logprob)}",
    ]
    if view.run_dir is not None:
        lines.insert(1, f"  run  {view.run_dir}")
    if view.logprob_kind != "sampled":
        lines.append(f"  that logprob is {view.logprob_kind}: of temperature 1, not what it was sampled with")
    if one.trainer_logprob is not None and view.sampler_is_old:
        lines.append("  training took the sampler's logprob for its own (algorithm.rollout_correction.bypass_mode)")
    elif one.trainer_logprob is not None:
        apart = "" if one.difference is None else f", {one.difference:+.2g} from the sampler's"
        lines.append(f"  the trainer gave it before the update: {_chance(one.trainer_logprob)}{apart}")
    lines.append(f"  {_fate(view, one)}")
    if one.now_logprob is not None:
        lines.append(f"  {view.checkpoint} gives it now: {_chance(one.now_logprob)}{_since(one)}")
    return lines


def first_words(text: str, limit: int) -> str:
    """The text on one line, cut to `limit` characters."""
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _looked_at(named: tuple[str, float]) -> str:
    name, number = named
    return f"  {f'{number:,.0f}' if number.is_integer() else _n(number):>10}  {name}"


def _finding(finding: Finding, run_dir: str) -> Iterator[str]:
    of = ""
    if finding.steps is not None:
        first, last = finding.steps
        of = f" (step {first})" if first == last else f" (steps {first} to {last})"
    policy = "" if finding.policy is None else f" of policy {finding.policy}"
    yield f"  {finding.name}{policy}: {finding.told}{of}"
    yield f"    do      {finding.advice}"
    if finding.rollout is not None:
        yield f"    see     lightning-rl explain {finding.rollout} --run-dir {shlex.quote(run_dir)}"


def _counts(view: CallDetail) -> str:
    why = "counts" if view.excluded is None else _WHY.get(view.excluded, view.excluded)
    return f"attempt {view.attempt}: {why}"


def _facts(view: CallDetail) -> Iterator[tuple[str, str]]:
    if view.run_dir is not None:
        yield "run", view.run_dir
    agent = f", agent {view.agent}" if view.agent else ""
    door = f", asked as {view.dialect}" if view.dialect else ""
    yield "sampled by", f"{view.model}{agent}{door}; temperature {_n(view.temperature)}"
    versions = [f"version {each.version} (tokens {each.start} to {each.end - 1})" for each in view.policy_versions]
    yield "weights", ", ".join(versions) or "version unknown"
    after = "" if view.continues is None else f"; it continues call {view.continues}"
    past = f", {view.overshoot} more past a stop text" if view.overshoot else ""
    yield "tokens", f"+{view.prompt_tokens} prompt, {view.sampled_tokens} sampled{past}, {view.finish_reason}{after}"
    for image in view.media:
        where = f"tokens {image.start} to {image.start + image.length - 1} of what its prompt adds"
        yield "image", f"sha256:{image.sha256}, {where}"
    if view.marks:
        yield "marks", ", ".join(view.marks)
    yield "requested", json.dumps(view.sampling_requested, ensure_ascii=False)
    yield "effective", json.dumps(view.sampling_effective, ensure_ascii=False)
    if view.ignored_fields:
        yield "ignored", ", ".join(view.ignored_fields)
    if view.logprob_kind != "sampled":
        yield "logprobs", f"{view.logprob_kind}: of temperature 1, not what its tokens were sampled with"
    yield "rewards", f"of the attempt {_named(view.rewards)}; of this call {_named(view.call_rewards)}"
    if view.rollout_training is not None:
        yield "training", rollout_training(view.rollout_training)
        text = "no call of the policy" if view.training is None else call_training(view.training)
        yield "", text
    if view.sampler_is_old:
        yield "", "the sampler's logprobs were taken for the trainer's (algorithm.rollout_correction.bypass_mode)"
    if view.not_recorded is not None:
        yield "training", f"not told: {view.not_recorded}"
    yield "rows", _in_rows(view)


def _in_rows(view: CallDetail) -> str:
    held = f"in row {_listed(view.rows)}"
    if view.trained_in is not None:
        return f"{held}, trained in row {view.trained_in}"
    return f"{held}, trained in none{f': {view.row_excluded}' if view.row_excluded else ''}"


def _token(one: TokenView, *, now: bool) -> str:
    version = "?" if one.policy_version is None else one.policy_version
    values = [_column(one.logprob), _column(one.trainer_logprob), _column(one.difference, "+.2g")]
    values += [_column(one.now_logprob)] if now else []
    text = "" if one.text is None else json.dumps(one.text, ensure_ascii=False)
    return f"{one.place:>6} {one.token_id:>7} {int(one.trained):>8} {version:>7} {' '.join(values)}  {text}".rstrip()


def _fate(view: CallDetail, one: TokenView) -> str:
    why = view.excluded or (view.training and view.training.left_out) or view.row_excluded
    if not one.trained:
        return f"it is not trained: {why or 'this token was left out of the row, or is context in all of them'}"
    where = "" if view.trained_in is None else f" in row {view.trained_in}"
    if view.training is None:
        return f"it is to be trained{where}; {view.not_recorded or 'the run is no training'}"
    advantage, weight = view.training.advantage, view.training.weight
    way = "made likelier" if advantage > 0 else "made less likely" if advantage < 0 else "pushed nowhere"
    return f"it is trained{where} with advantage {_n(advantage)} and weight {_n(weight)}: {way}"


def _since(one: TokenView) -> str:
    before = one.logprob if one.trainer_logprob is None else one.trainer_logprob
    if before is None or one.now_logprob is None:
        return ""
    return f", {math.exp(one.now_logprob - before):.3g} times what it was"


def _chance(logprob: float | None) -> str:
    return "no logprob" if logprob is None else f"logprob {logprob:.4f} (probability {math.exp(logprob):.3g})"


def _column(value: float | None, form: str = ".4f") -> str:
    return f"{'-' if value is None else format(value, form):>10}"


def _named(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_n(value)}" for name, value in values.items()) or "none"


def _n(value: float) -> str:
    return f"{value:.4g}"


def _rows(views: Sequence[RowView]) -> Iterator[str]:
    for view in views:
        yield row(view)
        yield f"  calls {row_calls(view)}"


def _call(call: CallView) -> str:
    agent = f" ({call.agent})" if call.agent else ""
    versions = f"version {_listed(call.policy_versions)}" if call.policy_versions else "version unknown"
    images = [f"{call.images} image{'s' if call.images > 1 else ''}"] if call.images else []
    facts = [f"+{call.prompt_tokens} prompt", *images, f"{call.sampled_tokens} sampled", call.finish_reason, versions]
    answered = first_words(call.answered, _SAID)
    exchange = f"{first_words(call.asked, _SAID)} → {f'[{answered}]' if call.trained else answered}"
    return f"call {call.number}{agent}: {', '.join([*facts, *call.marks])} | {exchange}"


def _at(fork: ExplainedFork) -> str:
    if not fork.at:
        return ""
    return ", at " + ", ".join(f"{name} {value}" for name, value in fork.at.items() if value is not None)


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
