"""What a person must hear of while it lasts: a disk that is full, a pause that nobody ended.

Whoever sees such a condition keeps one `Alert` and tells of its beginning and its end; everything is logged to
`ALARMS`, and the process decides who reads that.
"""

import logging

ALARMS = logging.getLogger(__name__)


class Alert:
    """One condition; `about` names the thing in trouble. It is told once when it begins, and once when it is over."""

    def __init__(self, about: str) -> None:
        self._about = about
        self._told = False

    def begin(self, what: str) -> None:
        """It is so now; `what` says what happens meanwhile and what to do."""
        if not self._told:
            self._told = True
            ALARMS.error("trouble with %s: %s", self._about, what)

    def end(self) -> None:
        """It is so no longer."""
        if self._told:
            self._told = False
            ALARMS.warning("trouble with %s is over", self._about)
