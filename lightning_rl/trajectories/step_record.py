"""What a training step made of each call: credit, baseline, advantage, weight in the loss, or why it was left out.

One file a step in the run's folder (`steps/000012.msgpack`), whole or not there; `explain` and `doctor` read them. Of a
step that a resumed run does anew the former record is set aside (`steps/000012.former`): its update is lost.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from lightning_rl.errors import Explained
from lightning_rl.files import write_whole

FOLDER = "steps"
_FORMER = ".former"


class UnreadableRecord(Explained, ValueError):
    """A file that is no step's record, or no more; the message names it."""


class PlusRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The second part of a call's credit (`credit.Credit.plus`): advantage = (credit - baseline) / scale."""

    credit: float
    compared_with: str | None = None
    baseline: float = 0.0
    scale: float = 1.0
    advantage: float = 0.0


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the policy in its counting attempt.

    `credit` is what the rule gave it (None: nothing), `compared_with` whose mean the `baseline` is (`credit.Credit`);
    advantage = (credit - baseline) / scale, and where there is a `plus`, its advantage added. Under an estimator of
    tokens (`StepRecord.estimator`) these are means over the call's tokens, and the credit is the return from each on.
    `weight` is that of each of its trained tokens in the loss of `mini_batch` (from 0). `kept` are the places of its
    trained tokens among those it sampled, None for all of them; `old_log_probs` (float32 bytes,
    `span.unpack_logprobs`) are theirs as the trainer computed them before the update. `advantages`, packed in the same
    way, are theirs under an estimator of tokens, and `entropies` (nats) those of the distributions that they were
    sampled from, where the trainer computed them; empty otherwise. `left_out` is why none of it is trained.
    `cut_context`: its row's oldest tokens were cut off, so the trainer read less before it than the sampler had.
    """

    credit: float | None = None
    compared_with: str | None = None
    baseline: float = 0.0
    scale: float = 1.0
    advantage: float = 0.0
    weight: float = 0.0
    mini_batch: int | None = None
    trained_tokens: int = 0
    kept: list[int] | None = None
    old_log_probs: bytes = b""
    left_out: str | None = None
    plus: PlusRecord | None = None
    advantages: bytes = b""
    entropies: bytes = b""
    cut_context: bool = False


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of the step. `reward` is the one it counted with, None where it had none. `left_out` is why the whole
    rollout took no part: those that were rolled out and not trained are recorded, too. `alike`: the advantages of its
    group were all 0, before any whitening.
    `overlong_penalty` and `kl_penalty`, for the distance from the reference, are in it. `rewards` are those it was
    given, by name; `calls` are in order of arrival."""

    rollout_id: str
    group_id: str
    reward: float | None
    rewards: dict[str, float] = {}
    agent_failed: bool = False
    left_out: str | None = None
    alike: bool = False
    calls: dict[str, CallRecord] = {}
    overlong_penalty: float = 0.0
    kl_penalty: float = 0.0


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A training step. `rule` is the credit strategy's name, `estimator` that of what made advantages of credits,
    `policy_version` that of the weights that it updated."""

    step: int
    policy_version: int
    rule: str
    loss_agg_mode: str
    rollouts: list[RolloutRecord]
    estimator: str = "grpo"


_DECODER = msgspec.msgpack.Decoder(StepRecord)


def folders(policies: Collection[str]) -> dict[str, str]:
    """Where the records of each policy are below `FOLDER`: those of a run's first, and of its only one (""), have no
    folder of their own."""
    first, *others = policies or [""]
    return {first: "", **{name: name for name in others}}


def write(run_dir: Path, record: StepRecord, folder: str = "") -> Path:
    """Keep a step's record in the run's folder, in this one of `folders`; its file."""
    path = run_dir / FOLDER / folder / f"{record.step:06d}.msgpack"
    path.parent.mkdir(exist_ok=True, parents=True)
    write_whole(path, msgspec.msgpack.encode(record))
    return path


def read_all(
    run_dir: Path, *, newest: int = 0, until: int | None = None, policy: str | None = None
) -> Iterator[StepRecord]:
    """The records of a run, in order of their steps: those up to the step `until`, where there is one, and of these the
    `newest` alone, where it is not 0.

    Of several policies all calls are there, or those of one `policy` ("": the run's first). Raises UnreadableRecord.
    """
    folder = run_dir / FOLDER / (policy or "")
    paths = sorted(path for path in folder.glob("*.msgpack") if until is None or int(path.stem) <= until)
    for path in paths[-newest:]:
        yield whole(path) if policy is None else _read(path)


def set_aside(run_dir: Path, after: int) -> None:
    """The run goes on behind the step `after`: records of later steps are not what it has trained."""
    for path in (run_dir / FOLDER).glob("**/*.msgpack"):
        if int(path.stem) > after:
            path.rename(path.with_suffix(_FORMER))


def furthest(run_dir: Path) -> int:
    """The last step that was ever made in a run's folder, also before it went on from an earlier one; 0: none."""
    records = (path for path in (run_dir / FOLDER).glob("*") if path.suffix in (".msgpack", _FORMER))
    return max((int(path.stem) for path in records), default=0)


def find(run_dir: Path, rollout_id: str, step: int, *, ahead: bool = False) -> tuple[StepRecord, RolloutRecord] | None:
    """The record of the step that trained the rollout, and the rollout's there; None where there is none.

    It was asked for as one of `step`. With `ahead` another one may have trained it: the nearest are looked at first.
    Raises UnreadableRecord.
    """
    paths = [_path(run_dir, step)]
    if ahead:
        paths = sorted((run_dir / FOLDER).glob("*.msgpack"), key=lambda path: abs(int(path.stem) - step))
    for path in paths:
        if path.is_file():
            record = whole(path)
            for rollout in record.rollouts:
                if rollout.rollout_id == rollout_id:
                    return record, rollout
    return None


def files(run_dir: Path) -> list[tuple[Path, int]]:
    """The files of a run's records, in order of their steps, each with when a policy's record of that step was written
    last (ns)."""
    folder, newest = run_dir / FOLDER, dict[str, int]()
    file_times = [(file, file.stat().st_mtime_ns) for file in folder.glob("**/*.msgpack")]
    for file, written in file_times:
        newest[file.name] = max(written, newest.get(file.name, 0))
    return sorted((file, newest[file.name]) for file, _ in file_times if file.parent == folder)


def whole(path: Path) -> StepRecord:
    """The record in one of `files`, with the calls of all policies of its run; of the rest the run's first has the
    word. Raises UnreadableRecord."""
    record = _read(path)
    others = [_read(file) for file in sorted(path.parent.glob(f"*/{path.name}"))]
    if not others:
        return record
    calls = {rollout.rollout_id: dict(rollout.calls) for rollout in record.rollouts}
    for rollout in (each for other in others for each in other.rollouts):
        if rollout.rollout_id in calls:  # a step that is made again is written policy by policy
            calls[rollout.rollout_id] |= rollout.calls
    rollouts = [msgspec.structs.replace(each, calls=calls[each.rollout_id]) for each in record.rollouts]
    return msgspec.structs.replace(record, rollouts=rollouts)


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"{step:06d}.msgpack"


def _read(file: Path) -> StepRecord:
    try:
        return _DECODER.decode(file.read_bytes())
    except msgspec.MsgspecError as error:
        raise UnreadableRecord(
            f"a step record in {file} cannot be read ({error}): it is damaged, or of another version; read it with the "
            "version that wrote it, or move it away, and nothing is known of what the step trained"
        ) from error
