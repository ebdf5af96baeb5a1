"""The control plane as its own tests have it: a real store behind a server."""

from tests.lightning_rl.control_plane.conftest import served

__all__ = ["served"]
