"""Test that tests can fail: bugs planted in a copy of the kernels are caught in the emulator.

`python tests/bugs` plants all bugs of the table; these are few, which cover each file and each way of catching one.
"""

import pytest
from bugs.bug import Equivalent, Tests
from bugs.kernel_copy import KernelCopy
from bugs.table import BUGS
from marks import few_of

ALONE = {name: bug for name, bug in BUGS.items() if not isinstance(bug.by, Tests | Equivalent)}
"""The bugs for which only the kernels that they need are compiled."""


def reached(name: str) -> frozenset:
    bug = ALONE[name]
    return frozenset({bug.file, bug.by.covers})


FEW = [name for name in few_of(ALONE, reached) if isinstance(name, str)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return KernelCopy(tmp_path_factory.mktemp("planted"))


@pytest.mark.parametrize("name", FEW)
def test_planted_bug_is_caught(name, kernels):
    assert BUGS[name].by.require(BUGS[name], kernels)


@pytest.mark.parametrize("name", BUGS)
def test_bug_fits(name):
    bug = BUGS[name]
    assert bug.path.read_text().count(bug.old) == 1 and bug.new != bug.old, bug.file
