"""Pages are written for a forge, which shows them as they are; here they become what MkDocs reads alike.

**Links** to files outside of docs/: a page of docs/guides/ writes `../../examples/slurm/train.sbatch`. The
site has no such place above its root, so the file becomes part of it, as `examples/slurm/train.sbatch`, and
the link is shortened by one step.

**Tables and lists** may follow a paragraph without an empty line on a forge; Python-Markdown needs one.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.plugins.site_hooks")  # MkDocs counts the warnings of these

_LINK = re.compile(r"\]\((?P<target>(?:\.\./)+(?P<file>examples/[\w./-]+))\)")
_FENCE = re.compile(r"\s*(```|~~~)")
_ITEM = re.compile(r"[*-] |1\. ")


def spaced(markdown: str) -> str:
    """With an empty line before each table and each list that follows a paragraph."""
    lines: list[str] = []
    fence = ""
    first = ""  # the first line of the block that `line` belongs to
    for line in markdown.splitlines():
        if fence:
            fence = "" if line.strip() == fence else fence
        elif opened := _FENCE.match(line):
            fence = opened[1]
            first = first or line
        elif not line.strip():
            first = ""
        else:
            begins = (line.startswith("|") and not first.startswith("|")) or (
                _ITEM.match(line) and not _ITEM.match(first)
            )
            if first and begins:
                lines.append("")
            if not first or begins:
                first = line
        lines.append(line)
    return "\n".join(lines) + "\n"


def _beside_docs(link: re.Match[str], page: File) -> bool:
    """Whether the link, read as a forge does, names that file beside docs/."""
    folder = posixpath.dirname(page.src_uri)
    return posixpath.normpath(posixpath.join(folder, link["target"])) == f"../{link['file']}"


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    root = Path(config.docs_dir).parent
    linked: set[str] = set()
    for page in files.documentation_pages():
        for link in _LINK.finditer(page.content_string):
            if _beside_docs(link, page) and (root / link["file"]).is_file():
                linked.add(link["file"])
            else:  # `strict` makes this an error, like a broken link between pages
                log.warning("%s links to '%s', and there is no such file", page.src_uri, link["target"])
    for name in sorted(linked):
        files.append(File.generated(config, name, abs_src_path=str(root / name)))


def on_page_markdown(markdown: str, **_: object) -> str:
    return spaced(_LINK.sub(lambda link: f"]({link['target'].removeprefix('../')})", markdown))
