"""A game for two models: a describer gives a hint of an object, and a builder who sees the hint alone names the object.

The hint for a word is the next one of the wheel red, green, blue, so the builder goes one back. Nobody tells them:
there are rewards only. Each gets one word and answers with one, and nothing in it says which of the two is asked. So
the parts need opposite answers to equal prompts, and no single model can play both well.
"""

from lightning_rl import LLM, rollout

WHEEL = ("red", "green", "blue")
MAX_TOKENS = 4  # of one answer


def play(word: str, describer: LLM, builder: LLM) -> dict[str, float]:
    """A reward for each part, by its name, and 1.0 as the final one where both were right."""
    hint = _answer(describer, word)
    built = _answer(builder, hint)
    described = hint == WHEEL[(WHEEL.index(word) + 1) % len(WHEEL)]
    return {
        "reward": float(described and built == word),
        "describer": float(described),
        "builder": float(built == word),
    }


@rollout
def two_models(task: dict[str, str], describer: LLM, builder: LLM) -> dict[str, float]:
    """Play with a model for each part."""
    return play(task["word"], describer, builder)


@rollout
def one_model(task: dict[str, str], llm: LLM) -> dict[str, float]:
    """Play with one model for both parts."""
    return play(task["word"], llm.for_agent("describer"), llm.for_agent("builder"))


def _answer(llm: LLM, word: str) -> str:
    answer = llm.openai().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": word}], max_tokens=MAX_TOKENS
    )
    return (answer.choices[0].message.content or "").strip()
