"""A game for two models: a describer gives a hint of an object, and a builder who sees the hint alone names the object.

The hint may not be the object's own word. Both get one word and answer with one, and nothing tells a model which of the
two it is. There are three words, so no single model can play both parts well: whatever it answers to each word, at most
two of the three come back as they were. Two models can agree on a code, and win always.
"""

from lightning_rl import LLM, rollout

WORDS = ("red", "green", "blue")
MAX_TOKENS = 4  # of one answer


def play(word: str, describer: LLM, builder: LLM) -> float:
    """The reward of both: 1.0 where the builder names the word, and the hint was another one."""
    hint = _answer(describer, word)
    if hint == word:
        return 0.0
    return float(_answer(builder, hint) == word)


@rollout
def two_models(task: dict[str, str], describer: LLM, builder: LLM) -> float:
    """Play with a model for each part."""
    return play(task["word"], describer, builder)


@rollout
def one_model(task: dict[str, str], llm: LLM) -> float:
    """Play with one model for both parts."""
    return play(task["word"], llm.for_agent("describer"), llm.for_agent("builder"))


def _answer(llm: LLM, word: str) -> str:
    answer = llm.openai().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": word}], max_tokens=MAX_TOKENS
    )
    return (answer.choices[0].message.content or "").strip()
