"""Which teacher a call has, by its task and its agent; and whether a teacher reads the policy's tokens."""

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Config, TeacherModel
from lightning_rl.inference.load import model_folder, vocabulary_size
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.batch import BatchRules, RolloutPart, StepBatch, read
from lightning_rl.ppo.privileged import PrivilegedRows, TeacherRow
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.teacher import ServedTeacher, Teacher, TeacherOf, ask_ahead, ask_teachers, put_taught
from lightning_rl.trajectories.trajectory import Trajectory

_PROBES = ("Hello, world!", "def f(x):\n    return x * 2\n", "12345 + 67890 = ?", "naïve café — 東京 🙂")
_log = logging.getLogger(__name__)
_SHOWN = 5  # keys of tasks in a message


def served_teachers(config: Config, policy: Path) -> dict[str, Teacher]:
    """The teachers behind servers, by name, after each teacher's tokenizer was compared with that of the `policy`'s
    folder. Raises ConfigError for a folder with another one, TeacherRefused for such a server."""
    options = resolved_config.distillation_options(config)
    if options is None:
        return {}
    if options.top > (vocabulary := vocabulary_size(policy)):
        raise ConfigError(
            f"distillation.distillation_loss.topk={options.top}: the policy's tokenizer has {vocabulary} tokens"
        )
    served: dict[str, Teacher] = {}
    for name, teacher in config.distillation.teachers().items():
        if teacher.model_path is not None:
            folder = model_folder(teacher.model_path)
            _check_tokenizer(name, folder, policy)
            longest = min(config.data.max_tokens, _context(policy))
            if (context := _context(folder)) < longest:
                _log.warning(
                    "teacher %s reads %d tokens, and rows may have %d: what it says of those behind is worth little. "
                    "Lower data.max_prompt_length or data.max_response_length, or take another teacher",
                    name,
                    context,
                    longest,
                )
        elif teacher.weights is None:
            urls, away = teacher.server_urls or (), config.distillation.when_away
            made = ServedTeacher(name, urls, vocabulary, away)
            tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
            made.check([(text, tokenizer.encode(text, add_special_tokens=False).ids) for text in _PROBES])
            served[name] = made
    return served


def begin_to_teach(trajectory: Trajectory, rules: BatchRules, teachers: Mapping[str, Teacher], config: Config) -> None:
    """Have the teachers on servers begin with a rollout that has ended, while others of its step still run."""
    options = resolved_config.distillation_options(config)
    batch = read([trajectory], rules)
    ask_ahead(batch.sequences, teachers, _teacher_of(batch, config), 0 if options is None else options.top)


def teach(
    batch: StepBatch, teachers: Mapping[str, Teacher], config: Config, privileged: PrivilegedRows | None = None
) -> Counter[str]:
    """Give the batch what its calls' teachers say; how many calls are not taught, by reason (`privileged`).

    With `privileged` the teachers are asked about rows that tell them more. Where teachers alone train, tokens of which
    none said anything are excluded: as `teacher_away`, or where their call has none as `untaught`. Raises ConfigError
    where not one of its calls has a teacher.
    """
    named, key = config.distillation.teachers(), config.distillation.teacher_key
    teacher_of, skipped = _teacher_of(batch, config), _skipped(teachers)
    options = resolved_config.distillation_options(config)
    top = 0 if options is None else options.top
    rows, untaught = (list[TeacherRow](), Counter[str]()) if privileged is None else privileged.of(batch)
    sequences = batch.sequences if privileged is None else [each.row for each in rows]
    ask_teachers(sequences, teachers, teacher_of, top)
    if privileged is not None:
        put_taught(batch.sequences, [(each.student, each.where, each.row) for each in rows], top)
    away = _skipped(teachers) > skipped
    taught = [s.teacher_log_probs for s in sequences if s.teacher_log_probs is not None]
    if sequences and not away and all(np.isnan(each).all() for each in taught):
        keys = sorted({_key_of(part, key) or "missing" for part in batch.parts})
        raise ConfigError(
            f"no call of the step has a teacher: the tasks' {key} (distillation.teacher_key) is "
            f"{', '.join(keys[:_SHOWN])}, and the teachers are for "
            + ", ".join(f"{name}: key={each.key}, agents={each.agents}" for name, each in named.items())
        )
    if config.distillation.without_rewards:
        places_by_id = None if privileged is None else _places_of(rows)
        for part in batch.parts:
            if away:
                unasked = [~_with_teacher(each, teacher_of, places_by_id) for each in part.sequences]
                not_away = [_is_taught(each) | other for each, other in zip(part.sequences, unasked, strict=True)]
                part.keep(not_away, "teacher_away")
            part.keep([_is_taught(each) for each in part.sequences], "untaught")
    return untaught


