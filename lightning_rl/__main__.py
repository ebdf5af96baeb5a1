"""The entry point of the command line, also as `python -m lightning_rl`.

Invariant: what a person did wrong, and a Ctrl-C at any moment, is a line on stderr; only what nobody foresaw shows a
traceback.
"""

import io
import logging
import signal
import sys

from lightning_rl.errors import Explained

_INTERRUPTED = 130  # as shells say of a Ctrl-C


def main() -> None:
    """Run the command that the arguments name."""
    try:
        from lightning_rl.cli import app

        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.isatty():
            sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter shows a question mark
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except (Explained, OSError) as error:
        sys.exit("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and said; the interpreter may end in peace


if __name__ == "__main__":
    main()
