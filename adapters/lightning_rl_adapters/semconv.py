"""The attribute names of a span, each written once: GenAI conventions first, ours where they have none."""

from enum import StrEnum
from typing import Final

# OpenTelemetry GenAI semantic conventions.
OPERATION: Final = "gen_ai.operation.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"

# Ours. Messages and prompt ids are what the call adds to its parent, never the whole history.
AGENT: Final = "lightning_rl.agent"
DIALECT: Final = "lightning_rl.dialect"
PARENT: Final = "lightning_rl.parent_call"
FORK_CAUSE: Final = "lightning_rl.fork_cause"
FORK_AT: Final = "lightning_rl.fork_at"
ECHO_EDITED: Final = "lightning_rl.echo_edited"  # in older records alone: its history held an altered answer
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
TOOLS: Final = "lightning_rl.tools"  # a digest, where a call begins a tree: its whole line has the same
INSTRUCTIONS: Final = "lightning_rl.instructions"  # how many of its messages no later response repeats
PROMPT_AS_IDS: Final = "lightning_rl.prompt_as_ids"  # of a completion: its client wrote token ids, not text
REQUEST: Final = "lightning_rl.request"  # a digest of door and body, by which a retry finds its answer
ENGINE_US: Final = "lightning_rl.engine_us"  # when the engine was asked and had ended, µs after the call's start
MEDIA: Final = "lightning_rl.media"  # where images stand in the prompt ids: [start, length, SHA-256] each

CALL_SPAN: Final = "lightning_rl.call"

# An image of an attempt's prompts: one span per content.
MEDIA_SPAN: Final = "lightning_rl.image"
MEDIA_SHA256: Final = "lightning_rl.image.sha256"
MEDIA_TYPE: Final = "lightning_rl.image.media_type"
MEDIA_DATA: Final = "lightning_rl.image.data"

# The tools that an attempt's calls were shown: one span per content, known by the digest that `TOOLS` is.
TOOLS_SPAN: Final = "lightning_rl.tool_schemas"
TOOL_SCHEMAS: Final = "lightning_rl.tool_schemas.json"

# What an agent says on its way, one span each.
REWARD_SPAN: Final = "lightning_rl.reward"
MESSAGE_SPAN: Final = "lightning_rl.message"
OBJECT_SPAN: Final = "lightning_rl.object"
EXCEPTION_SPAN: Final = "lightning_rl.exception"
OPERATION_SPAN: Final = "lightning_rl.operation"

REWARD_NAME: Final = "lightning_rl.reward.name"
REWARD_VALUE: Final = "lightning_rl.reward.value"
REWARD_CALL: Final = "lightning_rl.reward.call_id"
LINK: Final = "agentlightning.link"  # Agent-lightning's: what a reward is linked to
TAG: Final = "agentlightning.tag"
MESSAGE: Final = "lightning_rl.message.text"
OBJECT: Final = "lightning_rl.object.json"
OPERATION_NAME: Final = "lightning_rl.operation.name"
OPERATION_INPUTS: Final = "lightning_rl.operation.inputs"  # JSON, as the output
OPERATION_OUTPUT: Final = "lightning_rl.operation.output"

# What an attempt printed, and where it was: one span, by the runner.
LOG_SPAN: Final = "lightning_rl.log"
LOG_STDOUT: Final = "lightning_rl.log.stdout"
LOG_STDERR: Final = "lightning_rl.log.stderr"
LOG_TRACEBACK: Final = "lightning_rl.log.traceback"

# Whose a span is: an attribute of it or of its resource while it travels.
ROLLOUT_ID: Final = "lightning_rl.rollout_id"
ATTEMPT_ID: Final = "lightning_rl.attempt_id"
# The same as Agent-lightning's tracers write it, for agents that come from there.
AGENT_LIGHTNING_ROLLOUT_ID: Final = "agentlightning.rollout_id"
AGENT_LIGHTNING_ATTEMPT_ID: Final = "agentlightning.attempt_id"

# What else OTLP says of a span; status and scope under the names that OpenTelemetry gives them as attributes.
PARENT_SPAN: Final = "lightning_rl.parent_span"
EVENTS: Final = "lightning_rl.events"
RESOURCE: Final = "lightning_rl.resource"
STATUS_CODE: Final = "otel.status_code"
STATUS_DESCRIPTION: Final = "otel.status_description"
SCOPE: Final = "otel.scope.name"
KIND: Final = "lightning_rl.kind"  # CLIENT, SERVER, PRODUCER or CONSUMER

# Of spans on their way out alone: the root of an attempt's trace, and what its store keeps it under.
ROLLOUT_SPAN: Final = "lightning_rl.rollout"
CALL_ID: Final = "lightning_rl.call_id"
MODE: Final = "lightning_rl.mode"
GROUP_ID: Final = "lightning_rl.group_id"
STATUS: Final = "lightning_rl.status"
REWARDS: Final = "lightning_rl.rewards"  # and the name of one
AGENT_NAME: Final = "gen_ai.agent.name"

# Of rollout traces alone: what a person looks for in them.
TASK: Final = "lightning_rl.task"  # JSON
STEP: Final = "lightning_rl.step"
COUNTS: Final = "lightning_rl.counts"  # whether the attempt is the one of its rollout that counts
LOGPROB_MEAN: Final = "lightning_rl.logprob.mean"
LOGPROB_MIN: Final = "lightning_rl.logprob.min"
LOGPROB_SUM: Final = "lightning_rl.logprob.sum"
PROMPT_TEXT: Final = "lightning_rl.prompt.text"
RESPONSE_TEXT: Final = "lightning_rl.response.text"

# Names of ours that a runner may send; everything else of ours is said by the gateway alone.
EMITTED_SPANS: Final = frozenset({REWARD_SPAN, MESSAGE_SPAN, OBJECT_SPAN, EXCEPTION_SPAN, OPERATION_SPAN})
EMITTED_ATTRIBUTES: Final = frozenset(
    {REWARD_NAME, REWARD_VALUE, REWARD_CALL, MESSAGE, OBJECT, OPERATION_NAME, OPERATION_INPUTS, OPERATION_OUTPUT}
)


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
