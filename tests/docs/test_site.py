"""The site of the documents: links, and what a reader without a network sees of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "k8s/README.md"]
)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = LINK.findall((ROOT / page).read_text("utf-8"))
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    shown = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    paths = set(re.findall(r"[\w./-]+\.md", str(shown)))
    pages = {page for page in PAGES if page.startswith("docs/") and "/lab/" not in page}
    assert pages - paths == {"docs/index.md"}
    assert paths <= set(PAGES)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MKDOCS.exists():
        pytest.skip("no .venv-docs: `make docs` makes it")
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.nightly), 380])
def test_it_is_read_and_searched_without_a_network(width: int, site: Path, chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 900})
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    for name in ("index.html", "docs/methods.html", "docs/reference/parts.html"):
        page.goto((site / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width < 1000:
        page.click("label.md-header__button[for=__search]")
    else:
        page.click("input.md-search__input")
    page.keyboard.type("acceptance")
    page.wait_for_selector(".md-search-result__item")
    page.close()
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
