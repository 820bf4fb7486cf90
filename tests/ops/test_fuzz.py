"""Run a slice of fuzz.py's calls; test that each op's formula can fail, and that formulas are not the package's code."""

import ast
import contextlib
import pathlib
import random

import formulas
import fuzz
import marks
import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.correctness import as_tuple, clone

OPS = {op.name: op for op in op_module.registered()}
ARCH = archs.ARCHS["gfx942"]
pytestmark = pytest.mark.filterwarnings("ignore:.*runs without its kernels")
CALLS = 60  # the first ones run kernels that no earlier call runs


def test_random_calls_are_right(capsys):
    """Malformed ones are refused, with nothing written."""
    assert fuzz.main(["--calls", str(CALLS)]) == 0, capsys.readouterr().out


@marks.full
@pytest.mark.timeout(7200)
def test_ten_thousand_calls_are_right_and_run_every_kernel(capsys):
    assert fuzz.main([]) == 0, capsys.readouterr().out


def test_there_is_a_formula_for_each_op_and_none_is_the_packages():
    assert formulas.FORMULAS.keys() == OPS.keys()
    tree = ast.parse(pathlib.Path(formulas.__file__).read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"collections.abc", "torch", "torch.nn.functional", "types"}


def usual(the_op) -> tuple:
    """Return the arguments of an op's first case that has elements."""
    case = next(iter(the_op.cases()))
    return case.make("cpu", torch.Generator().manual_seed(0), ARCH.fp8_dtype)


FACTORS = {"fused_experts": 0.7}
"""An op's factor of a wrong value, 0.8 for others: its formula allows 16 % where roundings of two quantizations add up."""


