"""Test the shipped code objects by their metadata and code, without running them."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from marks import AMD, BUILT, full

from vllm_rocm_ops import collectives
from vllm_rocm_ops.core import archs, launch, op
from vllm_rocm_ops.core.kernel_arguments import FORMATS, Parameters, packer, parameters
from vllm_rocm_ops.emulator.decode import decode
from vllm_rocm_ops.emulator.objects import CodeObject


def objects(arch: str) -> dict[str, CodeObject]:
    return {path.stem: CodeObject(path) for path in sorted((launch.CODE / arch).glob("*.co"))}


def planned(arch: archs.Arch):
    """Yield every launch that any case of any op plans with any configuration."""
    for the_op in op.registered():
        for case in the_op.cases():
            a = the_op.Arguments(*case.make("meta", torch.Generator(), arch.fp8_dtype))
            for config in the_op.configs(a, arch):
                yield from the_op.plan(config, the_op.allocate(a), a, arch)


@pytest.mark.parametrize("arch", AMD)
def test_plans_and_kernels_are_the_same(arch):
    """Each planned symbol exists and supports the planned number of threads; none is unused."""
    kernels = {(module, name): k for module, o in objects(arch).items() for name, k in o.kernels.items()}
    launches = {(l.module, l.symbol): l for l in planned(archs.ARCHS[arch])}
    of_ranks = {(module, name) for module, names in collectives.kernels().items() for name in names}
    assert launches.keys() == kernels.keys() - of_ranks
    for key, l in launches.items():
        assert l.block[0] <= kernels[key].max_block, key


@pytest.mark.parametrize("arch", BUILT)
def test_every_launch_of_every_case_gives_what_its_kernel_takes(arch):
    for l in planned(archs.ARCHS[arch]):
        takes = parameters(launch.code_object(l.module, arch), l.symbol)
        layout, values = packer(l, takes)
        assert layout.size == takes.bytes and len(layout.pack(*values.values())) == takes.bytes


# Stamps against the kernels' arguments


class Parameter(NamedTuple):
    """A parameter of a kernel in its object, possibly a structure.

    Sizes and offsets are in bytes.
    """

    offset: int
    size: int
    is_pointer: bool


def amd_parameters(path: Path) -> dict[str, list[Parameter]]:
    """Return the parameters of each kernel from the metadata.

    They fill the kernarg segment, except for the hidden ones after them.
    """
    found = {}
    for name, kernel in CodeObject(path).kernels.items():
        end = max(arg[".offset"] + arg[".size"] for arg in kernel.metadata[".args"])
        assert kernel.kernarg_size == kernel.metadata[".kernarg_segment_size"] == end, name
        explicit = [arg for arg in kernel.metadata[".args"] if not arg[".value_kind"].startswith("hidden_")]
        kinds = [arg[".value_kind"] == "global_buffer" for arg in explicit]
        found[name] = [Parameter(arg[".offset"], arg[".size"], kind) for arg, kind in zip(explicit, kinds)]
    return found


def nvidia_parameters(path: Path) -> dict[str, list[Parameter]]:
    """Return the parameters of each kernel from its entry's declaration."""
    found = {}
    for name, text in re.findall(r"^\.visible \.entry (\w+)\((.*?)\)", path.read_text(), re.MULTILINE | re.DOTALL):
        found[name], end = [], 0
        for line in text.split(","):
            structure = re.fullmatch(r"\s*\.param \.align (\d+) \.b8 \w+\[(\d+)\]\s*", line)
            number = re.fullmatch(r"\s*\.param \.[usfb](\d+)( \.ptr \.align 1)? \w+\s*", line)
            alignment, size = map(int, structure.groups()) if structure else [int(number[1]) // 8] * 2
            end += -end % alignment
            found[name].append(Parameter(end, size, not structure and bool(number[2])))
            end += size
    return found


def check(takes: Parameters, found: list[Parameter]) -> None:
    """Check a stamp's description of a kernel against its object.

    Each parameter is one number or pointer, or is filled by the fields of a structure except for padding.
    """
    numbers: dict[str, list[tuple[int, str]]] = {}
    padded_to: dict[int, int] = {}  # by the offset of a field after an inner structure, which ends with padding
    before, widest = "", 1
    for name, (offset, kind) in takes.arguments.items():
        numbers.setdefault(name.partition(".")[0], []).append((offset, kind))
        structure, width = name.rpartition(".")[0], struct.calcsize(FORMATS[kind])
        if "." in before and not f"{structure}.".startswith(f"{before}."):
            padded_to[offset] = widest
        before, widest = structure, max(width, widest if structure == before else 1)
    assert len(numbers) == len(found)
    for (name, inside), parameter in zip(numbers.items(), found):
        end, widest = parameter.offset, 1
        for offset, kind in inside:
            width = struct.calcsize(FORMATS[kind])
            end += -end % max(width, padded_to.get(offset, 1))
            assert offset == end, name
            end, widest = end + width, max(widest, width)
        assert end + -end % widest == parameter.offset + parameter.size, name
        assert parameter.is_pointer == (name in takes.arguments and inside[0][1] == "pointer"), name
    assert takes.bytes == max((parameter.offset + parameter.size for parameter in found), default=0)


@pytest.mark.parametrize("arch", BUILT)
def test_stamps_know_the_arguments_of_every_kernel(arch):
    read = nvidia_parameters if arch not in AMD else amd_parameters
    paths = sorted((launch.CODE / arch).glob("*" + archs.ARCHS[arch].code_suffix))
    assert paths
    for path in paths:
        of_object = read(path)
        assert launch.stamp(path)["kernels"].keys() == of_object.keys()
        for name, found in of_object.items():
            check(parameters(path, name), found)


@pytest.mark.parametrize(
    "arch, read", [("gfx950", amd_parameters), pytest.param("sm_90", nvidia_parameters, marks=full)]
)
@pytest.mark.parametrize(
    "module, symbol, of", [("rms_norm", "rms_norm_bf16_x1", ""), ("scaled_mm", "scaled_mm_skinny_16", "problem.")]
)
def test_a_wrong_stamp_is_found(module, symbol, of, arch, read):
    """The errors are a missing argument, a wrong width, a number for a pointer, swapped arguments, and too few bytes."""
    path = launch.code_object(module, arch)
    right, found = parameters(path, symbol), read(path)[symbol]
    check(right, found)
    one, other = {"": ("hidden", "threads_per_block"), "problem.": ("problem.m", "problem.n")}[of]
    at, _ = right.arguments[one]
    for wrong in (
        {name: value for name, value in right.arguments.items() if name != one},
        right.arguments | {one: (at, "i64")},
        right.arguments | {one: right.arguments[other], other: right.arguments[one]},
        {name: (offset, kind.replace("pointer", "f32")) for name, (offset, kind) in right.arguments.items()},
    ):
        with pytest.raises(AssertionError):
            check(Parameters(right.bytes, wrong), found)
    if not of:
        with pytest.raises(AssertionError):
            check(Parameters(right.bytes, right.arguments | {"out": (right.arguments["out"][0], "u64")}), found)
    with pytest.raises(AssertionError):
        check(Parameters(right.bytes - 4, right.arguments), found)


@full
@pytest.mark.parametrize("arch", AMD)
def test_caches_are_left_alone(arch):
    """Data passed between blocks bypass the caches of their dies: no kernel writes back or invalidates these caches.

    No store has a scalar offset: clang may miss that the next instruction overwrites its data.
    """
    for code_object in objects(arch).values():
        for name, kernel in code_object.kernels.items():
            for ins in decode(bytes(code_object.image[kernel.entry : kernel.entry + kernel.size]), kernel.entry):
                assert ins.mnemonic not in ("buffer_wbl2", "buffer_inv", "buffer_wbinvl1"), (name, ins.text)
                assert not (ins.mnemonic.startswith("buffer_store") and ins.operands["soffset"].registers), (
                    name,
                    ins.text,
                )


@pytest.mark.parametrize("arch", AMD)
def test_kernels_keep_to_their_registers(arch):
    """There are no spills, no scratch, and no more LDS than the arch has."""
    for code_object in objects(arch).values():
        assert code_object.arch == arch
        for name, kernel in code_object.kernels.items():
            statistics = kernel.statistics
            assert statistics["vgpr_spills"] == statistics["scratch"] == 0, name
            # The addresses of eight inboxes go to lanes of a vector register.
            assert statistics["sgpr_spills"] == 0 or name.startswith("all_reduce"), name
            assert statistics["lds"] <= archs.ARCHS[arch].lds_bytes, name
