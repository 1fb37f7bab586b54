"""What mkdocs asks while it builds the site (hooks, named in mkdocs.yml).

Pages in docs/ link to files beside it as GitHub shows them: README.md, a module, a script. Each
file so linked becomes a page of the site, and the links lead there. And pages of the reference
hold marks, `<!-- commands -->`, that are replaced by what the program says of itself.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import docs_reference  # mkdocs puts this folder on the path
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
MARK = re.compile(r"<!-- (\w+) -->")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".csv": "text"}


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for README.md, CONTRIBUTING.md, and every file outside docs/ that is linked."""
    for path, page in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    linked = set()
    for file in [file for file in files if file.is_documentation_page()]:
        home = _home(file.src_uri)
        linked |= {_target(home, path) for path, _ in LINK.findall(file.content_string)}
    for path in sorted(path for path in linked if not _inside(path) and path not in PAGES):
        if (ROOT / path).exists():  # else mkdocs names the page with the broken link
            files.append(File.generated(config, _page(path), content=_source(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Turns links as GitHub sees them into the site's, and marks into what they stand for."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def moved(match: re.Match) -> str:
        path = _target(_home(here), match[1])
        to = posixpath.relpath(_page(path), posixpath.dirname(here) or ".")
        return to + (match[2] or "")

    markdown = LINK.sub(moved, markdown)
    return MARK.sub(_marked, markdown) if here.startswith("reference/") else markdown


def _marked(match: re.Match) -> str:
    make = docs_reference.PARTS.get(match[1])
    if make is None:
        raise PluginError(f"{match[0]}: known marks are {', '.join(docs_reference.PARTS)}")
    return make()


def _home(uri: str) -> str:
    """The folder, from the root, whose relative links a page holds."""
    return "." if uri in PAGES.values() else posixpath.dirname(posixpath.join("docs", uri))


def _target(home: str, link: str) -> str:
    """The path from the root that a link leads to."""
    return posixpath.normpath(posixpath.join(home, link))


def _inside(path: str) -> bool:
    return path.startswith("docs/")


def _page(path: str) -> str:
    """The file of the site, from docs/, that shows the file at `path`."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if _inside(path) else f"source/{path}.md"


def _source(path: str) -> str:
    """A page that shows a file, or the files of a folder."""
    whole = ROOT / path
    files = [whole] if whole.is_file() else sorted(p for p in whole.iterdir() if p.is_file())
    blocks = [f"# `{path}`"]
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        title = f"## `{name}`\n\n" if whole.is_dir() else ""
        if file.suffix == ".md":
            blocks.append(title + file.read_text(encoding="utf-8"))
        elif (text := _text(file)) is not None:
            language = LANGUAGES.get(file.suffix, "text")
            blocks.append(f"{title}``````{language}\n{text}\n``````")
    return "\n\n".join(blocks) + "\n"


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # weights and pictures
        return None
