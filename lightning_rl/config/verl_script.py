"""The command of a shell script that starts verl's trainer: its overrides, with the script's variables filled in.

The script is read by bash itself, since its arrays, conditions and arithmetic are bash's. Invariant: nothing of it is
carried out. Bash runs restricted, without a search path, so that every command of the script is a name that is not
found; that of `python -m verl...` or `recipe...` is noted, the others are skipped. What the script writes to files is
taken out first.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_rl.errors import Explained

_TRAINERS = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "recipe.dapo.main_dapo")
_CONFIGS = ("ppo_trainer", "ppo_trainer.yaml", "dapo_trainer", "dapo_trainer.yaml")  # DAPO's changes no default
_SECONDS = 30
# Comments and quoted texts are kept as they are; of what stands outside of them, redirections to files are taken out.
_REDIRECTION = re.compile(
    r"""(?P<kept>(?:(?<=\s)|^)\#[^\n]*|'[^']*'|"(?:\\.|[^"\\])*")"""
    r"""|(?<=[\s\d&])>>?\s*(?![&(])(?:"[^"]*"|[^\s;|&()'"]+)""",
    re.MULTILINE,
)
# Options of the shell (`set -euo pipefail`), with which it would end at the first command that it has no words for.
_OPTIONS = re.compile(r"(?<![\w$./-])set(?:[ \t]+[-+][A-Za-z]+(?:[ \t]+(?:errexit|nounset|xtrace|pipefail|verbose))?)+")
_OWN_NAME = re.compile(r"\$\{?BASH_SOURCE(\[0\])?\}?")
# What restricted bash has no words for, and the few commands that scripts compute their paths with.
_PREAMBLE = r"""
command_not_found_handle() {
  case " $*" in
    *" -m verl."*|*" -m recipe."*) printf '%s\0' "$@" $'\1' >&"$NOTED"; return 0;;
    *" -c "*) return 1;;
  esac
  return 0
}
exec() { "$@"; }
ulimit() { :; }
source() { :; }
WHERE=$PWD
cd() { case "$1" in /*) WHERE=$1;; *) WHERE=$WHERE/$1;; esac; }
pwd() { echo "$WHERE"; }
dirname() { case "$1" in */*) echo "${1%/*}";; *) echo .;; esac; }
basename() { local name=${1%/}; name=${name##*/}; echo "${name%"$2"}"; }
date() {
  local word
  for word; do case "$word" in +*) printf "%(${word#+})T\n" -1; return;; esac; done
  printf "%(%c)T\n" -1
}
PATH=/nonexistent
"""


class ScriptError(Explained, ValueError):
    """A script that does not start verl's trainer, or that cannot be read."""


class VerlCommand(NamedTuple):
    """What a script starts: the overrides, and the Hydra file that they stand on (None: verl's `ppo_trainer`)."""

    overrides: list[str]
    config: Path | None


def command_of(script: Path, environment: Mapping[str, str] = os.environ) -> VerlCommand:
    """The command by which a script starts verl's PPO trainer; variables that it does not set are the environment's.

    Raises ScriptError where it starts none, several, or another program of verl's.
    """
    words = _one(_commands(script.read_text(encoding="utf-8"), script, environment), script)
    if "-m" not in words:  # the command stands in one word, as `bash -c` and `ssh` take it
        inner = next(word for word in words if " -m verl." in word or " -m recipe." in word)
        words = _one(_commands(inner, script, environment), script)
    module = words[words.index("-m") + 1]
    if module not in _TRAINERS:
        raise ScriptError(f"{script} starts {module}: only the training of {_TRAINERS[0]} is translated")
    options, overrides = _options(words[words.index("-m") + 2 :])
    name = options.get("config-name", _CONFIGS[0])
    return VerlCommand(overrides, _config_file(script, options.get("config-path", ""), name))


def _one(commands: list[list[str]], script: Path) -> list[str]:
    if len(commands) != 1:
        count = "no command" if not commands else f"{len(commands)} commands"
        raise ScriptError(
            f"{script} holds {count} of the form `python -m verl.trainer.main_ppo key=value ...` that bash comes to: "
            "set the environment variables that the script asks for, or write the overrides behind `lightning-rl train`"
        )
    return commands[0]


def _commands(text: str, script: Path, environment: Mapping[str, str]) -> list[list[str]]:
    """Every command in the text of a script that runs a module of verl's, as words."""
    bash = shutil.which("bash")
    if bash is None:
        raise ScriptError(f"{script} is read by bash, and there is none: write the overrides into a file of words")
    text = _REDIRECTION.sub(lambda match: match["kept"] or " ", text)
    text = _OPTIONS.sub(":", text)
    text = _OWN_NAME.sub("$0", text)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as noted:
        preamble = Path(folder) / "preamble"
        preamble.write_text(_PREAMBLE)
        variables = {name: value for name, value in environment.items() if not name.startswith("BASH_FUNC_")}
        try:
            subprocess.run(
                [bash, "-r", "-c", text, str(script)],
                env={**variables, "BASH_ENV": str(preamble), "NOTED": str(noted.fileno())},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=[noted.fileno()],
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ScriptError(f"{script} does not come to an end within {_SECONDS} s when bash reads it") from error
        noted.seek(0)
        words = noted.read().decode()
    return [command.split("\0") for command in words.split("\0\1\0") if command]


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Hydra's options among the words, without their dashes, and the overrides."""
    options: dict[str, str] = {}
    overrides: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            options[name] = value if sign else next(remaining, "")
        elif word.strip():
            overrides.append(word)
    return options, overrides


def _config_file(script: Path, folder: str, name: str) -> Path | None:
    """The file of `--config-path` and `--config-name`, which people keep beside the script or above it; None: verl's
    `ppo_trainer`."""
    file = f"{name.removesuffix('.yaml')}.yaml"
    for place in (Path(folder) / file, *(up / folder / file for up in script.resolve().parents)):
        if place.is_file():
            return place
    if name in _CONFIGS:
        return None  # verl's own, which `verl_keys.DEFAULTS` stand for
    if re.fullmatch(r"ppo_\w+_trainer\.yaml", file):
        raise ScriptError(
            f"{script} starts verl's {file.removesuffix('.yaml')}, and models are trained by FSDP2 here: begin with a "
            "script of verl's FSDP trainer, whose configuration is ppo_trainer"
        )
    raise ScriptError(f"{script} names the configuration {Path(folder) / file}, which is not there, nor beside it")
