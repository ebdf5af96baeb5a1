"""Rewards of single calls: whose they are, and what they come to."""

from lightning_rl.store.contract import Reward
from lightning_rl.store.rewards import added_up, rewards_by_call


def test_the_rewards_of_a_call_add_up_by_name_whichever_name_of_the_call_was_given() -> None:
    rewards = [
        Reward(value=1.0, call_id="c1"),
        Reward(value=0.5, call_id="tool-1"),
        Reward(value=0.25, name="style", call_id="c1"),
        Reward(value=9.0, call_id="c2"),
        Reward(value=7.0),
    ]
    given = rewards_by_call(rewards, {"tool-1": "c1"})
    assert {call: added_up(of_call) for call, of_call in given.items()} == {
        "c1": {"reward": 1.5, "style": 0.25},
        "c2": {"reward": 9.0},
    }
