"""The docs site, without building it: its navigation, its reference, its links, and what makes them pages."""

import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.cli import get_docs_for_click

import lightning_rl_adapters
from lightning_rl.cli import app
from tests.pages import ROOT
from website.links import dead
from website.notebooks import markdown_of
from website.pages import NAMES, DeadLink, pages, place_of, with_links, write

REFERENCE = ROOT / "docs" / "reference"
# What users import: every name of these modules.
PUBLIC = ["lightning_rl", "lightning_rl.langgraph", "lightning_rl.loops", "lightning_rl.tools"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the site is built from."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    write(folder)
    return folder


# Navigation


def navigated(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    nested = entries if isinstance(entries, list) else entries.values()
    return [page for entry in nested for page in navigated(entry)]


def settings() -> dict[str, Any]:
    class Loader(yaml.SafeLoader):
        """Takes the tags of mkdocs.yml as they stand: Python's, and those of the environment."""

    for prefix in ("tag:yaml.org,2002:python/", "!"):
        Loader.add_multi_constructor(prefix, lambda loader, suffix, node: suffix)
    loaded: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    return loaded


def test_each_page_stands_once_in_the_navigation() -> None:
    assert sorted(navigated(settings()["nav"])) == sorted({place_of(file) for file in [*NAMES, *pages()]})


def test_only_what_both_builders_know_is_used() -> None:
    plugins = [plugin if isinstance(plugin, str) else next(iter(plugin)) for plugin in settings()["plugins"]]
    assert plugins == ["search", "mkdocstrings"]
    assert "hooks" not in settings()


# The reference


def referenced() -> list[str]:
    """The entries of the reference; the strict build fails where one leads to nothing."""
    pages = (page.read_text() for page in sorted(REFERENCE.glob("*.md")))
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_its_entry(module: str) -> None:
    """Under the module or, where a file of it has the same name, under the file."""
    entries = {name.rpartition(".")[2] for name in referenced() if name.startswith(f"{module}.")}
    assert set(importlib.import_module(module).__all__) - entries == set()


def test_every_module_of_the_adapters_has_its_entry() -> None:
    folder = Path(str(lightning_rl_adapters.__file__)).parent
    modules = {f"lightning_rl_adapters.{file.stem}" for file in folder.glob("*.py")}
    internal = {f"lightning_rl_adapters.{name}" for name in ("__init__", "structs", "text")}
    assert modules - internal == {name for name in referenced() if name.startswith("lightning_rl_adapters.")}


def test_no_entry_stands_twice() -> None:
    names = referenced()
    assert sorted(set(names)) == sorted(names)


def imported(page: Path) -> set[str]:
    """The names of ours that the page's code imports."""
    names = set()
    for module, what in re.findall(r"^ *from (lightning_rl[\w.]*) import (.+)$", code_of(page), re.MULTILINE):
        names |= {f"{module}.{name.strip()}" for name in what.strip("()").split(",")}
    return names


def code_of(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


def test_what_the_guides_import_has_its_entry() -> None:
    guides = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "how-to").glob("*.md")]
    names = set().union(*map(imported, [*guides, ROOT / "docs" / "concepts" / "rewards.md"]))
    entries = set(referenced())  # a name's own, or that of its module
    entries |= {re.sub(r"\.function_tool\.", ".", name) for name in entries}
    assert {name for name in names if not entries & {name, name.rpartition(".")[0]}} == set()


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    command = typer.main.get_command(app)
    said = get_docs_for_click(obj=command, ctx=typer.Context(command), name="lightning-rl", title="Command line")
    assert (REFERENCE / "cli.md").read_text().split() == said.split(), "docs/reference/cli.md is old: run `make docs`"


# Links between the files of the project, as GitHub follows them


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^(```+).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    made: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        same = sum(1 for each in made if re.fullmatch(re.escape(slug) + r"(-\d+)?", each))
        made.add(f"{slug}-{same}" if slug in made else slug)
    return made


def links(page: Path) -> list[str]:
    seen: list[str] = []
    texts = [page.read_text()]
    if page.suffix == ".ipynb":
        texts = ["".join(cell["source"]) for cell in json.loads(texts[0])["cells"] if cell["cell_type"] == "markdown"]
    for text in texts:
        with_links(text, lambda link: seen.append(link) or link)  # type: ignore[func-returns-value]
    return [link for link in seen if "://" not in link]


@pytest.mark.parametrize("file", [*NAMES, *pages()])
def test_its_links_lead_to_files_and_anchors(file: str) -> None:
    page = ROOT / file
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{file} links to {link}"
        assert not anchor or anchor in anchors(target), f"{file} links to {link}"


# From files to pages


def test_links_of_pages_lead_to_pages(written: Path) -> None:
    assert "(langgraph.md)" in (written / "index.md").read_text()  # docs/langgraph.md
    assert "(../contributing.md#the-docs-site)" in (written / "reference" / "training.md").read_text()
    assert "(../notebooks/own_agent.md)" in (written / "notebooks" / "first_hour.md").read_text()


def test_any_other_file_is_a_page_of_its_text(written: Path) -> None:
    assert "(source/examples/sql_agent/agent.py.md)" in (written / "index.md").read_text()
    text = (written / "source" / "examples" / "sql_agent" / "agent.py.md").read_text()
    assert (ROOT / "examples" / "sql_agent" / "agent.py").read_text().rstrip() in text
    assert "exclude: true" in text  # of the search


def test_a_link_to_nothing_is_an_error(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# A page\n")
    (tmp_path / "docs" / "index.md").write_text("[here](gone.md)")
    with pytest.raises(DeadLink, match=r"docs/index\.md links to gone\.md"):
        write(tmp_path / "build", tmp_path)


def test_code_is_left_as_it_is() -> None:
    page = "[a](b.md) `[a](b.md)`\n```\n[a](b.md)\n```\n![a](b.png)"
    assert with_links(page, str.upper) == "[a](B.MD) `[a](b.md)`\n```\n[a](b.md)\n```\n![a](B.PNG)"


def test_a_notebook_shows_what_it_printed(tmp_path: Path) -> None:
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["\x1b[1mone\x1b[0m\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["'two'"]}},
        {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["<Figure>"]}},
        {"output_type": "display_data", "data": {"text/html": ['<iframe srcdoc="a\n\nb"></iframe>']}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": outputs},
    ]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    assert markdown_of(tmp_path / "book.ipynb", tmp_path / "book", str.upper) == (
        "# TITLE\n\n```python\nprint(1)\n```\n\n```text\none\n'two'\n```\n\n![](book/cell-1-2.png)\n\n"
        '<iframe srcdoc="a&#10;&#10;b"></iframe>\n'
    )
    assert (tmp_path / "book" / "cell-1-2.png").read_bytes() == b"\0\0\0"


# The built pages


def built(folder: Path, **files: str) -> list[str]:
    for name, text in files.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "index.html").write_text(text)
    return list(dead(folder))


def test_links_of_the_site_are_followed(tmp_path: Path) -> None:
    assert (
        built(tmp_path, a='<a href="../b/#there">b</a> <a href="https://elsewhere.example/">e</a>', b='<p id="there">')
        == []
    )
    assert built(tmp_path, a='<a href="../c/">') == ["a/index.html links to ../c/, where nothing is"]
    assert built(tmp_path, a='<a href="../b/#gone">') == [
        "a/index.html links to ../b/#gone, a page without that anchor"
    ]
    assert built(tmp_path, a='<a href="#gone">') == ["a/index.html links to #gone, a page without that anchor"]


def test_links_from_the_root_are_below_the_place_where_it_is_published(tmp_path: Path) -> None:
    built(tmp_path, a='<a href="/docs/b/">b</a>', b="")
    assert list(dead(tmp_path, "https://here.example/docs")) == []
    assert list(dead(tmp_path)) == ["a/index.html links to /docs/b/, where nothing is"]


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    script = '<script src="https://cdn.example/x.js"></script>'
    assert built(tmp_path, a=script) == ["a/index.html loads https://cdn.example/x.js"]
    assert built(tmp_path, a='<link rel="canonical" href="https://docs.example/a/">') == []


# The changelog


def test_the_changelog_begins_with_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest in (version, "Unreleased")


# The notebooks


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda file: file.stem)
def test_a_notebook_was_run_whole_and_names_no_machine(file: Path) -> None:
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert not re.search(r'"[^"]*(?<!/home)(?:/tmp/|/root/|/work/|/Users/)', file.read_text())
