"""The attribute names of a span, each written once: GenAI conventions first, ours where they have none."""

from enum import StrEnum
from typing import Final

# OpenTelemetry GenAI semantic conventions.
OPERATION: Final = "gen_ai.operation.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"

# Ours. Messages and prompt ids are what the call adds to its parent, never the whole history.
AGENT: Final = "lightning_rl.agent"
DIALECT: Final = "lightning_rl.dialect"
PARENT: Final = "lightning_rl.parent_call"
FORK_CAUSE: Final = "lightning_rl.fork_cause"
FORK_AT: Final = "lightning_rl.fork_at"
ECHO_EDITED: Final = "lightning_rl.echo_edited"
PROMPT_IDS: Final = "lightning_rl.prompt_ids"
RESPONSE_IDS: Final = "lightning_rl.response_ids"
LOGPROBS: Final = "lightning_rl.logprobs"
LOGPROB_KIND: Final = "lightning_rl.logprob_kind"
POLICY_VERSIONS: Final = "lightning_rl.policy_versions"
SAMPLING_REQUESTED: Final = "lightning_rl.sampling.requested"
SAMPLING_EFFECTIVE: Final = "lightning_rl.sampling.effective"
IGNORED_FIELDS: Final = "lightning_rl.ignored_fields"
DELIVERED: Final = "lightning_rl.delivered"
EXACT: Final = "lightning_rl.exact"
TRAINABLE: Final = "lightning_rl.trainable"
OVERSHOOT: Final = "lightning_rl.overshoot"

CALL_SPAN: Final = "lightning_rl.call"


class ForkCause(StrEnum):
    """Why a request continues no call, although its attempt has answered some."""

    NEW_CONVERSATION = "new_conversation"  # it begins otherwise: a sub-agent, a title call; nothing went wrong
    EDITED_TEXT = "edited_text"  # a message reads otherwise, or stands where there was none
    TOOL_CALL_CHANGED = "tool_call_changed"  # an answer's tool calls: other arguments, another order, one gone
    SYSTEM_CHANGED = "system_changed"  # the system message, a clock in it for instance
    TOOLS_CHANGED = "tools_changed"  # the tools that the model may call
    TRUNCATED_BY_CLIENT = "truncated_by_client"  # messages at the front or in the middle are gone: compaction
    REASONING_STRIPPED = "reasoning_stripped"  # the chat format drops the reasoning of earlier turns
    NOT_APPEND_ONLY = "not_append_only"  # the chat format writes the same history in other tokens
