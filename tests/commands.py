"""A command of `lightning-rl` as a person types it, in a fork of the tests' process: a new interpreter takes seconds to
load what the command needs, and this process has it loaded."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import print_exc

from lightning_rl.__main__ import main


def forked(place: Path, output: Path, words: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """The exit status and the output of the command in the folder `place`, in this environment. `output` is a folder
    for the files that hold what it prints."""
    out, err = (output / name for name in ("stdout", "stderr"))
    child = os.fork()
    if child == 0:
        status = 1
        with out.open("w") as sys.stdout, err.open("w") as sys.stderr:
            try:
                os.chdir(place)
                os.environ.clear()
                os.environ.update(env)
                sys.path.insert(0, str(place))
                sys.argv = ["lightning-rl", *words]
                main()
                status = 0
            except SystemExit as left:
                if isinstance(left.code, str):
                    print(left.code, file=sys.stderr)
                status = left.code if isinstance(left.code, int) else int(left.code is not None)
            except BaseException:  # noqa: BLE001
                print_exc()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(status), out.read_text(), err.read_text())
