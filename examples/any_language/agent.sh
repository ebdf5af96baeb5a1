#!/bin/sh
# An agent in plain shell: it asks a model for SQL, shows the model what came back, and prints the SQL that it ends with.
#
# It knows a URL, a key and a model's name (OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL), and nothing of training.
# Needs curl and jq. Usage: sh agent.sh QUESTION
set -eu

say() { # ROLE TEXT: one more message
    messages=$(printf '%s' "$messages" | jq -c --arg role "$1" --arg text "$2" '. + [{role: $role, content: $text}]')
}

ask() { # the model's answer to the messages
    printf '%s' "$messages" |
        jq -c --arg model "$OPENAI_MODEL" '{model: $model, messages: .}' |
        curl -sS --fail-with-body --retry 3 --max-time 60 "$OPENAI_BASE_URL/chat/completions" \
            -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" --data-binary @- |
        jq -er '.choices[0].message.content'
}

look() { # SQL: what the database says; this one holds three things and can only count them
    case $1 in
        *count*) echo 3 ;;
        *) echo "error: no such column" ;;
    esac
}

messages='[]'
say user "$1"
sql=$(ask)
say assistant "$sql"
say user "$(look "$sql")"
verdict=$(ask)
if [ "$verdict" = done ]; then echo "$sql"; else echo "$verdict"; fi