def _teacher_of(batch: StepBatch, config: Config) -> TeacherOf:
    """Which teacher a call in a sequence of the batch has."""
    named, key = config.distillation.teachers(), config.distillation.teacher_key

    def teacher_of(sequence: TrainingSequence, call_id: str) -> str | None:
        part = batch.parts[sequence.rollout]
        agent = part.trajectory.forest.nodes[call_id].call.agent
        return next((name for name, each in named.items() if _teaches(each, part, agent, key)), None)

    return teacher_of


def _skipped(teachers: Mapping[str, Teacher]) -> int:
    """Rows about which servers did not answer, since the run began."""
    return sum(teacher.skipped for teacher in teachers.values() if isinstance(teacher, ServedTeacher))


def _is_taught(sequence: TrainingSequence) -> NDArray[np.bool_]:
    """Of which trained tokens [K] a teacher has said anything."""
    assert sequence.teacher_log_probs is not None
    return ~np.isnan(sequence.teacher_log_probs)


def _with_teacher(
    sequence: TrainingSequence, teacher_of: TeacherOf, places_by_id: Mapping[int, Sequence[NDArray[np.int64]]] | None
) -> NDArray[np.bool_]:
    """About which trained tokens [K] a teacher was asked; `places_by_id` are those before which it was told more, by
    the id of their sequence, None: it is told nothing."""
    mask = np.zeros(len(sequence.trained), np.bool_)
    for call_id, where, _ in sequence.trained_by_call():
        mask[where] = teacher_of(sequence, call_id) is not None
    if places_by_id is not None:
        only = np.zeros_like(mask)
        for where in places_by_id.get(id(sequence), ()):
            only[where] = True
        mask &= only
    return mask


def _places_of(rows: Sequence[TeacherRow]) -> dict[int, list[NDArray[np.int64]]]:
    """Where the tokens stand in their sequence, by its id."""
    places_by_id: dict[int, list[NDArray[np.int64]]] = {}
    for row in rows:
        places_by_id.setdefault(id(row.student), []).append(row.where)
    return places_by_id


def _teaches(teacher: TeacherModel, part: RolloutPart, agent: str | None, key: str) -> bool:
    if teacher.key is not None and _key_of(part, key) != teacher.key:
        return False
    return teacher.agents is None or re.fullmatch(teacher.agents, agent or "") is not None


def _key_of(part: RolloutPart, key: str) -> str | None:
    """What a rollout's task has in the field `key`, as a text."""
    task = part.trajectory.task
    value = task.get(key) if isinstance(task, Mapping) else None
    return None if value is None else str(value)


def _check_tokenizer(name: str, teacher: Path, policy: Path) -> None:
    """Raises ConfigError unless both write and read the same ids."""
    if not (teacher / "tokenizer.json").is_file():
        raise ConfigError(
            f"distillation.teacher_models.{name}: there is no tokenizer.json in {teacher}, by which it is seen whether "
            "the teacher reads the policy's tokens: copy the one that belongs to it there"
        )
    own, other = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (policy, teacher))
    ids, others = own.get_vocab(with_added_tokens=True), other.get_vocab(with_added_tokens=True)
    differ = sorted(ids.items() ^ others.items())
    ends: Sequence[object] = [_end(folder) for folder in (policy, teacher)]
    if differ or ends[0] != ends[1]:
        reason = f"token {differ[0][0]!r} is not the same id in both" if differ else f"their ends of text are {ends}"
        raise ConfigError(
            f"distillation.teacher_models.{name}: the teacher in {teacher} has another tokenizer than the policy in "
            f"{policy} ({reason}), and cannot score its tokens: take one with the same tokenizer, or let the policy "
            "learn from this one's answers as text, by supervised training (sft.teacher; docs/sft.md)"
        )


def _context(folder: Path) -> float:
    """How many tokens a model was made for."""
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    length = config.get("text_config", config).get("max_position_embeddings")
    return math.inf if length is None else length


def _end(folder: Path) -> object:
    file = folder / "tokenizer_config.json"
    token = msgspec.json.decode(file.read_bytes()).get("eos_token") if file.is_file() else None
    return token.get("content") if isinstance(token, dict) else token
