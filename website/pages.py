"""What the site is built from: the project's Markdown and notebooks, put into one folder, `build/docs` (mkdocs.yml).

Invariant: a link that works in the repository works on the site. To a page it leads to the page, to a picture to the
picture, and to any other file of the project to a page with its text. A link that leads nowhere is an error.
"""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from website.notebooks import markdown_of

ROOT = Path(__file__).parents[1]
# Where a page stands that is not in docs/, or whose name means something else to the builder.
NAMES = {
    "README.md": "index.md",
    "docs/index.md": "all-pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/sql_agent/README.md": "tutorials/first_agent.md",
    "examples/any_language/README.md": "examples/any_language.md",
    "proxy/README.md": "reference/floors/proxy.md",
    "adapters/README.md": "reference/floors/adapters.md",
}
PICTURES = {".png", ".svg", ".jpg"}
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
_CODE_OR_TARGET = re.compile(r"`[^`\n]*`|\]\(([^)\s]+)\)")


class DeadLink(Exception):
    """A link to a file that the project does not have."""


def place_of(file: str) -> str:
    """Where a file of the project stands in the site's folder; both paths are relative, with slashes."""
    if file in NAMES:
        return NAMES[file]
    path = PurePosixPath(file)
    if path.parts[0] == "docs" and path.suffix in {".md", *PICTURES}:
        return str(path.relative_to("docs"))
    if path.parts[0] == "docs" and path.suffix == ".ipynb":
        return str(path.relative_to("docs").with_suffix(".md"))
    shown = file.lstrip(".")  # the builder passes over hidden folders
    return f"source/{shown}" if path.suffix in PICTURES else f"source/{shown}.md"


def with_links(text: str, rewritten: Callable[[str], str]) -> str:
    """The page with each target of a link or picture replaced; code is left as it is."""
    lines, fence = [], ""
    for line in text.split("\n"):
        mark = re.match(r" *(`{3,}|~{3,})", line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        lines.append(
            line
            if fence
            else _CODE_OR_TARGET.sub(lambda found: f"]({rewritten(found[1])})" if found[1] else found[0], line)
        )
    return "\n".join(lines)


def as_page(file: str, text: str) -> str:
    """A file of the project that is no page of its own, as a page: its path and its text, not in the search."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    language = LANGUAGES.get(PurePosixPath(file).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {file}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


class Site:
    """The site's folder while it is filled: pages bring the files that they link to."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._placed: set[str] = set()

    def place(self, file: str) -> str:
        """Put the file into the site's folder, once; where it stands there."""
        place = place_of(file)
        if file in self._placed:
            return place
        self._placed.add(file)
        source, target = self._root / file, self._folder / place

        def written(text: str) -> str:
            return with_links(text, lambda link: self._rewritten(file, place, link))

        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in PICTURES:
            shutil.copyfile(source, target)
        elif source.suffix == ".ipynb":
            target.write_text(markdown_of(source, target.with_suffix(""), written))
        elif place.startswith("source/"):
            target.write_text(as_page(file, source.read_text()))
        else:
            target.write_text(written(source.read_text()))
        return place

    def _rewritten(self, file: str, place: str, link: str) -> str:
        path, mark, anchor = link.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link
        found = (self._root / file).parent.joinpath(path).resolve()
        if not found.is_file() or not found.is_relative_to(self._root.resolve()):
            raise DeadLink(f"{file} links to {link}, which is no file of the project")
        linked = self.place(found.relative_to(self._root.resolve()).as_posix())
        up = len(PurePosixPath(place).parts) - 1
        return "../" * up + linked + mark + anchor


def write(folder: Path, root: Path = ROOT) -> None:
    """Fill the folder anew with all pages of the project."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    site = Site(root, folder)
    for file in [*NAMES, *pages(root)]:
        site.place(file)
    shutil.copytree(root / "website" / "theme", folder / "theme")


def pages(root: Path = ROOT) -> list[str]:
    """The pages and notebooks of docs/."""
    found = (file for kind in ("*.md", "*.ipynb") for file in (root / "docs").rglob(kind))
    return sorted(file.relative_to(root).as_posix() for file in found if ".ipynb_checkpoints" not in file.parts)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
