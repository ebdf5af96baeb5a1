"""Fields that clients of vLLM and SGLang send beside an API's own, and why a field that is refused is refused."""

from typing import Any

from lightning_rl_proxy.errors import GatewayError

# Of vLLM's and SGLang's own fields, which clients send as extra ones: what says the same in every dialect ...
ENGINE_FIELDS = frozenset(
    {
        "stop_token_ids", "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "guided_json",
        "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "regex", "ebnf",
        "chat_template_kwargs", "enable_thinking", "priority",
    }
)  # fmt: skip
# ... and what would change the answer and is not done here, but for the values that ask for nothing.
ENGINE_OFF: dict[str, tuple[Any, ...]] = {
    "ignore_eos": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "no_stop_trim": (False,),
    "stop_regex": ([],),
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "chat_template": (),
    "documents": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "thinking_token_budget": (),
    "lora_path": (),
    "typical_p": (1,),
}
# Why what is refused is refused, by the name of the field.
WHY = {
    "ignore_eos": "an answer ends with its turn; a prompt of Completions may go on",
    "continue_final_message": "Chat Completions' word; Messages goes on from a last message of the assistant",
    "add_generation_prompt": "without it there is no answer to give, but with continue_final_message",
    "use_beam_search": "tokens of a beam were not sampled: they have no log probability to train on",
    "length_penalty": "of beam search",
    "early_stopping": "of beam search",
    "include_stop_str_in_output": "the text of an answer ends before what stopped it; its tokens do not",
    "skip_special_tokens": "a text that shows special tokens would come back as other tokens",
    "no_stop_trim": "the text of an answer ends before what stopped it; its tokens do not",
    "stop_regex": "stop strings are looked for in the gateway, as texts",
    "structural_tag": "its marks differ between chat formats and engines",
    "guided_whitespace_pattern": "no engine here takes it with a request",
    "truncate_prompt_tokens": "a shorter prompt is another one: leave messages out instead",
    "prompt_logprobs": "prompts are not scored",
    "chat_template": "the chat format is the policy's, the same in every call",
    "documents": "chat formats here have no place for them: put them into a message",
    "logits_processors": "an engine would run what an agent sends",
    "custom_logit_processor": "an engine would run what an agent sends",
    "custom_params": "of custom_logit_processor",
    "vllm_xargs": "what they do is not known here",
    "thinking_token_budget": "no engine here takes it with a request",
    "lora_path": "which weights answer is the run's business",
    "typical_p": "no engine here has it",
    "modalities": "answers are text",
    "audio": "answers are text",
    "web_search_options": "nothing here searches the web",
    "response_format": "this dialect says it otherwise, or not at all",
    "suffix": "an answer is sampled behind its prompt, not into it",
    "background": "answers are given while their client waits",
    "conversation": "conversations are not kept: send the items, or previous_response_id",
    "max_tool_calls": "no tool is run here",
    "moderation": "nothing is moderated here",
    "prompt": "stored prompts are not kept here: send the text",
    "n": "this API has one answer",
    "max_tokens": "this dialect's word is max_output_tokens",
    "max_completion_tokens": "this dialect's word is max_output_tokens",
    "logprobs": "this API has none",
    "mcp_servers": "no tool is run here",
    "container": "no tool is run here",
    "compaction": "nothing is compacted here",
    "thread": "conversations are not kept here: send the messages",
}


def unsupported(name: str, value: Any) -> GatewayError:
    """A field changes the answer and cannot be honoured."""
    return GatewayError(
        400,
        f"{name}={str(value)[:200]!r} is not supported here{f' ({WHY[name]})' if name in WHY else ''}; leave it out",
        param=name,
        kind="unsupported_parameter",
    )
