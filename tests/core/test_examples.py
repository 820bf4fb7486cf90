"""Run the example on each op page with the kernels of the ops that it calls, and check that pages have what they promise."""

import inspect
import re

import pytest
import torch
from pages import op_pages

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.stats import reset_stats, stats
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import seam

FILES = {file: text for file, text in op_pages.by_file().items()}
OPS = list(op_module.registered())


@pytest.mark.parametrize("file", FILES)
def test_an_example_runs(file):
    page = (op_pages.DOCS / f"{file}.md").read_text()
    code = re.search(r"^## Example\n\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    emulator = Emulator("gfx950" if "mxfp8" in file else "gfx942")
    code = code.replace('"cuda"', '"cpu"').replace(
        "float8_e4m3fnuz", str(emulator.arch.fp8_dtype).removeprefix("torch.")
    )
    reset_stats()
    try:
        with launch.executor(emulator):
            exec(compile(code, f"{file}.md", "exec"), {})  # noqa: S102  a page of the repository
    finally:
        torch.set_default_device(None)
    called = set(re.findall(r"\bops\.(\w+)\(", code))
    assert called & {op.name for op in FILES[file]}
    ran = stats()
    assert ran.keys() == called
    assert not [how for op in called for how in ran[op] if how.startswith("fallback")]


@pytest.mark.parametrize("the_op", OPS, ids=lambda o: o.name)
def test_a_docstring_documents_every_argument(the_op):
    """And the results, the errors and the source, which the page is made from."""
    of = op_pages.documentation(the_op)
    assert tuple(of.args) == the_op.Arguments._fields and all(of.args.values())
    wanted = {"Raises", "Source"} | ({"Returns"} if the_op.hints["return"] is not type(None) else set())
    assert of.sections.keys() == wanted and all(of.sections.values())
    page = (op_pages.DOCS / op_pages.link(the_op.name).partition("#")[0]).read_text()
    for text in (*of.args.values(), of.summary):
        assert text in " ".join(page.split()).replace("\\|", "|")


def test_a_docstring_is_parsed():
    def function(one, two):
        """Do it.

        More of
        it.

        Args:
            one: The first,
                on two lines.
            two: [a: b], int32.

        Returns:
            What it
            does.
        """

    of = op_pages.documentation(function)
    assert (of.summary, of.body) == ("Do it.", ("More of it.",))
    assert of.args == {"one": "The first, on two lines.", "two": "[a: b], int32."}
    assert of.sections == {"Returns": "What it does."}


def test_a_page_has_the_rules_of_arguments_that_its_ops_have():
    """Whatever other row-wise ops have."""
    for the_op in OPS:
        for arch in op_pages.archs.ARCHS.values():
            for _, a in op_pages.cases_of(the_op, arch.name):
                named = {
                    match[1]
                    for rule, _ in the_op.can_implement(a, arch)
                    if (match := re.match(r"(\w+)(?:'s| is) ", rule))
                }
                assert named & {"residual", "weight", "bias"} <= set(a._fields), the_op.name


def test_a_seam_is_on_the_pages_of_the_ops_that_it_declares():
    calls = {the_op.name: op_pages.seams_of(the_op) for the_op in OPS}
    for name in seam.NAMES:
        declared = {op for op in seam.load(name).ops if op in calls}
        assert declared <= {op for op, seams in calls.items() if name in seams}, name
    assert calls["fused_experts"].keys() == {"fp8_experts", "mxfp8_experts", "unquantized_experts"}
    assert calls["batched_gemm"] == {"mla_attention": 64, "mla_norms": 64} and calls["gemm"] == {"int8_linear": 0}
    assert "rope_and_cache" not in calls["paged_attention_decode"] and not calls["softmax"]


def test_a_signature_has_every_argument():
    for the_op in OPS:
        shown = " ".join(op_pages.signature(the_op).split())
        given = inspect.signature(the_op.reference).parameters.values()
        assert all(re.search(rf"[(, ]{parameter.name}[=,)]", shown) for parameter in given), shown
