"""An ordinary agent with a search: the model asks, the best document comes back, until it answers.

The search is BM25 in a few lines: a document scores by the query's words that it has, rare words count for more, and
long documents for less.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_rl import LLM, rollout

from .corpus import Task, make_corpus

TURNS = 4
MAX_TOKENS = 64  # of one answer
QUERY = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "find", "description": "", "parameters": QUERY}}]


def best(query: str, documents: Sequence[str], *, k1: float = 1.5, b: float = 0.75) -> str:
    """The document that fits the query best by BM25, the first of equals; `nothing` where no word is found."""
    words = [document.lower().split() for document in documents]
    mean = sum(map(len, words)) / len(words)
    found_in = Counter(word for document in words for word in set(document))

    def score(document: list[str]) -> float:
        counts = Counter(document)
        total = 0.0
        for word in set(query.lower().split()) & counts.keys():
            rare = math.log(1 + (len(words) - found_in[word] + 0.5) / (found_in[word] + 0.5))
            total += rare * counts[word] * (k1 + 1) / (counts[word] + k1 * (1 - b + b * len(document) / mean))
        return total

    scores = [score(document) for document in words]
    top = max(scores)
    return documents[scores.index(top)] if top > 0 else "nothing"


def find(arguments: str, documents: Sequence[str]) -> str:
    """What the search says to the JSON that a model wrote."""
    try:
        query = json.loads(arguments)["q"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return "error"
    return best(query, documents) if isinstance(query, str) else "error"


@rollout
def search_agent(task: Task, llm: LLM) -> float:
    """Answer `task["question"]` after as many searches as fit in four turns; 1.0 where the answer is right."""
    client = llm.openai()
    documents = make_corpus(task["corpus"]).documents
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(TURNS):
        answer = client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS)
        said = answer.choices[0].message
        if not said.tool_calls:
            return float((said.content or "").strip() == task["answer"])
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            if call.type == "function":
                result = find(call.function.arguments, documents)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
