"""The attribute names of a span, each written once: GenAI conventions first, ours where they have none."""

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

CALL_SPAN: Final = "lightning_rl.call"
