"""The links of the built site: each that stays on the site leads to a page of it, and each anchor to a place in that
page.

Invariant: it looks at the files alone, so it says the same on every machine. A page that loads anything from elsewhere
(a script, a font, a picture) is an error too: the site is whole without the network.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What loads by itself when the page is opened; a link is followed by who reads.
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href"), ("source", "src")}
NOT_LOADED_RELATIONS = {"canonical", "prev", "next", "alternate", "edit"}


class Page(HTMLParser):
    """What a page has that can be linked to, and what it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        self.anchors |= {has[name] for name in ("id", "name") if name in has}
        for name in ("href", "src"):
            if name not in has:
                continue
            relations = set(has.get("rel", "").split())
            is_loaded = (tag, name) in LOADED and not (relations & NOT_LOADED_RELATIONS)
            (self.loaded if is_loaded else self.links).append(has[name])


def dead(site: Path, url: str = "") -> Iterator[str]:
    """What is wrong with the links, a line each. `url` is where the site is published, if that is known."""
    below = urlsplit(url).path.rstrip("/") + "/"
    pages = {file.resolve(): Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        name = file.relative_to(site.resolve())
        for link in page.loaded:
            if urlsplit(link).netloc:
                yield f"{name} loads {link}"
        for link in dict.fromkeys(page.links + page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("//"):
                continue
            path = unquote(parts.path)
            # Only 404.html, which is shown at any address, links from the root.
            base = site.resolve() if path.startswith(below) else file.parent
            target = (base / path.removeprefix(below)).resolve() if path else file
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{name} links to {link}, where nothing is"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name} links to {link}, a page without that anchor"


if __name__ == "__main__":
    found = list(dead(Path(sys.argv[1]), *sys.argv[2:]))
    print("\n".join(found) or "every link of the site leads somewhere")
    sys.exit(bool(found))
