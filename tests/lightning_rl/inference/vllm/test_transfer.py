"""How weights reach a server: whole files that replace each other, told in order; and a policy that sleeps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.servers.errors import Unreached, WeightsRefused
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.control import Control
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.inference.vllm.transfer import (
    AdapterTransfer,
    FileTransfer,
    address_towards,
    buffer_bytes,
    transfer_of,
)
from lightning_rl.inference.weights.stream import WeightStream, stream_of

CHECKPOINT = Path(__file__).parents[4] / "examples" / "sql_agent" / "checkpoint"
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "n": torch.tensor([7])}


class Server:
    """Keeps what it was told, and what the file held when it was told of it."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def initialise(self, info: Any) -> None:
        self.told.append(info)

    def begin(self) -> None:
        self.told.append("begin")

    def update(self, info: Any) -> None:
        self.told.append(load_file(info["path"]))

    def finish(self, version: int) -> None:
        self.told.append(version)


def test_a_file_holds_all_weights_in_the_servers_format_while_it_is_read(tmp_path: Path) -> None:
    server: Any = Server()
    transfer = FileTransfer(tmp_path / "weights", torch.bfloat16)
    transfer.offer(stream_of(WEIGHTS), 3)
    transfer.give(server)
    shapes, begin, held, version = server.told
    assert (shapes, begin, version) == ({"shapes": {"a": [2, 3], "n": [1]}}, "begin", 3)
    assert torch.equal(held["a"], WEIGHTS["a"].bfloat16())
    assert torch.equal(held["n"], WEIGHTS["n"])


def test_a_version_replaces_the_one_before(tmp_path: Path) -> None:
    server: Any = Server()
    transfer = FileTransfer(tmp_path, torch.float32)
    for version in (3, 4, 4):
        transfer.offer(stream_of(WEIGHTS), version)
        transfer.give(server)
    assert [path.name for path in tmp_path.iterdir()] == ["version-4.safetensors"]
    assert len([told for told in server.told if isinstance(told, dict) and "shapes" in told]) == 1


