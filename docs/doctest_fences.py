"""Shows the examples of docstrings as code.

Docstrings are Markdown with bare doctests, which Markdown would take for quotations.
"""

import re

import griffe

# from a prompt to the next blank line, as doctest reads it
EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n[ ]*\S.*)*", re.MULTILINE)


class DoctestFences(griffe.Extension):
    """Puts a fence around each doctest of the docstrings that Griffe reads for the site."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
