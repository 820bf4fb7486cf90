"""Test kernel arguments by name: the stamp's description of a kernel, and the arguments of a launch."""

from __future__ import annotations

import os
import struct

import pytest
import torch

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.kernel_arguments import Parameters, in_order, pack, packer, parameters
from vllm_rocm_ops.core.launch import I64, Counters, Launch, Workspace, fields

TAKES = Parameters(
    48,
    {
        "input": (0, "pointer"),
        "rows": (8, "i32"),
        "columns": (12, "i32"),
        "epsilon": (16, "f32"),
        "problem.stride": (24, "i64"),
        "problem.divisor.inverse": (32, "u32"),
        "problem.divisor.shift": (36, "i32"),
        "out": (40, "pointer"),
    },
)
X, OUT = torch.zeros(4), torch.zeros(4)
GIVEN = {
    "input": X,
    "rows": 3,
    "columns": 5,
    "epsilon": 0.5,
    **fields("problem", {"stride": 2**40, "divisor": {"inverse": 2**32 - 1, "shift": -1}}),
    "out": OUT,
}


def of(args) -> Launch:
    return Launch("module", "kernel", (1, 1, 1), (64, 1, 1), args)


def test_arguments_are_packed_by_name():
    """Their order in the plan does not matter, so that two arguments of one type cannot be swapped."""
    expected = struct.pack("<QiifxxxxqIiQ", X.data_ptr(), 3, 5, 0.5, 2**40, 2**32 - 1, -1, OUT.data_ptr())
    assert pack(of(GIVEN), TAKES) == expected
    assert pack(of(dict(reversed(GIVEN.items()))), TAKES) == expected
    swapped = GIVEN | {"rows": GIVEN["columns"], "columns": GIVEN["rows"]}
    assert pack(of(swapped), TAKES) != expected
    at = {id(X): 7, id(OUT): 9}
    assert pack(of(GIVEN), TAKES, lambda tensor: at[id(tensor)])[8:-8] == expected[8:-8]
    assert pack(of(GIVEN), TAKES, lambda tensor: at[id(tensor)])[-8:] == struct.pack("<Q", 9)


def test_padding_at_the_end_is_packed():
    assert pack(of({"n": 1}), Parameters(16, {"n": (0, "i64")})) == struct.pack("<qq", 1, 0)


def test_pointers_without_an_address_are_zero():
    for pointer in (None, Workspace(64), Counters(2)):
        layout, values = packer(of(GIVEN | {"out": pointer}), TAKES)
        assert values["out"] == 0 and layout.size == 48


@pytest.mark.parametrize(
    "args, message",
    [
        (
            {k: v for k, v in GIVEN.items() if k != "rows"},
            "kernel: arguments must be input, rows, .*, out, got no rows",
        ),
        (GIVEN | {"row": 3}, "kernel: arguments must be input, .*, got also row"),
        ({("row" if k == "rows" else k): v for k, v in GIVEN.items()}, "got no rows and also row"),
        (
            {k.removeprefix("problem."): v for k, v in GIVEN.items()},
            "got no problem.divisor.inverse and .* also stride",
        ),
        ((X, 3), "got no columns and .* also 0 and also 1"),
        (GIVEN | {"rows": 2**31}, r"kernel: argument rows must be an int within its range \(i32\), got int 2147483648"),
        (
            GIVEN | {"problem.divisor.inverse": -1},
            r"argument problem.divisor.inverse must be an int .* \(u32\), got int -1",
        ),
        (GIVEN | {"problem.stride": 2**63}, r"argument problem.stride must be .* \(i64\)"),
        (GIVEN | {"rows": 3.0}, r"argument rows must be .* \(i32\), got float 3.0"),
        (GIVEN | {"rows": X}, r"argument rows must be .* \(i32\), got a tensor"),
        (GIVEN | {"rows": None}, r"argument rows must be .* \(i32\), got NoneType None"),
        (GIVEN | {"rows": Workspace(3)}, r"argument rows must be .* \(i32\), got Workspace 3"),
        (GIVEN | {"epsilon": 1}, r"argument epsilon must be a float \(f32\), got int 1"),
        (
            GIVEN | {"input": 3},
            r"argument input must be a tensor, Workspace, Counters, Address or None \(pointer\), got int 3",
        ),
    ],
)
def test_wrong_arguments_name_kernel_argument_wanted_and_got(args, message):
    for refuse in (packer, pack):
        with pytest.raises(TypeError, match=message):
            refuse(of(args), TAKES)


def test_a_stamp_that_changes_is_read_again(tmp_path):
    path = tmp_path / "op.co"
    for n, bits in enumerate((32, 64)):
        path.with_suffix(".json").write_text(
            f'{{"kernels": {{"k": {{"bytes": 8, "arguments": {{"n": [0, "i{bits}"]}}}}}}}}'
        )
        os.utime(path.with_suffix(".json"), ns=(n, n))
        assert parameters(path, "k").arguments == {"n": [0, f"i{bits}"]}
    for symbol, at in (("other", path), ("k", tmp_path / "absent.co")):
        with pytest.raises(RuntimeError, match=f"the stamp of {at} does not have the arguments of {symbol}"):
            parameters(at, symbol)


def test_arguments_in_order_are_aligned():
    """The emulator passes arguments in order to a kernel without a stamp."""
    planned = of((X, 7, None, 1.5, I64(-2), 3))
    assert pack(planned, in_order(planned)) == struct.pack("<QixxxxQfxxxxqi", X.data_ptr(), 7, 0, 1.5, -2, 3)
    for wrong in ("text", 2**31):
        with pytest.raises(TypeError, match="kernel: argument 1 must be a tensor, None, int, I64 or float, got "):
            in_order(of((7, wrong)))


def test_each_argument_can_be_replaced():
    doubled = of({"a": 1, "b": 2.0}).with_each(lambda arg: arg * 2)
    assert doubled.args == {"a": 2, "b": 4.0} and of((1, 2.0)).with_each(lambda arg: arg * 2).args == (2, 4.0)
    assert launch.fields("p", {"a": 1, "q": {"b": {"c": 2}}}) == {"p.a": 1, "p.q.b.c": 2}
