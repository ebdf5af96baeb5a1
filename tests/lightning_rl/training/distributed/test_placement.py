"""Who is on which GPU: nobody shares one unless that is meant or cannot be helped, and what cannot be is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.config import ConfigError, compose
from lightning_rl.config.schema import Config
from lightning_rl.training.distributed import cluster
from lightning_rl.training.distributed.placement import Placement, check_keys, place, sleeps
from tests.random_examples import examples

ROLLOUT = "actor_rollout_ref.rollout."


def configured(words: str = "", name: str = "vllm") -> Config:
    """Words of the command line; `r.` stands for the rollout's section, `t.` for the trainer's."""
    sections = {"r.": ROLLOUT, "t.": "trainer."}
    lines = [sections[word[:2]] + word[2:] for word in words.split()]
    return compose(command_line=[f"{ROLLOUT}name={name}", *lines])


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "runs_already", lambda: False)


@pytest.mark.parametrize(
    ("words", "gpus", "trainer", "engines"),
    [
        ("", 1, (0,), ((0,),)),  # one GPU: they share it
        ("", 2, (0,), ((1,),)),
        ("r.data_parallel_size=2 r.tensor_model_parallel_size=2", 5, (0,), ((1, 2), (3, 4))),
        ("r.data_parallel_size=2 r.tensor_model_parallel_size=2", 4, (0,), ((0, 1), (2, 3))),  # too few to part them
        ("t.n_gpus_per_node=8 r.data_parallel_size=8", 8, tuple(range(8)), tuple((gpu,) for gpu in range(8))),
        ("t.n_gpus_per_node=4 r.data_parallel_size=4", 8, (0, 1, 2, 3), ((4,), (5,), (6,), (7,))),
        ("r.devices=colocated", 2, (0,), ((0,),)),
        ("r.free_cache_engine=true", 2, (0,), ((0,),)),  # they are to take turns
        ("r.weight_transfer=ipc", 2, (0,), ((0,),)),  # memory of one GPU
        ("r.devices=[0]", 2, (1,), ((0,),)),
        ("t.devices=[3]", 4, (3,), ((0,),)),
        ("t.devices=[1] r.devices=[3,2] r.tensor_model_parallel_size=2", 4, (1,), ((3, 2),)),
        ("r.server_urls=[http://h]", 2, (0,), ()),
    ],
)
def test_where_they_are(words: str, gpus: int, trainer: tuple[int, ...], engines: Any) -> None:
    assert place(configured(words), gpus) == Placement(trainer, engines)


@pytest.mark.parametrize(
    ("words", "gpus", "message"),
    [
        ("t.devices=[0] r.devices=[0]", 2, r"both name GPU 0: .*rollout.devices=colocated"),
        ("r.devices=apart", 1, r"0 of 1 GPUs are not the trainer's: lower these, or set .*devices=colocated"),
        ("r.devices=[0]", 1, r"rollout.devices=\[0\] leaves 0 of 1 GPUs to 1 processes"),
        ("r.devices=[5]", 2, r"there is no GPU 5, there are 2, counted from 0"),
        ("t.devices=[1]", 1, r"trainer.devices=\[1\]: there is no GPU 1, there is 1"),
        ("t.devices=[1,1] t.n_gpus_per_node=2", 4, "names a GPU twice"),
        ("t.devices=[0,1]", 4, r"names 2 GPUs, and 1 are needed: 1 processes train"),
        ("r.devices=[1]  r.tensor_model_parallel_size=2", 4, "names 1 GPUs, and 2 are needed"),
        ("r.tensor_model_parallel_size=4", 2, r"1 vLLM servers with 4 GPUs each .* need 4, and there are 2"),
        ("t.n_gpus_per_node=4", 2, r"4 processes train, a GPU each .* and there are 2: .*CUDA_VISIBLE_DEVICES"),
        ("", 0, "1 processes train, a GPU each .* and there is none"),
        ("r.weight_transfer=nccl", 1, r"nccl goes between GPUs, and 0 is the trainer's and vLLM's"),
        ("r.weight_transfer=ipc r.devices=apart", 2, r"ipc hands over memory of one GPU, the trainer's \(0\)"),
        ("r.server_urls=[http://h] r.devices=[1]", 2, "is for vLLM's servers that a run starts"),
    ],
)
def test_what_cannot_be_is_refused_with_the_keys_that_would_do(words: str, gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(configured(words), gpus)


def test_models_that_have_workers_of_their_own_have_gpus_of_their_own() -> None:
    config = configured("t.n_gpus_per_node=2 t.colocate=false t.devices=[0,1,2,3]")
    check_keys(config)  # how many groups there are is not known yet
    assert place(config, 8, groups=2) == Placement((0, 1, 2, 3), ((4,),))
    with pytest.raises(ConfigError, match="names 4 GPUs, and 6 are needed"):
        place(config, 8, groups=3)


def test_the_embedded_engine_is_where_the_trainer_is() -> None:
    assert place(configured("t.devices=[1]", "embedded"), 2) == Placement((1,))
    with pytest.raises(ConfigError, match="the embedded engine is on the trainer's GPU"):
        place(configured("r.devices=[1]", "embedded"), 2)


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["null", "colocated", "apart"]),
    st.integers(1, 2),
)
@settings(max_examples=examples(60), deadline=None)
def test_nobody_shares_a_gpu_that_need_not(
    gpus: int, workers: int, servers: int, size: int, asked: str, groups: int
) -> None:
    words = f"t.n_gpus_per_node={workers} r.data_parallel_size={servers} r.tensor_model_parallel_size={size}"
    wanted, needed = workers * groups, servers * size
    try:
        found = place(configured(f"{words} r.devices={asked}"), gpus, groups)
    except ConfigError:
        assert gpus < wanted or gpus < needed or (asked == "apart" and gpus < wanted + needed)
        return
    assert len(set(found.trainer)) == len(found.trainer) == wanted
    assert len(set(found.of_engines)) == len(found.of_engines) == needed
    assert {len(server) for server in found.engines} == {size}
    assert max(found.trainer + found.of_engines) < gpus
    assert found.shared == (asked == "colocated" or gpus < wanted + needed)


def test_servers_that_share_a_gpu_sleep_where_nothing_is_sampled_meanwhile() -> None:
    shared, parted = Placement((0,), ((0,),)), Placement((0,), ((1,),))
    assert sleeps(configured(), shared)
    assert not sleeps(configured(), parted)
    assert not sleeps(configured("t.schedule=async"), shared)
    assert not sleeps(configured("r.free_cache_engine=false"), shared)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "training on GPU 0, vLLM on GPU 1"),
        ("r.devices=colocated", "training on GPU 0, vLLM on GPU 0 (shared)"),
        (
            "t.n_gpus_per_node=2 r.tensor_model_parallel_size=2 r.data_parallel_size=2",
            "training on GPUs 0, 1, vLLM on GPUs 2, 3; GPUs 4, 5",
        ),
    ],
)
def test_it_is_said_in_a_line(words: str, line: str) -> None:
    found = place(configured(words), 8)
    assert found.line([str(gpu) for gpu in range(8)]) == line
    assert found.line(["4", "5", "6", "7"]) == line + " of CUDA_VISIBLE_DEVICES=4,5,6,7"


def test_on_a_cluster_ray_picks_them_and_only_their_number_is_decided_here(monkeypatch: pytest.MonkeyPatch) -> None:
    two = "t.nnodes=2 t.n_gpus_per_node=4 r.data_parallel_size=4 r.tensor_model_parallel_size=2"
    assert place(configured(two), 16).by_ray
    assert not place(configured(two), 16).shared
    assert place(configured(two), 8).shared
    assert place(configured(two), 16).line([]) == (
        "Ray places 8 training processes, a GPU each, 4 vLLM servers on others, 2 GPUs each"
    )
    with pytest.raises(ConfigError, match="on a Ray cluster Ray picks them: leave it out"):
        place(configured("t.nnodes=2 t.devices=[0,1]"), 4)
    with pytest.raises(ConfigError, match=r"3 vLLM servers of 2 GPUs share a machine's trainer\.n_gpus_per_node=4"):
        place(configured("t.nnodes=2 t.n_gpus_per_node=4 r.data_parallel_size=5 r.tensor_model_parallel_size=2"), 10)
    with pytest.raises(ConfigError, match=r"ipc is for one machine"):
        place(configured(f"{two} r.weight_transfer=ipc"), 16)
    assert not place(configured(f"{two} r.weight_transfer=nccl"), 17).shared
    assert place(configured(f"{two} r.weight_transfer=nccl"), 16).shared  # one of them sends
    monkeypatch.setattr(cluster, "runs_already", lambda: True)
    assert place(configured("t.n_gpus_per_node=2"), 4).by_ray
    assert not place(configured(), 4).by_ray  # one process trains, and it is this one
