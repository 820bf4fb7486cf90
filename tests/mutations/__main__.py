"""Plant plausible mistakes and report the tests that catch them: python tests/mutations [names]."""

import sys
from pathlib import Path

if not __package__:  # Python ran the folder, and looks for modules in it.
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(TESTS), str(TESTS / "ops"), str(TESTS.parent)]

from mutations import run

sys.exit(run.main())
