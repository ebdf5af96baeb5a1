"""What was said in a rollout, as text."""

from lightning_rl.trajectories.conversation import SpokenCall, transcript

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}


def test_a_transcript_has_texts_and_calls_and_no_reasoning() -> None:
    first = SpokenCall(
        call_id="a",
        parent_id=None,
        agent=None,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is x?"}, {"type": "image_url"}]},
        ],
        answer={"role": "assistant", "content": "", "reasoning_content": "hidden", "tool_calls": [CALL]},
    )
    then = SpokenCall(
        call_id="b",
        parent_id="a",
        agent=None,
        messages=[{"role": "tool", "tool_call_id": "1", "content": "7"}],
        answer={"role": "assistant", "content": "Seven."},
    )
    assert transcript([first, then]).splitlines() == [
        "system: Be brief.",
        "user: What is x?",
        'assistant calls look {"at": "x"}',
        "tool: 7",
        "assistant: Seven.",
    ]
