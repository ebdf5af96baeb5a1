"""What is wrong with a tool, and what a tool tells the model instead of a result."""

from lightning_rl.errors import Explained


class ToolError(Explained, ValueError):
    """A tool cannot be made or chosen as it stands: the message names it, its place, and what to do."""


class WrongArguments(Exception):
    """The arguments of a call do not fit the tool; the message is for the model."""


class ToolFailed(Exception):
    """Raise it in a tool: the model reads this message as it is, and the call counts as failed."""
