"""Test that no passage of the kernels or of the package occurs twice."""

import collections
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS, SUFFIXES = ("csrc", "vllm_rocm_ops"), (".py", ".h", ".hip", ".cpp")
LONGEST = 11  # lines that two places may have in common


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


def lines_of(text: str) -> list[tuple[int, str]]:
    """Return the numbered lines of code, with single spaces.

    Comments, imports and lone brackets are left out.
    """
    lines = ((number, " ".join(line.split())) for number, line in enumerate(text.splitlines(), 1))
    return [
        (number, line)
        for number, line in lines
        if line and not re.fullmatch(r"(#(?!\w)|//).*|(from \S+ )?import .*|[\[\](){},;]+", line)
    ]


def repeated(texts: dict[str, str]) -> list[list[str]]:
    """Return the starts of passages of more than LONGEST lines that occur more than once."""
    places = collections.defaultdict(list)
    for name, text in texts.items():
        lines = lines_of(text)
        for first in range(len(lines) - LONGEST):
            passage = tuple(line for _, line in lines[first : first + LONGEST + 1])
            places[passage].append(f"{name}:{lines[first][0]}")
    return [found for found in places.values() if len(found) > 1]


def test_no_passage_is_written_twice():
    assert repeated({path.relative_to(ROOT).as_posix(): path.read_text() for path in sources()}) == []


@pytest.mark.parametrize("count", [LONGEST, LONGEST + 1])
def test_a_repeated_passage_is_seen(count):
    """Comments, empty lines and lone brackets may differ, and so may the indentation."""
    passage = [f"x{i} = {i};" for i in range(count)]
    other = "".join(f"  // comment {line}\n\n    {line}\n  }}\n" for line in passage)
    found = repeated({"a.h": "first();\n" + "\n".join(passage), "b.h": other})
    assert found == ([["a.h:2", "b.h:3"]] if count > LONGEST else [])
