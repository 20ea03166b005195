"""Shows files of the repository's root as pages of the site: links into docs/ become links between pages.

A page includes such a file with pymdownx.snippets (``--8<-- "CHANGELOG.md"``). A link to a file that is no page of
the site, such as a folder of results, becomes its text.
"""

import re
from typing import Any

PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FILES = ("docs/", "benchmarks", "examples", "tools", "src", "tests", *PAGES)


def with_page_links(text: str) -> str:
    """The text with links as they are on the site."""
    return LINK.sub(_page_link, text)


def _page_link(link: re.Match[str]) -> str:
    text, file, anchor = link[1], link[2], link[3] or ""
    if not file.startswith(FILES):
        return link[0]
    page = PAGES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
    return text if page is None else f"[{text}]({page}{anchor})"


def makeExtension(**_: object) -> Any:
    """Python-Markdown calls this."""
    from markdown import Extension, Markdown  # here, so that the rest can be tested without the site's tools
    from markdown.preprocessors import Preprocessor

    class RootLinks(Preprocessor):
        def run(self, lines: list[str]) -> list[str]:
            return [with_page_links(line) for line in lines]

    class RootFiles(Extension):
        def extendMarkdown(self, md: Markdown) -> None:
            md.preprocessors.register(RootLinks(md), "root_links", 31)  # behind the snippets, whose priority is 32

    return RootFiles()
