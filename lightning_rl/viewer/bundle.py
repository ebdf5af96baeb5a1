"""The page's own modules and answers as one HTML file that needs no server and no network.

Invariant: the file has a policy that lets nothing else run or load: its one script and its one style are named by their
digests. Answers travel as base64 of gzip in an element that no browser runs, so no text of an agent's is ever markup.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from lightning_rl.viewer.run import encoded

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async function|function|const|class) )", re.MULTILINE)
_BEGIN = """(async () => {
"use strict";
const packed = Uint8Array.from(atob(document.getElementById("answers").textContent), (letter) => letter.charCodeAt(0));
const unpacked = new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
globalThis.LIGHTNING_RL_ANSWERS = JSON.parse(await unpacked.text());
"""
_END = "\n})();\n"


def modules(entry: str) -> list[str]:
    """The names of a module and of all that it imports, each behind those that it imports itself."""
    names: list[str] = []

    def add(name: str) -> None:
        if name not in names:
            for imported in _IMPORT.findall((STATIC / name).read_text(encoding="utf-8")):
                add(imported)
            names.append(name)

    add(entry)
    return names


def script(entry: str) -> str:
    """A module with all that it imports as one classic script; their top-level names are told apart by themselves."""
    parts = (_EXPORT.sub("", _IMPORT.sub("", (STATIC / name).read_text(encoding="utf-8"))) for name in modules(entry))
    return _BEGIN + "\n".join(parts) + _END


def document(title: str, answers: Mapping[str, Any], plain: str) -> str:
    """The file: `answers` by the paths that the page asks; `plain` is HTML that stands there until the script runs, and
    where it never does."""
    code = script("report.js")
    style = (STATIC / "viewer.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{_digest(code)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    packed = base64.b64encode(gzip.compress(encoded(answers), mtime=0)).decode()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n"
        f'<div id="app">{plain}</div>\n'
        f'<script type="application/octet-stream" id="answers">{packed}</script>\n'
        f"<script>{code}</script>\n</body>\n</html>\n"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
