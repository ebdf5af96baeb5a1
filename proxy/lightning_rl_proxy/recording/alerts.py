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
        self._is_logged = False

    def begin(self, problem: str) -> None:
        """It is so now; `problem` says what happens meanwhile and what to do."""
        if not self._is_logged:
            self._is_logged = True
            ALARMS.error("trouble with %s: %s", self._about, problem)

    def end(self) -> None:
        """It is so no longer."""
        if self._is_logged:
            self._is_logged = False
            ALARMS.warning("trouble with %s is over", self._about)
