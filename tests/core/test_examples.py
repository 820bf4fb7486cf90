"""Run the call on each op page in the emulator, and check that pages have what they promise."""

import inspect
import re

import pytest
import torch
from pages import block_of, op_pages

from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.stats import reset_stats, stats
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.tools import cli

FILES = op_pages.by_file()
OPS = list(op_module.registered())


def page_of(file: str) -> str:
    return (op_pages.DOCS / f"{file}.md").read_text()


@pytest.mark.parametrize("file", FILES)
def test_the_call_of_a_page_runs_as_the_page_says(file, capsys):
    """The page of all ops has the lines of the call."""
    [the_op, *_] = FILES[file]
    example = page_of(file).partition("\n## Example\n")[2]
    said = re.search(r"^```\n\$ vllm-rocm-ops (.*?)\n(.*?)^```$", example, re.DOTALL | re.MULTILINE)
    assert cli.main(said[1].split()) == 0
    assert capsys.readouterr().out == said[2]
    emulator = Emulator(said[1].rpartition(" ")[2])
    code = (
        block_of(page_of("README"), "python").replace('"cuda"', '"cpu"').replace("ops.scaled_mm", f"ops.{the_op.name}")
    )
    code = code.replace("torch.float8_e4m3fnuz", str(emulator.arch.fp8_dtype))
    given: dict = {}
    reset_stats()
    with launch.executor(emulator):
        exec(compile(code, f"{file}.md", "exec"), given)  # noqa: S102  a page of the repository
    assert list(stats()) == [the_op.name]
    assert not [how for how in stats()[the_op.name] if how.startswith("fallback")]
    for name, value in zip(the_op.Arguments._fields, given["arguments"]):
        if isinstance(value, torch.Tensor):
            assert f"{name}={op_pages.short(value.dtype)}[{'x'.join(map(str, value.shape))}]" in example


@pytest.mark.parametrize("the_op", OPS, ids=lambda o: o.name)
def test_a_docstring_documents_every_argument(the_op):
    """And the results, the errors and the source; the page has all of it."""
    _, *rest = re.split(r"^(Args|Returns|Raises|Source):\n", the_op.__doc__, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2]))
    args = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", sections["Args"], re.MULTILINE))
    assert tuple(args) == the_op.Arguments._fields and all(args.values())
    wanted = {"Args", "Raises", "Source"} | ({"Returns"} if the_op.hints["return"] is not type(None) else set())
    assert sections.keys() == wanted and all(text.strip() for text in sections.values())
    page = page_of(op_pages.link(the_op.name).removesuffix(".md"))
    for text in (
        *(f"{name}: {text}" for name, text in args.items()),
        *map(str.strip, the_op.__doc__.split("\n\n")[:1]),
    ):
        assert text in page
    assert all(text.strip() in page for text in sections.values() if text is not sections["Args"])


def test_a_rule_of_rows_names_an_argument_of_the_op():
    """Whatever other row-wise ops have."""
    for the_op in OPS:
        for arch in archs.ARCHS.values():
            for case in the_op.cases():
                a = the_op.Arguments(*case.make("meta", torch.Generator().manual_seed(0), arch.fp8_dtype))
                rules = (re.match(r"(\w+)(?:'s| is) ", rule) for rule, _ in the_op.can_implement(a, arch))
                named = {match[1] for match in rules if match}
                assert named & {"residual", "weight", "bias"} <= set(a._fields), the_op.name


def test_a_signature_has_every_argument():
    for the_op in OPS:
        page = page_of(op_pages.link(the_op.name).removesuffix(".md"))
        shown = re.search(rf"^## {the_op.name}\n\n```\n(.*?)\n\n", page, re.DOTALL | re.MULTILINE)[1]
        given = inspect.signature(the_op.reference).parameters.values()
        assert all(re.search(rf"[(\s,]{parameter.name}[:=,)]", shown) for parameter in given), shown
