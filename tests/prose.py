"""Find faults in the prose of Markdown, docstrings and comments: `python tests/prose.py` prints them."""

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

from sources import FILES, ROOT

COMMENTED = (".h", ".hip", ".cpp", ".c")
SUFFIXES = (".md", ".py", *COMMENTED)
CODE = "\0"
"""Replaces each character that is not prose, so that positions stay and no phrase spans code."""

SPELLINGS = (
    "(?:quanti|normali|initiali|optimi|seriali|synchroni|summari|recogni|organi|speciali|generali|minimi|maximi|utili|vectori"
    "|paralleli|materiali|tokeni|randomi|equali|categori|prioriti|customi)s(?:e|es|ed|er|ers|ing|able|ation|ations)"
    "|(?:neighbo|colo|behavio|favo|hono|labo)ur\\w*|(?:analys|paralys)(?:e|es|ed|ing)|(?:label|cancel|model|travel)l(?:ed|ing)"
    "|centre[sd]?|licences?|artefacts?|grey"
)
PHRASES = {
    "that of": r"\b(?:that|those)\s+of\b",
    "so many": r"\b(?:so|that|as)\s+many\b",
    "spelling": rf"\b(?:de|re|un|pre|non)?-?(?:{SPELLINGS})\b",
}
HEADLESS = "headless"

OPENINGS = {"of", "that", "those", "what", "which", "whether", "how", "who", "whose", "where", "when", "why"}
"""First words that make a docstring headless."""


def in_markdown(text: str) -> str:
    """Return a page with its code replaced."""
    code = r"^ *```.*?^ *```|`[^`\n]*`|\]\([^)\s]*\)|<!--.*?-->"
    return re.sub(code, lambda m: CODE * len(m[0]), text, flags=re.DOTALL | re.MULTILINE)


def in_cpp(text: str) -> str:
    """Return C++ with its code and the marks of comments replaced."""
    pieces = re.compile(
        r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|\s+|.""", re.DOTALL
    ).finditer(text)
    return "".join(marked(m[0], r"^\s*(?:///?|/\*+|\*)") if m["comment"] else hidden(m[0]) for m in pieces)


def hidden(code: str) -> str:
    """Return a placeholder for code, with its white space."""
    return re.sub(r"\S", CODE, code)


def marked(comment: str, marks: str) -> str:
    """Return a comment with spaces for its marks."""
    return re.sub(marks, lambda m: " " * len(m[0]), comment, flags=re.MULTILINE)


def in_python(text: str) -> str:
    """Return Python with all but docstrings and comments replaced."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    documented = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    kept, done = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start in documented
        if is_docstring or token.type == tokenize.COMMENT:
            first, last = (starts[line - 1] + column for line, column in (token.start, token.end))
            kept += hidden(text[done:first]), token.string if is_docstring else marked(token.string, "^#+")
            done = last
    return "".join(kept) + hidden(text[done:])


def is_headless(docstring: str) -> bool:
    """True if a docstring begins within a sentence."""
    words = docstring.split()
    return bool(words) and words[0].strip(".,:;`'\"()").lower() in OPENINGS


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.Expr, str]]:
    """Yield each docstring, a value's too, with its node."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement, value.value


def faults(suffix: str, text: str) -> Iterator[tuple[str, int, str]]:
    """Yield each fault of a file, its line, and the words there."""
    written = in_markdown(text) if suffix == ".md" else in_python(text) if suffix == ".py" else in_cpp(text)
    for fault, pattern in PHRASES.items():
        for match in re.finditer(pattern, written, re.IGNORECASE):
            yield fault, text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())
    if suffix == ".py":
        for statement, docstring in docstrings(ast.parse(text)):
            if is_headless(docstring):
                yield HEADLESS, statement.lineno, docstring.strip().partition("\n")[0]


def found(paths: list[pathlib.Path]) -> list[str]:
    """Return the places and words of the faults of these files."""
    return [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {fault}: {words}"
        for path in paths
        if path.suffix in SUFFIXES
        for fault, line, words in faults(path.suffix, path.read_text())
    ]


def main() -> int:
    """Print the faults, and return whether there are any."""
    places = found(FILES)
    print("\n".join([*places, f"{len(places)} faults"]))
    return int(bool(places))


if __name__ == "__main__":
    sys.exit(main())
