"""Errors that a person can act on."""


class Explained(Exception):
    """An error whose message names the thing, the place and what to do: nobody needs its traceback."""
