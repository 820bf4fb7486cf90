"""The executors of ops' tests, and the cases of each test_<op>.py."""

import op_tests
import pytest
from op_tests import executor  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is op_tests.test_case:
        runs = list(op_tests.runs(metafunc.definition.path))
        mark = pytest.mark.parametrize("executor, the_op, case, configs", runs, indirect=["executor"])
        metafunc.definition.add_marker(mark)
