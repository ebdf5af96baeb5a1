"""Thresholds of size, set so low that toy inputs are above them: `make test-limits` runs tests with this plugin.

Tests use toy sizes. Large models, long prompts and many rows take other code paths: chunks, parts, batches. With these
thresholds toys take them, too, so a test that fails here alone is about a path that no other test runs.
"""

import importlib
from typing import Any

import pytest

LIMITS: dict[str, dict[str, int]] = {
    "lightning_rl.inference.batch": {"LONG_PROMPT": 4},
    "lightning_rl.inference.cache": {"SHORTEST_PREFIX": 1},
    "lightning_rl.inference.continuous_batch": {"PREFILL_TOKENS": 16},
    "lightning_rl.inference.engine": {"LARGE": 1},
    "lightning_rl.inference.policy": {"CHUNK_TOKENS": 7},
    "lightning_rl.inference.weights.stream": {"BUCKET_BYTES": 4096},
    "lightning_rl.rl.kl": {"_CHUNK": 64},
    "lightning_rl.rl.logits": {"CHUNK": 64},
    "lightning_rl.rl.output_layer": {"CHUNK": 64, "_BLOCK": 50},
    "lightning_rl.store.call_counts": {"_MERGED_AT_ONCE": 2, "_WORTH_MERGING": 2},
    "lightning_rl.store.client": {"_ENQUEUE_BATCH": 2},
    "lightning_rl.store.contents": {"_AT_ONCE": 1},
    "lightning_rl.store.copied": {"_PAGE": 2, "_TRACES": 1},
    "lightning_rl.store.databases": {"_ROWS": 2},
    "lightning_rl.store.queries": {"_CHUNK": 2},
    "lightning_rl.training.layers.output_layer": {"ROWS_CHUNK": 1},
    "lightning_rl.viewer.indexer": {"_CALLS_AT_ONCE": 1, "_TASKS_AT_ONCE": 1},
    "lightning_rl.viewer.source": {"_CHUNK": 2},
    "lightning_rl.vision": {"_KEPT_BYTES": 1},
    "lightning_rl_adapters.span": {"_COMPRESSED_TOOLS": 1},
    "lightning_rl_proxy.engines.client": {"_LONG": 1},
    "lightning_rl_proxy.forest.incremental_decode": {"_KEPT": 2, "_LONG": 1},
    "lightning_rl_proxy.forest.live_forest": {"_AT_HAND": 1},
    "lightning_rl_proxy.forest.nodes": {"_LONG": 1},
    "lightning_rl_proxy.http.tokenizing": {"_KNOWN": 3, "_LONG": 1},
    "lightning_rl_proxy.recording.recorder": {"_EMPTIED_ABOVE": 1, "_REWRITTEN_ABOVE": 1},
    "lightning_rl_proxy.rendering.cached_texts": {"_CHARACTERS": 60, "_MANY": 1},
    "lightning_rl_proxy.rendering.long_texts": {"_LONG": 4},
    "lightning_rl_proxy.rendering.rendered_prompts": {"_BYTES": 300},
    "lightning_rl_proxy.rendering.tokenizer": {"_SHORT": 0},
}
# Tests that assert where a threshold is, or what happens below it.
OF_THE_LIMITS = {
    "test_a_prompt_that_one_batch_has_read_is_copied_by_the_others",
    "test_an_attempt_with_tools_that_others_had_is_placed_at_once",
    "test_few_logits_are_computed_at_once",
    "test_other_ids_than_those_that_are_known_are_not_taken",
    "test_the_buffer_of_packed_weights_holds_the_largest_tensor",
    "test_what_came_before_is_not_new_where_a_format_writes_each_message_apart",
}


def pytest_configure() -> None:
    """Set the limits."""
    for name, limits in LIMITS.items():
        module: Any = importlib.import_module(name)
        for limit, value in limits.items():
            assert isinstance(getattr(module, limit), int), f"{name} has no limit {limit}"
            setattr(module, limit, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests of the limits themselves."""
    items[:] = [item for item in items if getattr(item, "originalname", item.name) not in OF_THE_LIMITS]
