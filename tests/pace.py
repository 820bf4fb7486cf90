"""Measure the processor seconds of test files, and judge them where run.sh says so by --spare-seconds, for the default tests.

`data/seconds.csv` has what each file took, with fixtures and the processes that it started; files of less than half a second
are left out. A run fails if a file takes more than `FACTOR` times that and the spare seconds, or all take `IN_ALL` times that.
A whole run writes what it measured to build/seconds.csv: copy it where that is as intended. test_run.py limits the sum to
`BUDGET`, which a machine that is slow or has other load does not change. `data/seconds_full.csv` has the files of `--full`, which
nothing judges. conftest.py starts the slowest first.
"""

from __future__ import annotations

import csv
import glob
import os
from collections import Counter
from pathlib import Path

import pytest
from marks import FULL

HERE = Path(__file__).resolve().parent
DEFAULT = HERE / "data/seconds.csv"
RECORD = HERE / "data/seconds_full.csv" if FULL else DEFAULT
MEASURED = HERE.parent / "build" / RECORD.name
BUDGET = 950
"""Seconds that all files may take as recorded, on a machine with other load: half of them on each of two cores."""
FACTOR, IN_ALL = 3.0, 2.0
"""Busy cores share caches and units. The spare seconds are for what the first file of a process imports."""
TICKS = os.sysconf("SC_CLK_TCK")


def recorded(path: Path = RECORD) -> Counter[str]:
    """Return the seconds by file."""
    with path.open(newline="") as lines:
        return Counter({line["file"]: int(line["seconds"]) for line in csv.DictReader(lines)})


def write(seconds: dict[str, float], path: Path = MEASURED) -> None:
    """Write the seconds by file."""
    path.parent.mkdir(exist_ok=True)
    lines = [f"{file},{took:.0f}\n" for file, took in sorted(seconds.items()) if took >= 0.5]
    path.write_text("".join(["file,seconds\n", *lines]))


def processor_seconds() -> float:
    """Return the time of this process, of those that ended, and of those that it started and run."""
    of_process = os.times()
    found, children = of_process.user + of_process.system + of_process.children_user + of_process.children_system, {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            fields = Path(path).read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        children.setdefault(int(fields[1]), []).append((int(path.split("/")[2]), sum(map(int, fields[11:15])) / TICKS))
    todo = [os.getpid()]
    while todo:
        started = children.get(todo.pop(), [])
        found += sum(took for _, took in started)
        todo += [process for process, _ in started]
    return found


def faults(seconds: dict[str, float], known: Counter[str], spare: float) -> list[str]:
    """Return a line per file that took too long, and one if all did."""
    found = [
        f"{file}: {took:.0f} s of processor time, recorded are {known[file]} s"
        for file, took in sorted(seconds.items())
        if took > FACTOR * known[file] + spare
    ]
    total, before = sum(seconds.values()), sum(known.values())
    if total > IN_ALL * before + spare:
        found.append(f"all files: {total:.0f} s of processor time, recorded are {before} s")
    return found


class Pace:
    """The seconds of a session's files: of its own tests, and those that workers send."""

    def __init__(self, spare: float) -> None:
        self.seconds: Counter[str] = Counter()
        self.spare, self.file, self.since, self.faults = spare, "", 0.0, []

    def turn_to(self, file: str) -> None:
        """End the file that ran, and begin another."""
        now = processor_seconds()
        if self.file:
            self.seconds[self.file] += now - self.since
        self.file, self.since = file, now

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file = item.nodeid.partition("::")[0]
        if file != self.file:
            self.turn_to(file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("seconds", {}))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        self.turn_to("")
        if hasattr(config, "workeroutput"):
            config.workeroutput["seconds"] = dict(self.seconds)
            return
        if config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword:
            write(self.seconds)
        self.faults = faults(self.seconds, recorded(), self.spare) if self.spare else []
        if self.faults and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.faults:
            terminalreporter.section("tests take too long, see tests/pace.py")
            terminalreporter.write("".join(f"{line}\n" for line in self.faults))


def register(config: pytest.Config) -> None:
    """Measure a session if it asks for that, except beside a GPU, where other tests run. With no seconds to spare it is not judged."""
    spare = config.getoption("spare_seconds")
    if spare is not None and not glob.glob("/dev/nvidia[0-9]") + glob.glob("/dev/kfd"):
        config.pluginmanager.register(Pace(spare), "pace of files")
