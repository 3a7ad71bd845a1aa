"""The documentation holds together: the site builds, links lead somewhere, and a forge shows the same."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import get_args

import pytest
from markdown_it import MarkdownIt

from holdfast.journal import AnyEvent
from kit.harness import REPO, Result, finish

PAGES = sorted((REPO / "docs").rglob("*.md"))
SOURCES = [
    path
    for folder in ("src", "tests", "bench", "examples", "tools")
    for path in sorted((REPO / folder).rglob("*.py"))
] + [REPO / "Makefile"]
FORGE = MarkdownIt("commonmark").enable("table")


def build(repo: Path, site: Path) -> Result:
    """The strict build: a warning, also about a link or an anchor, ends it with an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return finish(command, cwd=repo, env={"NO_MKDOCS_2_WARNING": "1"}, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    result = build(REPO, place)
    assert result.code == 0, result.text
    return place


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of all that the site is built from, to be broken."""
    for name in ("docs", "tools", "examples"):
        shutil.copytree(REPO / name, tmp_path / name)
    shutil.copy(REPO / "mkdocs.yml", tmp_path)
    return tmp_path


def test_the_site_builds_without_a_warning(site: Path) -> None:
    for page in PAGES:
        assert (site / page.relative_to(REPO / "docs")).with_suffix(".html").is_file()


@pytest.mark.parametrize(
    "link",
    [
        "no-such-page.md",
        "checkpoints.md#no-such-heading",
        "../../examples/no_such.py",
        "../examples/train_gpt.py",
    ],
)
def test_a_broken_link_fails_the_build(copied: Path, link: str) -> None:
    with (copied / "docs" / "guides" / "hangs.md").open("a", encoding="utf-8") as page:
        page.write(f"\nSee [there]({link}).\n")
    result = build(copied, copied / "site")
    assert result.code != 0, result.text
    assert link.split("#")[-1] in result.text


def test_a_page_that_is_in_no_part_fails_the_build(copied: Path) -> None:
    (copied / "docs" / "guides" / "new.md").write_text("# New\n", encoding="utf-8")
    result = build(copied, copied / "site")
    assert result.code != 0, result.text
    assert "guides/new.md" in result.text


def test_a_viewer_of_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?(?:https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        assert not loads.findall(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), (
            sheet
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO / "docs")))
def test_the_site_shows_a_page_as_a_forge_does(page: Path, site: Path) -> None:
    html = (site / page.relative_to(REPO / "docs")).with_suffix(".html").read_text(encoding="utf-8")
    article = html[html.index("<article") : html.index("</article>")]
    forge = FORGE.render(page.read_text(encoding="utf-8"))
    for tag in ("h1", "h2", "h3", "table", "tr", "li", "pre"):
        count = [len(re.findall(rf"<{tag}[ >]", text)) for text in (forge, article)]
        assert count[0] == count[1], f"<{tag}>: {count[0]} on a forge, {count[1]} on the site"


@pytest.mark.parametrize(
    "page",
    [*PAGES, REPO / "README.md", REPO / "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(REPO)),
)
def test_every_link_leads_to_a_file_on_a_forge_too(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith(("https://", "#")):
            assert (page.parent / link.partition("#")[0]).is_file(), link


def test_every_page_that_the_source_names_exists() -> None:
    named = {
        (page, str(path.relative_to(REPO)))
        for path in SOURCES
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert named
    assert not {one for one in named if not (REPO / one[0]).is_file()}


def reference(repo: Path) -> Result:
    return finish([sys.executable, "tools/reference.py", "--check"], cwd=repo)


def test_exit_codes_settings_and_events_are_on_their_pages_as_the_code_has_them() -> None:
    result = reference(REPO)
    assert result.code == 0, result.text


@pytest.mark.parametrize(
    ("page", "row"),
    [
        ("exit-codes.md", "| 34 | `STORAGE_FAILED` |"),
        ("configuration.md", "| `checkpoint.interval` |"),
        ("journal.md", "| `run_created` | The run exists"),
    ],
)
def test_a_table_that_differs_from_the_code_is_found(copied: Path, page: str, row: str) -> None:
    path = copied / "docs" / "reference" / page
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(row)]
    assert len(kept) == len(lines) - 1
    path.write_text("".join(kept), encoding="utf-8")
    result = reference(copied)
    assert result.code == 1, result.text
    assert page in result.out
    assert "make docs" in result.out


def test_every_event_of_the_journal_says_what_it_means() -> None:
    for kind in get_args(AnyEvent):
        assert (kind.__doc__ or "").strip(), kind
