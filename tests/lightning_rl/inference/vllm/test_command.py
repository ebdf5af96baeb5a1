"""The command line and the environment that a vLLM server is started with."""

import json

import pytest

from lightning_rl.inference.vllm.command import PLUGIN, Options, command, environment


def options(**changes: object) -> Options:
    usual = {
        "python": "/envs/vllm/bin/python", "model": "/models/m", "context": 4096, "dtype": "bfloat16",
        "device": "cuda", "processed_logprobs": False,
    }  # fmt: skip
    return Options(**{**usual, **changes})  # type: ignore[arg-type]


def flags(words: list[str]) -> dict[str, str | None]:
    """Each flag with its value, where it has one."""
    found: dict[str, str | None] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") else after
    return found


def test_a_server_is_a_module_of_the_named_python_on_the_loopback() -> None:
    words = command(options(), 8123)
    assert words[:3] == ["/envs/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    asked = flags(words)
    assert asked["--host"] == "127.0.0.1"
    assert asked["--port"] == "8123"
    assert asked["--model"] == "/models/m"
    assert "--enable-scale-out" in asked
    assert json.loads(asked["--weight-transfer-config"] or "") == {"backend": "lightning_rl_file"}


def test_sizes_and_formats_are_handed_on() -> None:
    asked = flags(command(options(tensor_parallel=2, gpu_memory_utilization=0.8, max_num_seqs=64), 1))
    assert asked["--tensor-parallel-size"] == "2"
    assert asked["--gpu-memory-utilization"] == "0.8"
    assert asked["--max-num-seqs"] == "64"
    assert asked["--max-model-len"] == "4096"
    assert asked["--dtype"] == "bfloat16"


@pytest.mark.parametrize(("processed", "mode"), [(True, "processed_logprobs"), (False, "raw_logprobs")])
def test_logprobs_are_of_what_was_sampled_from(processed: bool, mode: str) -> None:
    assert flags(command(options(processed_logprobs=processed), 1))["--logprobs-mode"] == mode


@pytest.mark.parametrize(("rank", "told"), [(1, "1"), (5, "8"), (16, "16"), (600, "600")])
def test_adapters_are_loaded_while_it_runs_two_of_each_policy(rank: int, told: str) -> None:
    asked = flags(command(options(adapters=3, adapter_rank=rank), 1))
    assert (asked["--max-loras"], asked["--max-lora-rank"]) == ("6", told)
    words = command(options(adapters=1, adapter_versions=4, adapter_modules=("q_proj", "up_proj")), 1)
    assert flags(words)["--max-loras"] == "4"
    words = command(options(adapters=1, adapter_versions=20, adapter_modules=("q_proj", "up_proj")), 1)
    assert flags(words)["--max-loras"] == "8"
    first = words.index("--lora-target-modules")
    assert words[first : first + 3] == ["--lora-target-modules", "q_proj", "up_proj"]
    assert "--enable-lora" in asked
    assert environment(options(adapters=3))["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in flags(command(options(), 1))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(options())


def test_on_a_cpu_prompts_are_read_whole_and_nothing_is_compiled() -> None:
    asked = flags(command(options(device="cpu", context=512), 1))
    assert "--no-enable-chunked-prefill" in asked
    assert asked["--max-num-batched-tokens"] == "2048"
    assert "--enforce-eager" in asked
    assert "--gpu-memory-utilization" not in asked
    longer = flags(command(options(device="cpu", context=10_000), 1))
    assert longer["--max-num-batched-tokens"] == "10000"


def test_a_model_that_sees_has_its_images_resized_as_the_trainer_does_it() -> None:
    assert flags(command(options(sees=True), 1))["--mm-processor-kwargs"] == '{"use_fast": false}'
    assert "--mm-processor-kwargs" not in flags(command(options(), 1))


def test_vllms_own_transfers_are_its_backends() -> None:
    asked = flags(command(options(weight_transfer="nccl", sleeps=True), 1))
    assert json.loads(asked["--weight-transfer-config"] or "") == {"backend": "nccl"}
    assert "--enable-sleep-mode" in asked
    assert "--no-enable-sleep-mode" in flags(command(options(), 1))
    assert environment(options(weight_transfer="ipc"), (), {})["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment(options(), (), {})


def test_flags_of_one_s_own_win() -> None:
    assert "--trust-remote-code" in command(options(trust_remote_code=True), 1)
    assert "--trust-remote-code" not in command(options(), 1)
    asked = flags(command(options(flags={"max_num_seqs": 8, "trust_remote_code": True, "hf_overrides": {"a": 1}}), 1))
    assert asked["--max-num-seqs"] == "8"
    assert "--trust-remote-code" in asked
    assert json.loads(asked["--hf-overrides"] or "") == {"a": 1}


def test_the_plugin_is_found_before_what_else_is_in_the_path() -> None:
    found = environment(options(), (), {"PYTHONPATH": "/mine"})
    assert found["PYTHONPATH"] == f"{PLUGIN}:/mine"
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert (PLUGIN / "lightning_rl_vllm.py").is_file()


def test_a_server_on_a_cpu_keeps_to_its_cores_and_to_a_small_cache() -> None:
    found = environment(options(device="cpu", threads=3), (), {})
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment(options(device="cpu"), (), {"VLLM_CPU_KVCACHE_SPACE": "9"})["VLLM_CPU_KVCACHE_SPACE"] == "9"


def test_a_server_is_told_its_own_gpus() -> None:
    assert environment(options(), ("7", "GPU-5e"), {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == "7,GPU-5e"
    assert "CUDA_VISIBLE_DEVICES" not in environment(options(), (), {})


def test_a_server_listens_where_it_is_told() -> None:
    assert flags(command(options(host="10.0.0.7"), 1))["--host"] == "10.0.0.7"
