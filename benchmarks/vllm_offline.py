"""What vLLM samples in its own process, without HTTP: the peer of `engine.py --formats`, run by its Python.

    python benchmarks/vllm_offline.py FOLDER DTYPE PROMPTS PROMPT_TOKENS NEW_TOKENS REPEATS

Prints a line of `SECONDS` and a JSON list: the seconds of each repeat, all prompts asked for at once.
"""

import json
import random
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    """Load the model, sample, and print."""
    folder, dtype, *numbers = sys.argv[1:]
    prompts, prompt_tokens, new_tokens, repeats = map(int, numbers)
    model = LLM(
        folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=prompt_tokens + new_tokens,
        enable_prefix_caching=False,
    )
    vocabulary = model.llm_engine.model_config.get_vocab_size()
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    taken = []
    for _ in range(repeats + 1):
        ids = [[random.randrange(vocabulary) for _ in range(prompt_tokens)] for _ in range(prompts)]
        start = time.perf_counter()
        model.generate([{"prompt_token_ids": each} for each in ids], sampling, use_tqdm=False)
        taken.append(time.perf_counter() - start)
    print("SECONDS " + json.dumps(taken[1:]), flush=True)


if __name__ == "__main__":
    main()
