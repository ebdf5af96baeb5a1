#!/bin/sh
# One rollout without our library: start it, run the agent, say what it earned, read what was recorded. All by curl.
#
# Needs a running server: its URL in LIGHTNING_RL_URL, its admin key in LIGHTNING_RL_ADMIN_KEY.
# Usage: sh rollout.sh QUESTION ANSWER
set -eu

here=$(dirname "$0")

api() { # PATH [curl's options]: the control plane's answer
    path=$1
    shift
    curl -sS --fail-with-body --max-time 120 "$LIGHTNING_RL_URL/api/v1$path" "$@" \
        -H "Authorization: Bearer $LIGHTNING_RL_ADMIN_KEY" -H "Content-Type: application/json"
}

# The claim: a rollout, its first attempt, and the attempt's own URL and key. The admin key stays here.
claim=$(jq -nc --arg question "$1" --arg answer "$2" '{task: {question: $question, answer: $answer}}' |
    api /rollouts/start --data-binary @-)
field() { printf '%s' "$claim" | jq -er "$1"; }
attempt="/rollouts/$(field .rollout.rollout_id)/attempts/$(field .attempt.attempt_id)"

if output=$(
    OPENAI_BASE_URL=$(field .resources.main_llm.base_url) \
    OPENAI_API_KEY=$(field .resources.main_llm.api_key) \
    OPENAI_MODEL=$(field .resources.main_llm.model) \
        sh "$here/agent.sh" "$1"
); then
    case $output in *"$2"*) reward=1 ;; *) reward=0 ;; esac
    end="{\"status\": \"succeeded\", \"reward\": $reward}"
else
    end='{"status": "failed", "error": {"type": "AgentFailed", "message": "agent.sh ended with an error"}}'
fi
api "$attempt/finish" --data-binary "$end" > /dev/null

echo "answer: $output"
echo "reward: ${reward:-none}"
api "$attempt/triplets" |
    jq -r '.triplets[] | "call: \(.prompt_token_ids | length) prompt tokens, \(.response_token_ids | length) sampled, reward \(.reward)"'
