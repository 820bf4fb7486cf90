"""Test that a run of the tests ends, with the name of the test that ended it, and that processes are guarded."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter

import pace
import pytest
from marks import full
from sources import ROOT

FINE = "def test_fine():\n    pass\n"
ABORTS = "import os, time\ndef test_aborts():\n    time.sleep(0.5)\n    os.abort()\n" + FINE
SLEEPS = "import time\ndef test_sleeps():\n    time.sleep(100)\n"
DEAF = "import signal, time\ndef test_deaf():\n    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n    time.sleep(100)\n"
HANGS = "import time\ntime.sleep(100)\n"
MANY = (
    "import pytest, time\n@pytest.mark.parametrize('number', range(50))\ndef test_many(number):\n    time.sleep(0.5)\n"
)


def run(folder, files: dict[str, str], *options: str) -> tuple[int, str]:
    """Run pytest on planted files in two workers with the options of run.sh and pyproject.toml. Return (status, output)."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    given = (ROOT / "tests/run.sh").read_text().replace("\\\n", " ")
    [given] = re.findall(r'-m pytest (.*) "\$@"', given)
    given = re.sub(r"\$\(\(.*?\)\)", "2", given).replace('"$limit"', "60").replace('"$spare"', "20").split()
    command = [sys.executable, "-m", "pytest", *given, "-c", str(ROOT / "pyproject.toml"), "-p", "conftest", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests"), str(ROOT)])}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command += ["-p", "no:cacheprovider", str(folder)]
    with tempfile.TemporaryFile("w+") as output:  # no pipe, which workers that outlive the run hold open
        done = subprocess.run(command, check=False, cwd=ROOT, env=environment, stdout=output, stderr=output)
        output.seek(0)
        return done.returncode, output.read()


@pytest.mark.parametrize(
    ("planted", "options", "said"),
    [
        (ABORTS, (), "crashed while running '.*test_planted.py::test_aborts'"),
        pytest.param(SLEEPS, ("-o", "timeout=2"), r"FAILED .*test_planted.py::test_sleeps - .*Timeout", marks=full),
        pytest.param(
            HANGS, ("--session-timeout", "3", "--timeout", "2"), "The run takes longer than its limit", marks=full
        ),
        pytest.param(
            *(DEAF, ("-o", "timeout=1", "-o", "faulthandler_timeout=3"), "crashed while running '.*::test_deaf'"),
            marks=full,
        ),
        pytest.param(MANY, ("--session-timeout", "3"), "session-timeout: 3.0 sec exceeded", marks=full),
    ],
    ids=["aborts", "sleeps", "hangs outside of tests", "hears no signal", "takes long"],
)
def test_every_run_ends_and_says_why(tmp_path, planted, options, said):
    others = {f"test_other_{number}.py": FINE for number in range(4)}
    began = time.monotonic()
    status, output = run(tmp_path, {"test_planted.py": planted} | others, *options)
    assert status not in (0, 5) and re.search(said, output), output
    assert time.monotonic() - began < 60


def test_a_process_gets_one_build_of_vllms_library(tmp_path):
    """A test that imports another, or ROCm's platform without a stand-in for it, fails."""
    names = {
        "alone": ["platforms.rocm"],
        "one": ["_C", "_C", "spinloop"],
        "rocm": ["platforms.rocm"],
        "two": ["_C_AVX2"],
    }
    test = "def test_{}():\n    for name in {}:\n        importlib.import_module('vllm.' + name)\n"
    modules = ("__init__", "_C", "_C_AVX2", "spinloop", "platforms/__init__", "platforms/rocm")
    files = {f"vllm/{name}.py": "" for name in modules}
    files["test_planted.py"] = "import importlib\n" + "".join(test.format(one, names[one]) for one in names)
    output = run(tmp_path, files, "-n0")[1]
    assert re.search(r"RuntimeError: .*test_two \(call\) imports vllm._C_AVX2 beside vllm._C\n", output), output
    assert len(re.findall("^E .*RuntimeError: import ROCm's platform by simulated", output, re.MULTILINE)) == 2
    assert "3 failed, 1 passed" in output, output


def test_recorded_seconds_fit_the_budget():
    """A file that takes longer for a reason takes it from others: tests/pace.py."""
    seconds = pace.recorded(pace.DEFAULT)
    assert [file for file in seconds if not (ROOT / file).is_file()] == []
    assert 300 < sum(seconds.values()) <= pace.BUDGET


def test_files_that_take_longer_than_recorded_are_faults():
    """A run of few files takes no longer than all."""
    known = Counter({"a.py": 10, "b.py": 100})
    assert pace.faults({"a.py": 34, "b.py": 200, "c.py": 5}, known, 5) == [
        "all files: 239 s of processor time, recorded are 110 s"
    ]
    assert pace.faults({"a.py": 36, "c.py": 6}, known, 5) == [
        "a.py: 36 s of processor time, recorded are 10 s",
        "c.py: 6 s of processor time, recorded are 0 s",
    ]
    assert pace.faults({"a.py": 34, "c.py": 4}, known, 5) == []


@full
def test_a_file_that_takes_longer_than_recorded_fails_the_run(tmp_path):
    """Its processes count."""
    burns = "import subprocess, sys\ndef test_burns():\n    subprocess.run([sys.executable, '-c', {!r}])\n"
    code = "import time\nwhile time.process_time() < 3: pass"
    status, output = run(tmp_path, {"test_burns.py": burns.format(code), "test_fine.py": FINE}, "--spare-seconds", "2")
    found = re.findall(r"^(\S+): (\d+) s of processor time, recorded are 0 s$", output, re.MULTILINE)
    assert status == 1 and [name.split("/")[-1] for name, _ in found] == ["test_burns.py"], output
    assert "2 passed" in output and 3 <= int(found[0][1]) < 20, output


@full
def test_state_that_a_test_leaves_behind_is_seen(tmp_path):
    """A variable of the environment, or one that hides it in envs."""
    left = "import os\nfrom vllm_rocm_ops.core import envs\ndef test_{}():\n    {}\n"
    files = {
        "test_hides.py": left.format("hides", "envs.VLLM_ROCM_OPS_DISABLE = 'all'"),
        "test_sets.py": left.format("sets", "os.environ['VLLM_ROCM_OPS_DISABLE'] = 'all'"),
        "test_fine.py": left.format("fine", "assert envs.VLLM_ROCM_OPS_DISABLE == ''"),
    }
    output = run(tmp_path, files)[1]
    found = sorted(re.findall(r"^ERROR \S*::test_(\w+)", output, re.MULTILINE))
    assert found == ["hides", "sets"] and "3 passed" in output, output