def test_an_adapter_is_a_peft_folder_of_one_rank_and_a_name_for_each_version(tmp_path: Path) -> None:
    class Adapters:
        def __init__(self) -> None:
            self.loaded: dict[str, Path] = {}

        def load_adapter(self, name: str, folder: Path) -> None:
            self.loaded[name] = folder

        def unload_adapter(self, name: str) -> None:
            del self.loaded[name]

    server: Any = Adapters()
    transfer = AdapterTransfer(tmp_path, "planner", 2)
    small = {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": 0.5 * torch.ones(4, 2)}
    large = {"l.0.up.lora_A.weight": torch.ones(5, 3), "l.0.up.lora_B.weight": torch.ones(6, 5)}
    for version in range(7):
        transfer.offer(stream_of(small | large), version)
        transfer.give(server)
    assert list(server.loaded) == [f"planner@{version}" for version in (3, 4, 5, 6)]
    assert sorted(each.name for each in server.loaded["planner@6"].parent.iterdir()) == list(server.loaded)
    said = json.loads((server.loaded["planner@6"] / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (5, 5, ["q", "up"])
    held = load_file(server.loaded["planner@6"] / "adapter_model.safetensors")
    a, b = (held[f"base_model.model.q.lora_{each}.weight"] for each in "AB")
    assert (a.shape, b.shape) == ((5, 3), (4, 5))
    assert torch.equal(b @ a, small["q.lora_B.weight"] @ small["q.lora_A.weight"])
    other = AdapterTransfer(tmp_path, "planner", 2)  # of another process: a folder that no server knows
    other.offer(stream_of(small), 6)
    other.give(server)
    assert server.loaded["planner@6"].parent != server.loaded["planner@5"].parent


def test_a_server_that_was_started_again_is_told_what_to_expect_again(tmp_path: Path) -> None:
    server: Any = Server()
    transfer = FileTransfer(tmp_path, torch.float32)
    transfer.offer(stream_of(WEIGHTS), 3)
    transfer.give(server)
    transfer.forget(server)
    transfer.give(server)
    assert [server.told[0], server.told[4]] == [{"shapes": {"a": [2, 3], "n": [1]}}] * 2


def test_vllms_own_transfers_need_vllm_in_the_trainers_environment(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="weight_transfer=ipc is vLLM's code in the trainer's process too"):
        transfer_of("ipc", tmp_path, torch.float32)


def test_the_buffer_of_packed_weights_holds_the_largest_tensor() -> None:
    def sized(rows: int, dtype: torch.dtype) -> WeightStream:
        shapes = {"embedding": (rows, 3584), "norm": (3584,)}
        return stream_of({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}).held_as(dtype)

    assert buffer_bytes(sized(1000, torch.bfloat16)) == 2**28
    assert buffer_bytes(sized(152064, torch.bfloat16)) == 152064 * 3584 * 2 > 2**30  # of Qwen2.5-7B
    assert buffer_bytes(sized(152064, torch.float32)) == 152064 * 3584 * 4


def test_a_server_is_told_the_address_that_it_reaches_the_trainer_by() -> None:
    assert address_towards("http://127.0.0.1:8000") == "127.0.0.1"
    assert address_towards("http://localhost:8000/") == "127.0.0.1"


@pytest.mark.parametrize(("keep_weights", "level"), [(False, 2), (True, 1)])
def test_a_server_that_sleeps_keeps_its_weights_where_nobody_else_has_them(keep_weights: bool, level: int) -> None:
    control, asked = Control("http://127.0.0.1:1"), list[str]()
    control._order = lambda path, body=None: asked.append(path) or {}  # type: ignore[method-assign, func-returns-value]
    control.sleep(keep_weights=keep_weights)
    assert asked == [f"/sleep?level={level}"]


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_policy_sleeps_once_and_has_its_weights_before_its_cache(tmp_path: Path, adapter: bool) -> None:
    """Servers that sample an adapter keep their own weights, which nobody else has."""
    options = Options(python="", dtype="float32", device="cuda", processed_logprobs=False, sleeps=True, adapters=1)
    urls, beside = ["http://127.0.0.1:1"], list[VllmPolicy]() if adapter else None
    policy = VllmPolicy(ModelSource(CHECKPOINT, device="cpu"), options, tmp_path, urls=urls, beside=beside)
    assert policy.takes_adapter == adapter
    model: Any = policy.model
    asked: list[str] = []
    control: Any = policy._members[0].control
    control.sleep = lambda *, keep_weights: asked.append(f"sleep {keep_weights}")
    control.wake = lambda *tags: asked.append(f"wake {tags}")
    transfer: Any = policy._transfer
    transfer.give = lambda _: asked.append("give")
    policy._prove = lambda *_: asked.append("prove")  # type: ignore[method-assign]
    policy.sleep()
    policy.sleep()
    policy.update_weights(model, 1)
    policy.wake()
    woken = ["wake ('weights',)", "give", "wake ('kv_cache',)"]
    assert asked == [f"sleep {adapter}", *woken, "prove"]
    asked.clear()
    policy.sleep()
    policy.wake()  # nothing was trained: a server that slept has no weights of its own any more
    assert asked == [f"sleep {adapter}", *woken]


def test_weights_that_one_server_refuses_are_refused_at_once_though_another_is_away(tmp_path: Path) -> None:
    options = Options(python="", dtype="float32", device="cpu", processed_logprobs=False)
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    policy = VllmPolicy(ModelSource(CHECKPOINT, device="cpu"), options, tmp_path, urls=urls)

    def give(control: Control) -> None:
        raise Unreached("it does not answer") if control.url == urls[0] else WeightsRefused("another model")

    transfer: Any = policy._transfer
    transfer.give = give
    model: Any = policy.model
    with pytest.raises(WeightsRefused, match="another model"):
        policy.update_weights(model, 1)


def test_all_servers_take_the_first_weights_and_one_that_is_back_later_samples_nothing_while_it_takes_them(
    tmp_path: Path,
) -> None:
    options = Options(python="", dtype="float32", device="cpu", processed_logprobs=False)
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    policy = VllmPolicy(ModelSource(CHECKPOINT, device="cpu"), options, tmp_path, urls=urls)
    model, transfer, last = cast(Any, policy.model), cast(Any, policy._transfer), cast(Any, policy._members[1].control)
    there, asked = set(urls), list[str]()

    def give(control: Control) -> None:
        asked.append("give")
        if control.url not in there:
            raise Unreached(f"{control.url} does not answer")

    transfer.give = give
    policy._prove = lambda *_: None  # type: ignore[method-assign]
    policy.update_weights(model, 1)
    assert policy.replicas.urls_away() == []
    there.remove(urls[1])
    policy.update_weights(model, 2)
    assert policy.replicas.urls_away() == urls[1:]
    there.add(urls[1])
    asked.clear()
    last._order = lambda path, body=None: asked.append(path)
    assert policy.renew(last)
    assert asked == ["/pause?mode=abort", "give", "/resume"]
    another = VllmPolicy(ModelSource(CHECKPOINT, device="cpu"), options, tmp_path, urls=[urls[0], "http://127.0.0.1:3"])
    another._transfer = transfer
    transfer.offer = lambda *_: None
    with pytest.raises(Unreached, match=r"vLLM at http://127\.0\.0\.1:3 does not answer: when a run begins, all must"):
        another.update_weights(model, 0)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_that_does_not_reach_its_server_is_a_server_that_does_not_answer(status: int) -> None:
    control = Control("http://127.0.0.1:1")
    control._pool.request = lambda *_, **__: SimpleNamespace(status=status, data=b"")  # type: ignore[method-assign]
    with pytest.raises(Unreached, match=f"/is_paused does not answer: HTTP status {status}"):
        control.paused()


def test_a_server_that_was_started_anew_is_not_compared_before_it_has_the_weights(tmp_path: Path) -> None:
    options = Options(python="", dtype="float32", device="cpu", processed_logprobs=False)
    policy = VllmPolicy(ModelSource(CHECKPOINT, device="cpu"), options, tmp_path, urls=["http://127.0.0.1:1"])
    policy._version = 3
    control: Any = policy._members[0].control
    control.paused = lambda: False
    control.weight_version = lambda: "default"
    control.sample = lambda *_, **__: pytest.fail("it samples with weights that are not the model's")
    policy.prove()
    assert not policy._proven


class Ended:
    """A server of ours that has just died."""

    url, runs = "http://127.0.0.1:1", False

    def __init__(self) -> None:
        self.stopped = 0

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def why(self) -> str:
        return "it was killed"

    def ask_to_stop(self) -> None: ...

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.long
def test_a_server_that_has_died_while_it_sleeps_or_is_to_sleep_is_the_watchers(tmp_path: Path) -> None:
    options = Options(python="", dtype="float32", device="cuda", processed_logprobs=False, sleeps=True)
    server = Ended()
    policy = VllmPolicy(ModelSource(CHECKPOINT, device="cpu"), options, tmp_path, make=lambda *_: server)
    [member] = policy._members
    policy._version = 3
    transfer: Any = policy._transfer
    transfer.give = lambda control: control.begin()
    policy.sleep()
    assert (member.away, server.stopped) == (True, 1)
    asked: list[str] = []
    member.away, control = False, cast(Any, member.control)
    control.sleep = lambda *, keep_weights: asked.append("sleep")
    assert policy.renew(control)  # it was started again, while the trainer has the GPU
    assert asked == ["sleep"]
    member.away = True
    policy.wake()
    member.away = False
    policy._asleep = True
    policy.wake()
    assert (member.away, server.stopped) == (True, 2)
    assert not policy._asleep
