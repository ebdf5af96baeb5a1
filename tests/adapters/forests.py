"""Random attempts: calls that continue any earlier call, with token ids that say whose they are."""

from hypothesis import strategies as st

from lightning_rl_adapters.call import Call, VersionRange


def make_call(
    number: int, parent: int | None, prompt: int = 2, response: int = 2, *, delivered: bool = True, model: str = "m",
    exact: bool = True, trainable: bool = True,
) -> Call:  # fmt: skip
    """Call `number`, whose prompt ids are number*100+i and whose response ids are number*100+50+i."""
    return Call(
        call_id=f"c{number}",
        rollout_id="r",
        attempt_id="a",
        number=number,
        parent_id=None if parent is None else f"c{parent}",
        model=model,
        prompt_ids=[number * 100 + i for i in range(prompt)],
        response_ids=[number * 100 + 50 + i for i in range(response)],
        logprobs=[-0.5 * (i + 1) for i in range(response)],
        versions=[VersionRange(number, 0, response)] if response else [],
        temperature=1.0,
        finish_reason="stop",
        delivered=delivered,
        exact=exact,
        trainable=trainable,
    )


@st.composite
def attempts(draw: st.DrawFn, max_calls: int = 12) -> list[Call]:
    """The calls of one attempt in order of arrival; only delivered calls are continued."""
    calls: list[Call] = []
    for number in range(draw(st.integers(0, max_calls))):
        continuable = [None, *(c.number for c in calls if c.delivered)]
        calls.append(
            make_call(
                number,
                draw(st.sampled_from(continuable)),
                draw(st.integers(1, 3)),
                draw(st.integers(0, 4)),
                delivered=draw(st.integers(0, 9)) > 0,
            )
        )
    return calls
