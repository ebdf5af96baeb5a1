#!/bin/sh
# The same endpoint in another dialect: one answer of Anthropic's Messages API, printed while it is written.
#
# Needs curl and jq. Usage: sh stream.sh QUESTION
set -eu

jq -nc --arg model "$OPENAI_MODEL" --arg text "$1" \
    '{model: $model, max_tokens: 64, stream: true, messages: [{role: "user", content: $text}]}' |
    curl -sS --fail-with-body --no-buffer --max-time 60 "$OPENAI_BASE_URL/messages" \
        -H "x-api-key: $OPENAI_API_KEY" -H "Content-Type: application/json" --data-binary @- |
    sed -un 's/^data: //p' |
    jq --unbuffered -rj 'if .type == "error" then error(.error.message) else .delta.text // empty end'
echo