def wrong_values(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor with another largest value, or another first id."""
    bad = clone(x)
    if not x.is_floating_point():
        bad.view(-1)[0] = (bad.view(-1)[0] + 1) % 4
        return bad
    place = int(x.float().nan_to_num().abs().flatten().argmax())
    index = torch.unravel_index(torch.tensor(place), x.shape) if x.dim() else ()
    bad[index] = (x[index].float() * factor).to(x.dtype)
    return bad


@pytest.mark.parametrize("name", OPS)
def test_a_formula_knows_a_wrong_result(name):
    """One element of any output, or of any argument that is updated or written, is wrong by a fifth, or by `FACTORS`."""
    the_op, given = OPS[name], usual(OPS[name])
    before, after = (the_op.Arguments(*map(clone, given)) for _ in range(2))
    outputs = as_tuple(the_op.reference(*after))
    fuzz.check(the_op, before, after, outputs)
    checked, factor = 0, FACTORS.get(name, 0.8)
    for place, output in enumerate(outputs):
        if output.numel():
            bad = (*outputs[:place], wrong_values(output, factor), *outputs[place + 1 :])
            with pytest.raises(fuzz.Wrong):
                fuzz.check(the_op, before, after, bad)
            checked += 1
    for argument in (*the_op.mutates, *the_op.writes):
        if getattr(after, argument) is not None:
            bad = after._replace(**{argument: wrong_values(getattr(after, argument), factor)})
            with pytest.raises(fuzz.Wrong):
                fuzz.check(the_op, before, bad, outputs)
            checked += 1
    assert checked


def test_a_wrong_kernel_is_a_finding(monkeypatch, capsys):
    """The reference stands in for a kernel that leaves the scale out."""
    exact = ops.scaled_mm.reference
    monkeypatch.setattr(ops.scaled_mm, "reference", lambda a, b, scale_a, *rest: exact(a, b, scale_a * 0 + 1, *rest))
    monkeypatch.setattr(fuzz, "configurations", lambda *_: [])
    monkeypatch.setattr(fuzz.Cover, "config", lambda *_: None)
    monkeypatch.setattr(fuzz, "executors", lambda _: [("cpu", ARCH, contextlib.nullcontext)])
    assert fuzz.main(["--op", "scaled_mm", "--calls", "3", "--malformed", "0"]) == 1
    assert "scaled_mm" in capsys.readouterr().out


def test_a_malformed_call_that_is_taken_or_writes_is_a_finding(monkeypatch):
    the_op, given = ops.fused_add_rms_norm, usual(ops.fused_add_rms_norm)
    assert fuzz.taken(the_op, given, "cpu") == "is taken"

    def writes(input, residual, *rest):
        residual.zero_()
        raise ValueError(message)

    monkeypatch.setattr(the_op, "reference", writes)
    for message, found in ((the_op.name, "changes a tensor"), ("no", "raises ValueError: no")):
        the_op.invalidate()
        assert fuzz.taken(the_op, given, "cpu") == found
    the_op.invalidate()


def test_the_same_seed_makes_the_same_calls():
    def calls(seed: int) -> list:
        made, found = fuzz.Fuzz("*", seed), []
        for number in range(40):
            the_op, case, rng = made.drawn(number, "valid")
            given = fuzz.arguments(the_op, case, rng, ARCH.fp8_dtype, resizes=True)
            found.append((the_op.name, case.name, [v.shape for v in given if isinstance(v, torch.Tensor)]))
        return found

    assert calls(3) == calls(3) != calls(4)


def test_workers_make_the_calls_of_one():
    def calls(numbers: range) -> list:
        made, found = fuzz.Fuzz("rms_norm*", 0), []
        for number in numbers:
            the_op, case, given, config = made.call(number, ARCH)
            tensors = [value for value in given if isinstance(value, torch.Tensor)]
            found.append(
                (number, the_op.name, case.name, str(config), [x.double().nan_to_num().sum() for x in tensors])
            )
        return found

    whole = calls(range(90))
    assert sorted(calls(range(0, 90, 2)) + calls(range(1, 90, 2)), key=lambda call: call[0]) == whole
    assert len({config for *_, config, _ in whole}) > 2


@marks.full
@pytest.mark.parametrize("arch", archs.ARCHS)
def test_ten_thousand_calls_choose_every_kernel(arch):
    made, kernels = fuzz.Fuzz("*", 0), set()
    cover = fuzz.Cover(made.cases, archs.ARCHS[arch])
    for number in range(fuzz.WHOLE):
        the_op, case = made.cases[number % len(made.cases)]
        if (config := cover.config(number)) is not None:
            a = the_op.Arguments(*case.make("meta", torch.Generator(), cover.arch.fp8_dtype))
            kernels |= {one.symbol for one in the_op.plan(config, the_op.allocate(a), a, cover.arch)}
    assert fuzz.Found(launched={arch: kernels}).kernels_that_did_not_run(arch) == [] and len(kernels) > 400


def test_findings_of_workers_are_merged():
    found, wrong = fuzz.Found(), "call 1 is wrong"
    for part in (["a", "b"], ["b", "c"]):
        found.add(fuzz.Found(2, 1, [wrong], fuzz.collections.Counter(part), {"gfx942": {*part}}))
    assert found == fuzz.Found(4, 2, [wrong] * 2, fuzz.collections.Counter("abbc"), {"gfx942": {*"abc"}})


@marks.full
def test_processes_find_what_one_does(capsys):
    found = []
    for workers in ("1", "2"):
        options = [
            "--op",
            "topk_softmax",
            "--emulate",
            "gfx942",
            "--calls",
            "7",
            "--malformed",
            "3",
            "--workers",
            workers,
        ]
        assert fuzz.main(options) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]


def test_malformed_arguments_differ_in_one():
    rng = random.Random(0)
    for the_op in OPS.values():
        given = usual(the_op)
        what, wrong = fuzz.malformed(the_op, given, rng)
        [name] = [name for name, x, y in zip(the_op.Arguments._fields, given, wrong) if x is not y]
        assert what.startswith(name)


def test_calls_of_no_op_and_workers_that_are_none_are_refused():
    with pytest.raises(SystemExit, match="no op matches --op nothing"):
        fuzz.main(["--op", "nothing"])
    with pytest.raises(SystemExit):
        fuzz.main(["--workers", "0"])
