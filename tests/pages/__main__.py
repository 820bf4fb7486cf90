"""Write all generated pages: python tests/pages."""

import sys
from pathlib import Path

if not __package__:  # Python ran the folder, and looks for modules in it.
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(folder) for folder in (TESTS, TESTS.parent, TESTS.parent / "serving_benchmarks")]

from pages import readme

for path, text in readme.documents().items():
    path.write_text(text)
