"""Shows files of the repository's root as pages of the site: links into docs/ become links between pages.

A page includes such a file with pymdownx.snippets (``--8<-- "CHANGELOG.md"``). A link to a file that is no page of
the site, such as a folder of results, becomes its text.
"""

import re

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FILES = ("docs/", "benchmarks", "examples", "tools", "src", "tests", *PAGES)


def as_page_link(link: re.Match[str]) -> str:
    """The link as it is on the site."""
    text, file, anchor = link[1], link[2], link[3] or ""
    if not file.startswith(FILES):
        return link[0]
    page = PAGES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
    return text if page is None else f"[{text}]({page}{anchor})"


class RootLinks(Preprocessor):
    """Rewrites links that are relative to the repository's root, after files were included."""

    def run(self, lines: list[str]) -> list[str]:
        return [LINK.sub(as_page_link, line) for line in lines]


class RootFiles(Extension):
    """Registers `RootLinks` behind the snippets, whose priority is 32."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  Python-Markdown's name
        md.preprocessors.register(RootLinks(md), "root_links", 31)


def makeExtension(**_: object) -> RootFiles:  # noqa: N802  Python-Markdown's name
    """Python-Markdown calls this."""
    return RootFiles()
