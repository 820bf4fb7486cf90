"""Test kernels of code objects that no op launches, on the package's own, treated as foreign."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from marks import full
from timing_study import external_kernel

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import CodeObject
from vllm_rocm_ops.timing import launch_time, machines, trace

pytestmark = full
MACHINE = machines.MI300X
PATH = launch.code_object("rms_norm", "gfx942")
ROWS, HIDDEN = 3, 2048


def planned(input: torch.Tensor, weight: torch.Tensor, rows: int = ROWS):
    """Return the plugin's launch of a norm."""
    (one,) = ops.rms_norm.explain(input, weight, 1e-6, arch=MACHINE.arch).launches
    return one


def as_external(one, path=PATH) -> external_kernel.ObjectLaunch:
    """Return a launch with its arguments by their offsets."""
    takes = json.loads(path.with_suffix(".json").read_text())["kernels"][one.symbol]["arguments"]
    codes = external_kernel.kernel_arguments.FORMATS
    args = {}
    for name, (offset, kind) in takes.items():
        value = one.args[name]
        is_bytes = not isinstance(value, torch.Tensor)
        args[offset] = struct.pack("<" + codes[kind], value or 0) if is_bytes else value
    return external_kernel.ObjectLaunch(one.symbol, one.grid, one.block, args, one.lds)


@pytest.fixture(scope="module")
def norm() -> external_kernel.ObjectLaunch:
    torch.manual_seed(0)
    input, weight = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16), torch.randn(HIDDEN, dtype=torch.bfloat16)
    return as_external(planned(input, weight))


def as_json(one: external_kernel.ObjectLaunch) -> str:
    """Return the arguments as a user writes them."""
    return json.dumps(
        {
            str(offset): f"buffer:{value.numel() * value.element_size()}"
            if isinstance(value, torch.Tensor)
            else f"u{8 * len(value)}:{int.from_bytes(value, 'little')}"
            for offset, value in one.args.items()
        }
    )


def command(one: external_kernel.ObjectLaunch, args: str, **others) -> list[str]:
    path = others.pop("object", PATH)
    given = {"symbol": one.symbol, "grid": "x".join(map(str, one.grid)), "args": args}
    given |= {"block": "x".join(map(str, one.block)), "lds": one.lds} | others
    return [str(path), *(f"--{name}={value}" for name, value in given.items())]


def test_results_are_those_of_the_op(norm):
    external_kernel.ObjectEmulator("gfx942").run(PATH, norm)
    (input, weight, *_, out) = (value for value in norm.args.values() if isinstance(value, torch.Tensor))
    wanted = ops.rms_norm(input, weight, 1e-6)
    assert (out - wanted).abs().max() <= wanted.abs().max() / 128


def test_the_command_predicts_a_launch(norm, capsys):
    assert external_kernel.main(command(norm, as_json(norm))) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{norm.symbol} on MI300X: predicted ") and first.endswith(
        "us, not measured; error unknown"
    )
    assert "cycles of a compute unit with 1 block," in second


def test_an_external_kernel_is_predicted_like_the_same_op(norm):
    emulator = trace.RecordingEmulator("gfx942", races=False)
    one = planned(torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16), torch.zeros(HIDDEN, dtype=torch.bfloat16))
    expected = launch_time.predict(MACHINE, trace.record(emulator, PATH, one, range(ROWS)))
    assert external_kernel.predict(
        MACHINE, external_kernel.record("gfx942", PATH, norm), norm.grid
    ).us == pytest.approx(expected.us, rel=0.02)


