"""Test that tests can fail: bugs planted in a copy of the kernels are caught in the emulator.

`python tests/mutations` plants all bugs of the table; these are few, which cover each folder of kernels and each way of catching one.
"""

import re
from pathlib import Path

import pytest
from marks import cover
from mutations import operators, run
from mutations.bug import Cases, Tests
from mutations.code_text import DoesNotFit, replaced
from mutations.kernel_copy import KernelCopy
from mutations.table import BUGS
from mutations.table.equivalent import EQUIVALENT

ALONE = {name: bug for name, bug in BUGS.items() if not isinstance(bug.by, Tests)}
"""The bugs for which only the kernels that they need are compiled."""


def reached(name: str) -> frozenset:
    bug = ALONE[name]
    return frozenset({Path(bug.file).parent, bug.by.way})


FEW = [[*ALONE][place] for place in sorted(cover([*map(reached, ALONE)], [1.0] * len(ALONE)))]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return KernelCopy(tmp_path_factory.mktemp("planted"))


@pytest.mark.parametrize("name", FEW)
def test_planted_bug_is_caught(name, kernels):
    assert BUGS[name].by.require(BUGS[name], kernels)


@pytest.mark.parametrize("name", BUGS)
def test_bug_fits(name):
    """The text is in its file once, and the tests and cases that catch it exist."""
    bug = BUGS[name]
    assert bug.mutated != bug.path.read_text()
    if isinstance(bug.by, Cases):
        assert set(bug.by.names) <= {case.name for case in bug.by.op.cases()}
    for test in getattr(bug.by, "names", ()) if isinstance(bug.by, Tests) else ():
        path, _, function = run.find(test).partition("::")
        assert re.search(rf"(def|import) {function.partition('[')[0]}", run.source_of(Path(path)))


CPP = "int f(int n) {  // ends\n  barrier();  // hazard: read before\n  return n /* rows */ < 4;\n}\n"
PYTHON = '''def f(x):
    """Return x + 1."""
    # One more.
    return g(
        x + 1,  # of x
        "# no comment",
    )
'''


@pytest.mark.parametrize(
    ("file", "source", "old", "new", "wanted"),
    [
        ("a.h", CPP, "return n < 4;", "return n < 5;", CPP.replace("n /* rows */ < 4", "n < 5")),
        (
            "a.h",
            CPP,
            "barrier();\n\n// moved\nreturn",
            "return",
            CPP.replace("barrier();  // hazard: read before\n  ", ""),
        ),
        ("a.h", CPP, "f(int n){", "f(int m) {", CPP.replace("int n", "int m")),
        ("a.py", PYTHON, 'g(x + 1, "# no comment")', "x", PYTHON.partition("g(")[0] + "x\n"),
        ("a.py", PYTHON, "x + 1", "x", PYTHON.replace("x + 1,", "x,")),
        ("a.py", PYTHON, "return g(", "x = 2\nreturn g(", PYTHON.replace("return g(", "x = 2\n    return g(")),
    ],
)
def test_comments_and_white_space_do_not_matter(file, source, old, new, wanted):
    assert replaced(source, file, old, new) == wanted


@pytest.mark.parametrize(
    ("file", "source", "old"),
    [
        *(("a.h", CPP, old) for old in ("return n < 5;", "n", "hazard", "", "// hazard")),
        *(("a.py", PYTHON, old) for old in ("x", "One more", "x + 1, of", "Return x + 1.", "no comment")),
    ],
)
def test_a_text_that_is_not_there_once_does_not_fit(file, source, old):
    with pytest.raises(DoesNotFit, match="times, not once"):
        replaced(source, file, old, "y")


KERNEL = """template <int kRows>
DEVICE void sum(int n, float scale = {}) {
  const int steps = (n + kRows - 1) / kRows;  // rounded up (n + 1 - 1) / 2
  for (int i = 0; i < steps; ++i) {
    if (i * kRows < n && scale > 0) total += x[i] * scale;
  }
  for (int t = 0; t < kRows; ++t) y[t] = p.scale_a[t];
  block_barrier();
}
"""


def test_operators(tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "CSRC", tmp_path)
    (tmp_path / "a.h").write_text(KERNEL)
    found = {mutant.name.removeprefix("a.h:sum:"): mutant.mutated for mutant in operators.mutants("a.h")}
    loop = "for (int i = 0; i < steps; ++i)"
    assert found == {
        "tail:1": KERNEL.replace("(n + kRows - 1) / kRows", "(n ) / kRows"),
        "bound:1": KERNEL.replace("i < steps", "i <= steps"),
        "bound:2": KERNEL.replace(loop, loop.replace("steps;", "steps - 1;")),
        "bound:3": KERNEL.replace("* kRows < n", "* kRows <= n"),
        "tail:2": KERNEL.replace("(i * kRows < n && scale > 0)", "(true)"),
        "scale:1": KERNEL.replace("x[i] * scale", "x[i] "),
        "scale:2": KERNEL.replace("x[i] * scale", "x[i] * scale * scale"),
        "scale:3": KERNEL.replace("scale_a", "scale_b"),
        "barrier:1": KERNEL.replace("block_barrier();", ";"),
    }


def test_every_proof_is_of_a_mutant():
    files = {name.partition(":")[0] for name in EQUIVALENT}
    assert set(EQUIVALENT) <= {mutant.name for file in files for mutant in operators.mutants(file)}


def test_samples_are_evenly_spaced():
    assert operators.sample(range(10), 2) == [2, 7] and operators.sample(range(2), 3) == [0, 1]
