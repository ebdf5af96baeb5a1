"""How far a trajectory may go. Pure.

Invariant: of everything that ends a trajectory there is one word (`trajectories.termination`), and it is the true one.
"""

import msgspec

from lightning_rl.trajectories.termination import ANSWER_LENGTH, CONTEXT, RESPONSE_LENGTH, ROW_LENGTH


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one trajectory; None: no limit.

    `assistant_turns` and `user_turns` count answers of the policy and what a user says after the first prompt;
    `response_length` counts tokens after the first prompt, of the policy, tools and users; `row_length` the first
    prompt too; `answer_length` the tokens of one answer.
    """

    assistant_turns: int | None = None
    user_turns: int | None = None
    response_length: int | None = None
    row_length: int | None = None
    answer_length: int | None = None

    def context(self, first_prompt: int) -> int | None:
        """Tokens that prompt and answer of a call may have together, where the first prompt had `first_prompt`."""
        response = None if self.response_length is None else first_prompt + self.response_length
        return min((limit for limit in (response, self.row_length) if limit is not None), default=None)

    def of_context(self, first_prompt: int) -> str:
        """Which of the two `context` is."""
        if self.response_length is not None and self.context(first_prompt) == first_prompt + self.response_length:
            return RESPONSE_LENGTH
        return ROW_LENGTH

    def why_cut(self, first_prompt: int, prompt: int, sampled: int) -> str:
        """What cut off an answer of `sampled` tokens to a prompt of `prompt`."""
        if self.context(first_prompt) == prompt + sampled:
            return self.of_context(first_prompt)
        return ANSWER_LENGTH if self.answer_length is not None and sampled >= self.answer_length else CONTEXT
