"""Errors that a person can act on."""


class Explained(Exception):
    """An error whose message names the thing, the place and what to do: nobody needs its traceback.

    `comes_again`: a run that is resumed ends with it once more.
    """

    comes_again = False


class InfrastructureError(Explained, RuntimeError):
    """Something that an agent needs is not there, by no fault of its own: its rollout is tried again.

    Raise it for a service of your own that is away. Any other exception of an agent is the agent's, and counts as
    `algorithm.agent_failure` says.
    """


class WorkerDied(Explained, RuntimeError):
    """A process that trains is gone. What it knew is lost, so the run goes on from its last checkpoint, or ends."""
