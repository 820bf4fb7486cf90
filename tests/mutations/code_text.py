"""Texts of code, compared token by token: comments, docstrings and white space do not matter."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

OPERATORS = r"<<=|>>=|<=>|->|\+\+|--|<<|>>|[<>=!+\-*/%&|^:]=|&&|\|\||::|\*\*"
STRINGS = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
CPP = re.compile(
    rf"(?P<none>//[^\n]*|/\*.*?\*/|\\\n|\s+)|(?P<some>{STRINGS}|\w+|{OPERATORS}|.)",
    re.DOTALL,
)
PYTHON = re.compile(
    r'(?P<none>\#[^\n]*|\\\n|\s+|(?:(?<=\n)|\A)[ \t]*r?""".*?"""[ \t]*(?=\n|\Z)|,(?=\s*[)\]}]))'
    rf'|(?P<some>[a-zA-Z]{{0,2}}(?:""".*?"""|{STRINGS})|\w+|{OPERATORS}|.)',
    re.DOTALL,
)


class DoesNotFit(AssertionError):
    """The text that a mutation replaces is missing from its file, or occurs more than once."""


class Token(NamedTuple):
    text: str
    start: int
    end: int


def tokens(text: str, file: str) -> list[Token]:
    """Return the tokens of a file's text or of a part of it, with their places."""
    language = PYTHON if file.endswith(".py") else CPP
    return [Token(m[0], *m.span()) for m in language.finditer(text) if m["none"] is None]


def places(source: str, file: str, part: str) -> list[tuple[int, int]]:
    """Return where a part occurs in a file's source."""
    of, sought = tokens(source, file), [token.text for token in tokens(part, file)]
    texts, size = [token.text for token in of], len(sought)
    starts = range(len(of) - size + 1) if sought else ()
    return [(of[at].start, of[at + size - 1].end) for at in starts if texts[at : at + size] == sought]


def replaced(source: str, file: str, old: str, new: str) -> str:
    """Return a file's source with one text replaced.

    Lines of the new text after the first are indented as the line in which the old one begins.
    """
    found = places(source, file, old)
    if len(found) != 1:
        raise DoesNotFit(f"{file} holds {old!r} {len(found)} times, not once")
    start, end = found[0]
    line = source[source.rfind("\n", 0, start) + 1 : start]
    indent = line[: len(line) - len(line.lstrip())]
    first, *others = textwrap.dedent(new.strip("\n")).strip().split("\n")
    return source[:start] + "\n".join([first, *(indent + one for one in others)]) + source[end:]
