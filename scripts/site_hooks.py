"""Hooks of mkdocs: the site begins with README.md, has the pages beside it, and files that pages link to.

A link from a page to a file outside ``docs`` becomes a link to a copy in the site. Of a link to a folder only
the text stays.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md"} | {
    f"{name}.md": f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")
}
"""Pages that are outside ``docs``, by their names in the site."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s:]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are outside ``docs``, and the files that pages link to."""
    from mkdocs.structure.files import File

    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    texts = [(page.src_uri, page.content_string) for page in files.documentation_pages()]
    for target in sorted({found for name, text in texts for found in _outside(name, text)}):
        if (ROOT / target).is_file():
            files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links point to where their targets are in the site."""
    name = page.file.src_uri
    return _LINK.sub(lambda found: _rewritten(name, found), markdown)


def _rewritten(name: str, found: re.Match[str]) -> str:
    mark, text, link, anchor = found.groups()
    target = _target(name, link)
    inside = next((page for page, source in PAGES.items() if source == target), None)
    if target.startswith("docs/"):
        inside = target.removeprefix("docs/")
    elif inside is None and (ROOT / target).is_file():
        inside = f"files/{target}"
    if inside is None or (ROOT / target).is_dir():
        return text
    return f"{mark}[{text}]({posixpath.relpath(inside, posixpath.dirname(name) or '.')}{anchor or ''})"


def _outside(name: str, text: str) -> set[str]:
    """The files outside ``docs`` that a page links to."""
    targets = {_target(name, found[3]) for found in _LINK.finditer(text)}
    return {each for each in targets if not each.startswith("docs/") and each not in PAGES.values()}


def _target(name: str, link: str) -> str:
    """The path in the repository that a link of a page means."""
    source = PAGES.get(name, f"docs/{name}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
