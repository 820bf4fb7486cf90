"""The emulator is an optional part of the package: what it needs that the rest does not, and what it says without that."""

import subprocess
import sys

import pytest

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
import vllm_rocm_ops.cli, vllm_rocm_ops.vllm
try:
    import vllm_rocm_ops.emulator
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", ["numpy", "tinygrad"])
def test_it_names_its_extra_where_a_package_is_missing(missing):
    """And all the rest does without."""
    command = [sys.executable, "-W", "ignore", "-c", REFUSE.format(refused=[missing])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"the emulator needs {missing}")
    assert result.stdout.endswith("pip install 'vllm-rocm-ops[emulator]'\n")
