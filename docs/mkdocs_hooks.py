"""The site of the documents: the repository's own tree, and docstrings as Markdown.

MkDocs knows files of one folder. Here the site's folders are the repository's: `docs/` lies beside
the README, so a link from one to the other, or to a source file, is the same on the site as in a
checkout. What a page links to outside of `docs/` comes along, and so does what that links to.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # Paceline is not installed where the site is built

from paceline.bench.board_page import render_board  # noqa: E402
from paceline.bench.board_rows import read_rows  # noqa: E402

BOARD = "docs/board"
HOME = "README.md"
LANGUAGES = {".py": "python", ".proto": "protobuf", ".yaml": "yaml"}
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the pages where they are in the repository, with all that they link to.

    The board's page is made of its rows here, so that it shows those that are there now.
    """
    site = Files([file for file in files if file.src_dir != config.docs_dir])
    waiting = [f"docs/{file.src_uri}" for file in files if file.src_dir == config.docs_dir]
    waiting = [HOME, *(uri for uri in waiting if not uri.endswith(".py"))]
    done: set[str] = set()
    while waiting:
        uri = waiting.pop()
        path = ROOT / uri
        if uri in done or not path.exists():  # MkDocs itself names the link that leads nowhere
            continue
        done.add(uri)
        if uri.endswith(".md"):
            site.append(File.generated(config, uri, abs_src_path=str(path)))
            waiting += [_target(uri, link[1]) for link in LINK.finditer(path.read_text("utf-8"))]
        elif path.is_dir():
            inside = [child for child in sorted(path.iterdir()) if child.is_file()]
            links = "".join(f"- [{child.name}]({path.name}/{child.name})\n" for child in inside)
            site.append(File.generated(config, f"{uri}.md", content=f"# {uri}\n\n{links}"))
            waiting += [f"{uri}/{child.name}" for child in inside]
        elif not _is_shown(path):
            site.append(File.generated(config, uri, abs_src_path=str(path)))
        else:
            code = f"~~~~~~{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text('utf-8')}\n~~~~~~"
            site.append(
                File.generated(config, f"{uri}.md", content=f"{UNSEARCHED}# {uri}\n\n{code}\n")
            )
    board = render_board(read_rows([ROOT / BOARD]))
    site.append(File.generated(config, f"{BOARD}/index.html", content=board))
    return site


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to source files and folders to the pages that show them."""

    def led(link: re.Match[str]) -> str:
        path = ROOT / _target(page.file.src_uri, link[1])
        return f"]({link[1].rstrip('/')}.md)" if _is_shown(path) else link[0]

    return LINK.sub(led, markdown)


def _target(uri: str, link: str) -> str:
    """Where a link of a page leads, relative to the repository."""
    path = (ROOT / uri).parent / link
    parts: list[str] = []
    for part in path.relative_to(ROOT).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _is_shown(path: Path) -> bool:
    """Whether a page shows it as text: a folder, or a source file."""
    if ROOT / "docs" in path.parents:
        return False
    return path.is_dir() or (path.is_file() and path.suffix not in (".md", ".png", ".svg"))


ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([\w.]+)`")
SHAPE = re.compile(r"#\s+(\w*\[[^\]\n]*\](?: (?:float|int|bool)\w*)?)")
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Sphinx's roles become links, shapes become code, and `a, b: text` an entry for each name."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        module = obj.module.path
        owner = obj.path if obj.is_class or obj.is_module else obj.parent.path if obj.parent else ""

        def reference(role: re.Match[str]) -> str:
            name = role[1]
            if not name.startswith("paceline"):
                name = f"{module if '.' in name or name[0].isupper() else owner}.{name}"
            return f'<autoref optional identifier="{name}"><code>{role[1]}</code></autoref>'

        text = SHAPE.sub(r"`\1`", ROLE.sub(reference, obj.docstring.value))
        head, args, rest = text.partition("Args:\n")
        section, blank, tail = rest.partition("\n\n")
        section = SEVERAL.sub(
            lambda m: "\n".join(f"{m[1]}{name}: {m[3]}" for name in m[2].split(", ")), section
        )
        obj.docstring.value = head + args + section + blank + tail
