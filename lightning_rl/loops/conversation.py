"""One trajectory: its messages, what the policy answers, and how far it may go.

Invariant: nothing is asked once a limit is reached, and no answer is asked for more tokens than there is room for;
`ended_by` is set once, and what was sampled stays in `messages` as it was answered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lightning_rl.agents.emit import emit_object
from lightning_rl.agents.resources import LLM
from lightning_rl.loops.limits import Limits
from lightning_rl.trajectories import termination

if TYPE_CHECKING:
    from openai import BadRequestError

_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Answer:
    """What the policy answered: `call_id` is the id of the answer, which rewards of the call are given under; `message`
    as it stands in the conversation; `tool_calls` as the model wrote them, with `id`, `name` and `arguments`."""

    call_id: str
    message: dict[str, Any]
    finish_reason: str

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[dict[str, str]]:
        calls = self.message.get("tool_calls") or ()
        return [{"id": call["id"], **call["function"]} for call in calls]


class Conversation:
    """A conversation with the policy behind `llm`; enter it, and its end is recorded.

    `assistant_turns`, `user_turns` and `sampled_tokens` count. `ended_by` says what ended it
    (`trajectories.termination`), None while it goes on. What a loop wants to be told beside these goes into `told`.
    """

    def __init__(self, llm: LLM, messages: Sequence[Mapping[str, Any]], limits: Limits, *, loop: str) -> None:
        self.llm = llm
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.limits = limits
        self.assistant_turns = self.user_turns = self.sampled_tokens = 0
        self.ended_by: str | None = None
        self.told: dict[str, Any] = {}
        self._loop = loop
        self._client = llm.async_openai()
        self._first_prompt: int | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_by = termination.ERROR if error is not None else self.ended_by or termination.ANSWER
        counts = ("assistant_turns", "user_turns", "sampled_tokens")
        counted = {name: getattr(self, name) for name in counts}
        emit_object(termination.ending(self._loop, ended_by, **counted, **self.told))

    async def ask(self, **request: Any) -> Answer | None:
        """The policy's next answer, added to the messages; None where a limit leaves no room for one.

        `request` is what a Chat Completions request has besides model and messages: `tools`, `temperature`, ... An
        answer that a limit cut off is given as it is, and ends the conversation. Raises ValueError for an `n`: a
        conversation has one answer at a time.
        """
        from openai import BadRequestError  # half a second of import, which the trainer does not need

        if request.get("n", 1) != 1:
            raise ValueError(f"n={request['n']}: a conversation has one answer at a time; open several of them")
        if self.ended_by is None and self.assistant_turns == self.limits.assistant_turns:
            self.ended_by = termination.ASSISTANT_TURNS
        if self.ended_by is not None:
            return None
        arguments: Any = {"model": self.llm.model, "messages": self.messages, **request, **self._room(request)}
        try:
            completion = await self._client.chat.completions.create(**arguments)
        except BadRequestError as error:
            if error.code != _TOO_LONG:
                raise
            self.ended_by = self._why_refused(error)
            return None
        return self._answered(completion)

    def add(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """What tools gave, or others said."""
        self.messages += [dict(message) for message in messages]

    def add_user(self, text: str) -> None:
        """What the user says next; counts as a user turn."""
        self.user_turns += 1
        self.add([{"role": "user", "content": text}])

    def _room(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request's fields that keep its answer within the limits."""
        name = "max_completion_tokens" if "max_completion_tokens" in request else "max_tokens"
        limits = [request.get(name), self.limits.answer_length]
        if self._first_prompt is None:
            limits.append(self.limits.response_length)
        fields: dict[str, Any] = {}
        if lengths := [limit for limit in limits if limit is not None]:
            fields[name] = min(lengths)
        context = self.limits.row_length if self._first_prompt is None else self.limits.context(self._first_prompt)
        if context is not None:
            fields["extra_body"] = {**(request.get("extra_body") or {}), "max_context_tokens": context}
        return fields

    def _why_refused(self, error: "BadRequestError") -> str:
        if error.param != "max_context_tokens":
            return termination.CONTEXT
        return termination.ROW_LENGTH if self._first_prompt is None else self.limits.of_context(self._first_prompt)

    def _answered(self, completion: Any) -> Answer:
        choice, usage = completion.choices[0], completion.usage
        if self._first_prompt is None:
            self._first_prompt = usage.prompt_tokens
        self.assistant_turns += 1
        self.sampled_tokens += usage.completion_tokens
        message = choice.message.model_dump(exclude_none=True)
        self.messages.append(message)
        answer = Answer(completion.id, message, choice.finish_reason)
        if choice.finish_reason == "length":
            self.ended_by = self.limits.why_cut(self._first_prompt, usage.prompt_tokens, usage.completion_tokens)
        return answer
