"""Test that the example on each op page runs as written, with the kernels of the ops that it calls."""

import re

import pytest
from pages import op_pages

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.stats import reset_stats, stats
from vllm_rocm_ops.emulator import Emulator

FILES = {file: text for file, text in op_pages.by_file().items()}


@pytest.mark.parametrize("file", FILES)
def test_an_example_runs(file):
    page = (op_pages.DOCS / f"{file}.md").read_text()
    code = re.search(r"^## Example\n\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    emulator = Emulator("gfx950" if "mxfp8" in file else "gfx942")
    code = code.replace('"cuda"', '"cpu"').replace(
        "float8_e4m3fnuz", str(emulator.arch.fp8_dtype).removeprefix("torch.")
    )
    reset_stats()
    with launch.executor(emulator):
        exec(compile(code, f"{file}.md", "exec"), {})  # noqa: S102  a page of the repository
    called = set(re.findall(r"\bops\.(\w+)\(", code))
    assert called & {op.name for op in FILES[file]}
    ran = stats()
    assert ran.keys() == called
    assert not [how for op in called for how in ran[op] if how.startswith("fallback")]
