"""Checkpoints: a Hugging Face folder that `transformers` loads as it is, with the state of training beside.

Invariant: a checkpoint is whole or not there. It is written under another name and then renamed, and its manifest
knows the checksum of each file; it is renamed again before it is deleted.
"""

import hashlib
import logging
import os
import random
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError

from lightning_rl.errors import Explained
from lightning_rl.files import MANIFEST, by_step, is_checkpoint, step_of
from lightning_rl.inference.weights import stream
from lightning_rl.inference.weights.stream import WeightStream
from lightning_rl.training import state as states

_log = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",  # of models that see
)  # fmt: skip
_STATE = "training_state"
_LARGE = 2**20
_OURS = (MANIFEST, _STATE)


class CheckpointError(Explained, OSError):
    """A checkpoint, or what is made of it, could not be written."""


class File(msgspec.Struct, frozen=True):
    """What a manifest says of a file; `b2sum` computes the checksum too."""

    size: int
    blake2b: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of a checkpoint, but for the manifest itself, by their names in the folder."""

    files: dict[str, File]


def save(folder: Path, *, export: Callable[[Path], None], state: dict[str, Any]) -> Path:
    """Write what `export` puts into the folder it is given (weights, config, tokenizer), and `state` (`training.state`)
    to `folder`; returns it.

    Raises CheckpointError naming the folder, where it cannot be written.
    """
    partial = _beside(folder, "partial")
    # What torch and safetensors raise on a full disk names no file.
    with _explained(f"checkpoint {folder}", "make room, then resume"):
        _make_anew(partial)
        export(partial)
        states.write(partial / _STATE, state)
        files = _files(partial)
        with ThreadPoolExecutor() as threads:  # hashing and syncing let go of the GIL
            entries = dict(zip(files, threads.map(_synced, (partial / name for name in files)), strict=True))
        (partial / MANIFEST).write_bytes(msgspec.json.encode(Manifest(files=entries)))
        _sync(partial / MANIFEST)
        _put(partial, folder)
    return folder


def export_model(model: Any, weights: WeightStream, tokenizer: Path, folder: Path) -> None:
    """Write a `transformers` model with these weights, one after another under their names in a checkpoint, and the
    tokenizer of the folder `tokenizer`, to `folder`."""
    stream.export_model(model, weights, folder)
    copy_tokenizer(tokenizer, folder)


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy the tokenizer's files of one folder to another."""
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)


def latest(checkpoints: Path) -> Path | None:
    """The newest whole checkpoint among the `step-N` folders of `checkpoints`. Warns of newer ones that are broken."""
    return next(_whole(checkpoints), None)


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file is there, as long as it was, and with its checksum."""
    try:
        written = (folder / MANIFEST).read_bytes()
        manifest = msgspec.json.decode(written, type=Manifest)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if msgspec.json.encode(manifest) != written:
        return f"{MANIFEST} was changed"
    with ThreadPoolExecutor() as threads:
        faults = threads.map(lambda named: _fault_of(folder, *named), manifest.files.items())
        return next((reason for reason in faults if reason is not None), None)


def load_state(folder: Path) -> dict[str, Any]:
    """The `state` that was saved in `folder`."""
    return states.read(folder / _STATE)


def open_state(folder: Path) -> dict[str, Any]:
    """The same with a `Stored` in the place of each tensor, which is read when it is asked for."""
    return states.opened(folder / _STATE)


def prune(checkpoints: Path, keep: int | None, protect: Collection[Path] = ()) -> None:
    """Delete the oldest checkpoints but for the newest `keep` whole ones and those of `protect`; None keeps all.

    What a killed run left half written, or half deleted, goes too. Newer ones that are broken stay for you to see.
    """
    for leftover in checkpoints.glob("step-*.partial"):
        shutil.rmtree(leftover)
    written = [folder for folder in by_step(checkpoints) if is_checkpoint(folder)]
    if keep is None or len(written) <= keep:
        return
    newest = next(_whole(checkpoints), None)
    older = [] if newest is None else [folder for folder in written if step_of(folder) < step_of(newest)]
    protected = {folder.resolve() for folder in protect}
    for folder in reversed(older[keep - 1 :]):
        if folder.resolve() not in protected:
            shutil.rmtree(_set_aside(folder))


def final_model(run_dir: Path, from_: Path) -> Path:
    """Make `run_dir`/model the Hugging Face folder of the checkpoint `from_`; returns it.

    It outlives the checkpoint, and takes no room beside it: weights are hard links where the file system has them.
    Raises CheckpointError where it cannot be written, or the checkpoint is broken.
    """
    folder = run_dir / "model"
    if wrong := fault(from_):
        raise CheckpointError(
            f"the final model {folder} cannot be made of checkpoint {from_}, which is broken: {wrong}"
        )
    partial = _beside(folder, "partial")
    with _explained(f"the final model {folder}", f"make room; its checkpoint is {from_}"):
        _make_anew(partial)
        copy_model(from_, partial)
        for name in _files(partial):
            _sync(partial / name)
        _put(partial, folder)
    return folder


def copy_model(from_: Path, folder: Path) -> None:
    """Copy the Hugging Face folder of the checkpoint `from_`; its weights are hard links where the file system has
    them."""
    shutil.copytree(from_, folder, copy_function=_link, ignore=_ours_of(from_), dirs_exist_ok=True)


def rng_state() -> dict[str, Any]:
    """The states of all random number generators of this process: torch's (of GPUs in use too), Python's, NumPy's."""
    numpy = dict(np.random.get_state(legacy=False))
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if on_gpu else [],
        "python": random.getstate(),
        "numpy": numpy | {"state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators into the states that `rng_state` gave, as far as it names them."""
    state = states.whole(state)
    torch.set_rng_state(state["torch"])
    for device, of_device in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(of_device, device)
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])


def _whole(checkpoints: Path) -> Iterator[Path]:
    """The whole checkpoints, newest first; warns of the others."""
    for folder in by_step(checkpoints):
        wrong = fault(folder)
        if wrong is None:
            yield folder
        elif folder.exists():  # another process may have deleted it just now
            _log.warning(
                "checkpoint %s is broken and passed over: %s; bring it back, or delete the folder", folder, wrong
            )


def _fault_of(folder: Path, name: str, file: File) -> str | None:
    try:
        size = (folder / name).stat().st_size
        if size != file.size:
            return f"{name} has {size} bytes instead of {file.size}"
        return None if _checksum(folder / name) == file.blake2b else f"{name} was changed: its checksum is another"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error})"


def _files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def _synced(file: Path) -> File:
    _sync(file)
    return File(size=file.stat().st_size, blake2b=_checksum(file))


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _put(partial: Path, folder: Path) -> None:
    """Give what is written whole its name, in the place of what bore it before."""
    for inner in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        _sync(inner)
    aside = _set_aside(folder) if folder.exists() else None
    partial.rename(folder)
    _sync(folder.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    """Rename what is to be deleted: half deleted under its own name, it might count."""
    aside = _beside(folder, "old.partial")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f"{folder.name}.{ending}")


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _link(source: str, target: str) -> None:
    """Small files are copied: people edit them, which must not change the checkpoint."""
    if os.path.getsize(source) >= _LARGE:
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)


def _ours_of(checkpoint: Path) -> Callable[[str, list[str]], list[str]]:
    return lambda folder, names: [name for name in names if name in _OURS and Path(folder) == checkpoint]


@contextmanager
def _explained(subject: str, what_to_do: str) -> Iterator[None]:
    try:
        yield
    except Explained:  # such as a worker that died: it says itself what to do
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{subject} cannot be written ({error}); {what_to_do}") from error
