"""The state of training: what is read is what was written, and reading runs nothing."""

import math
import pickle
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rl.training import state as states
from tests.random_examples import examples

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.integers() | st.text() | st.sampled_from(["$tensor", "$tuple", "$dict", "a.b", "a['b']"])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits: numbers that are none, the smallest and the largest ones."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        content = bytes(byte % 2 for byte in content)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


trees = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Type by type, bit by bit, dicts in their order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    return a == b


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@settings(deadline=None, max_examples=examples(60))
@given(st.dictionaries(keys, trees, max_size=4))
def test_what_is_written_is_read(state: dict[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        states.write(Path(folder) / "state", state)
        assert same(states.read(Path(folder) / "state"), state)


def test_an_optimizer_goes_on_from_what_is_read(tmp_path: Path) -> None:
    """Its state has integers for keys, and tuples; a parameter that got no gradient has none."""

    def trained(after: Path | None, steps: int) -> tuple[dict[str, Any], torch.nn.Module]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if after is not None:
            state = states.read(after)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for _ in range(steps):
            optimizer.zero_grad()
            model[0](torch.ones(3)).square().sum().backward()
            optimizer.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, model

    half, _ = trained(None, 2)
    assert isinstance(half["model"], OrderedDict)
    states.write(tmp_path / "state", half)
    resumed, whole = trained(tmp_path / "state", 2)[1], trained(None, 4)[1]
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_views_and_transposed_tensors_keep_their_values(tmp_path: Path) -> None:
    large = torch.arange(1000.0)
    state = {
        "view": large[3:5],
        "transposed": torch.arange(6).view(2, 3).t(),
        "needs": torch.ones(2, requires_grad=True),
    }
    states.write(tmp_path / "state", state)
    found = states.read(tmp_path / "state")
    assert same(found, {name: value.detach() for name, value in state.items()})
    assert not found["needs"].requires_grad


@pytest.mark.parametrize("value", [np.zeros(2), {1, 2}, b"bytes", 1j, object()])
def test_what_is_neither_tensor_nor_plain_is_refused_by_its_place(value: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['actor'\]\[3\]\[0\] is a .*: a checkpoint holds tensors"):
        states.write(tmp_path / "state", {"actor": {3: [value]}})
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("key", [(1, 2), torch.ones(1)])
def test_a_key_that_json_cannot_hold_is_refused_by_its_place(key: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\] has the key"):
        states.write(tmp_path / "state", {"a": {key: 1}})


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code of the checkpoint ran')",)


def test_reading_runs_no_code_of_a_description(tmp_path: Path) -> None:
    states.write(tmp_path / "state", {"a": torch.ones(2)})
    dotted = b"\x80\x04\x8c\x2btorch.distributed.checkpoint.filesystem\x8c\x09os.system\x93\x8c\x05false\x85R."
    dotted = dotted.replace(b"\x2btorch", bytes([len("torch.distributed.checkpoint.filesystem")]) + b"torch")
    named = b"ctorch.distributed.checkpoint.filesystem\nFileSystem\n)R."
    for content in (pickle.dumps(Evil()), dotted, named, b"ctorch\nload\n."):
        (tmp_path / "state" / ".metadata").write_bytes(content)
        with pytest.raises(pickle.UnpicklingError, match="which no description of tensors needs"):
            states.read(tmp_path / "state")


def test_reading_runs_no_code_in_a_tensors_place(tmp_path: Path) -> None:
    """A description may say that a tensor is a pickled object."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    states.write(tmp_path / "state", {"a": torch.ones(2)})
    description = tmp_path / "state" / ".metadata"
    metadata = pickle.loads(description.read_bytes())
    metadata.state_dict_metadata["state['a']"] = BytesStorageMetadata()
    [(index, place)] = metadata.storage_data.items()
    metadata.storage_data = {type(index)("state['a']"): place}
    description.write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="is pickled, and no tensor"):
        states.read(tmp_path / "state")
