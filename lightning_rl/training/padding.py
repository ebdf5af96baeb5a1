"""Token ids as lists of one fixed length, each with the mask that says which of them are real.

Prompts stand to the right, next to what answers them, so a prompt that is too long loses its beginning; responses
stand to the left and lose their end.
"""

from collections.abc import Sequence


def get_left_padded_ids_and_attention_mask(
    ids: Sequence[int], max_length: int, pad_token_id: int
) -> tuple[list[int], list[int]]:
    """The last `max_length` ids with padding before them, and their mask (1 real, 0 pad); both of that length."""
    tail = list(ids)[max(len(ids) - _checked(max_length), 0) :]
    padding = max_length - len(tail)
    return [pad_token_id] * padding + tail, [0] * padding + [1] * len(tail)


def get_right_padded_ids_and_attention_mask(
    ids: Sequence[int], max_length: int, pad_token_id: int
) -> tuple[list[int], list[int]]:
    """The first `max_length` ids with padding after them, and their mask (1 real, 0 pad); both of that length."""
    head = list(ids)[: _checked(max_length)]
    padding = max_length - len(head)
    return head + [pad_token_id] * padding, [1] * len(head) + [0] * padding


def _checked(max_length: int) -> int:
    if max_length < 0:
        raise ValueError(f"max_length is {max_length}; a list of ids has a length of 0 or more")
    return max_length
