"""Agent Lightning 0.3's LLMProxy in a process of its own, as `benchmarks/gateway.py --peer` compares it.

Run by the Python of an environment with agentlightning and litellm's proxy, not by ours. Store and proxy share the
process, which spares the peer HTTP between the two; what it keeps is in memory. Prints the base URLs of many attempts
as a line of JSON, and at its end how many spans it has of the first five.
"""

import asyncio
import json
import socket
import sys
from typing import Any


async def main(engine_url: str, model: str, attempts: int) -> None:
    """Start both and serve until standard input ends."""
    from agentlightning.llm_proxy import LLMProxy  # type: ignore[import-not-found]
    from agentlightning.store.memory import InMemoryLightningStore  # type: ignore[import-not-found]

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = InMemoryLightningStore(thread_safe=True)
    backend = {"model": f"openai/{model}", "api_base": f"{engine_url}/v1", "api_key": "none"}
    listed: Any = [{"model_name": model, "litellm_params": backend}]
    proxy = LLMProxy(port=port, host="127.0.0.1", model_list=listed, store=store, launch_mode="thread")
    await proxy.start()
    urls = []
    for _ in range(attempts):
        opened = await store.start_rollout(input=None)
        path = f"/rollout/{opened.rollout_id}/attempt/{opened.attempt.attempt_id}/v1"
        urls.append(f"http://127.0.0.1:{port}{path}")
    print(json.dumps(urls), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    spans = 0
    for url in urls[:5]:
        _, rollout_id, _, attempt_id, _ = url.split("://")[1].partition("/")[2].split("/")
        spans += len(await store.query_spans(rollout_id, attempt_id))
    print(json.dumps({"spans_of_five": spans}), flush=True)
    await proxy.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