def test_bad_input_says_what_is_wrong(norm, capsys, tmp_path):
    good = as_json(norm)
    text, cut = tmp_path / "text.co", tmp_path / "cut.co"
    text.write_text("no object")
    cut.write_bytes(PATH.read_bytes()[:3000])
    size = external_kernel.explicit_bytes(CodeObject(PATH).kernels[norm.symbol])
    for arguments, message in (
        (command(norm, good, object=text), "text.co must be an AMDGPU ELF file"),
        (command(norm, good, object=cut), "cut.co must be a code object, got"),
        (command(norm, good, object=tmp_path / "none.co"), "none.co must be a code object, got FileNotFoundError"),
        (
            command(norm, good, object=launch.code_object("rms_norm", "gfx950")),
            f"{norm.symbol} of {launch.code_object('rms_norm', 'gfx950')} must be compiled for gfx942, got gfx950",
        ),
        (command(norm, good, symbol="norm"), "--symbol must be one of fused_add_rms_norm"),
        (command(norm, good, grid="4x"), "--grid must be one to three positive numbers"),
        (command(norm, good, block="2048"), f"{norm.symbol}: block must be at most"),
        (command(norm, good, lds=-1), "--lds must not be negative, got -1"),
        (command(norm, "zz"), f"{norm.symbol}: --args must be JSON, got zz"),
        (command(norm, '["u32:1"]'), f"{norm.symbol}: --args must be {size} bytes, got 4"),
        (command(norm, '["u32:-1"]'), "--args 0 must be like buffer:4096"),
        (command(norm, '["buffer:0"]'), "--args 0 must have buffers of 1 to"),
        (command(norm, '{"x": "u32:1"}'), "--args must be by their offsets, got 'x'"),
        (command(norm, "7"), "--args must be a list or an object, got 7"),
    ):
        try:
            assert external_kernel.main(arguments) == 2, arguments
        except SystemExit as error:
            assert error.code == 2
        assert message in capsys.readouterr().err, arguments


def test_a_fault_names_symbol_offset_and_instruction(norm, capsys, tmp_path):
    small = as_json(norm).replace(f"buffer:{2 * ROWS * HIDDEN}", "buffer:64")
    assert external_kernel.main(command(norm, small)) == 2
    shown = capsys.readouterr().err
    assert f"external_kernel: {norm.symbol}+0x" in shown and "load_dword" in shown and "has 64" in shown
    image = bytearray(PATH.read_bytes())
    kernel = CodeObject(PATH).kernels[norm.symbol]
    code = bytes(CodeObject(PATH).image[kernel.preloaded_entry :][:64])
    at = image.index(code)
    image[at : at + 4] = b"\xff" * 4
    other = tmp_path / "unknown.co"
    other.write_bytes(image)
    assert external_kernel.main(command(norm, as_json(norm), object=other)) == 2
    offset = kernel.preloaded_entry - kernel.entry
    assert f"external_kernel: {norm.symbol}+{offset:#x} `undecodable`" in capsys.readouterr().err


def test_axes_of_the_grid_say_what_blocks_share():
    grid = (16, 4, 1)
    rows, columns, everywhere = (n << 29 for n in (5, 6, 7))

    def block(number: int) -> trace.Block:
        x, y = number % 16, number // 16
        touched = trace.Access((rows + y, columns + x, everywhere), 3 * trace.LINE)
        return trace.Block(number, [[(trace.Instr("vmem", 0, 8), touched)]])

    blocks = [block(number) for number in external_kernel.probes(grid)]
    found = external_kernel.sharing(MACHINE, trace.Recording("k", 64, 1, blocks, frozenset()), grid, 304)
    assert [found.chip[line] for line in (rows, columns, everywhere)] == [16, 4, 64]
    assert [found.die[line] for line in (rows, columns, everywhere)] == [2, 4, 8]
    assert everywhere in found.chip and rows not in found.chip


def test_what_blocks_have_for_themselves_may_be_loaded_more_than_once():
    blocks = [
        trace.Block(n, [[(trace.Instr("vmem", 0, 8), trace.Access(((5 << 29) + n,), trace.LINE))]])
        for n in external_kernel.probes((8, 8, 1))
    ]
    recording = trace.Recording("k", 64, 1, blocks, frozenset({5}))
    once, twice = (external_kernel.predict(MACHINE, recording, (8, 8, 1), repeats) for repeats in (1.0, 2.0))
    assert once.megabytes == pytest.approx(2 * twice.megabytes) == pytest.approx(64 * trace.LINE / 1e6)


def test_matrix_instructions_lower_the_clock():
    def us(cycles: int) -> float:
        wave = [(trace.Instr("matrix" if cycles else "valu", 8 * n, 8, cycles=cycles), None) for n in range(64)]
        block = trace.Block(0, [[*wave, (trace.Instr("end", 512, 4), None)]] * 4)
        return external_kernel.predict(MACHINE, trace.Recording("k", 1, 1, [block], frozenset()), (1, 1, 1))

    busy, idle = us(16), us(0)
    assert busy.us == pytest.approx(busy.cycles / MACHINE["matrix_clock"])
    assert idle.us == pytest.approx(idle.cycles / MACHINE["clock"])
