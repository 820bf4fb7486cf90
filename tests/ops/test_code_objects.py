"""What the gfx942 and gfx950 code objects that ship say of themselves, without running them."""

from __future__ import annotations

import pytest
import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import launch, op
from vllm_rocm_ops.emulator.decode import decode
from vllm_rocm_ops.emulator.objects import CodeObject

AMD = ("gfx942", "gfx950")


def objects(arch: str) -> dict[str, CodeObject]:
    return {path.stem: CodeObject(path) for path in sorted((launch.CODE / arch).glob("*.co"))}


def planned(arch: archs.Arch):
    """Every launch that any case of any op plans with any configuration."""
    for the_op in op.registered():
        for case in the_op.cases():
            a = the_op.Arguments(*case.make("meta", torch.Generator(), arch.fp8_dtype))
            for config in the_op.configs(a, arch):
                yield from the_op.plan(config, the_op.allocate(a), a, arch)


@pytest.mark.parametrize("arch", AMD)
def test_plans_and_kernels_are_the_same(arch):
    """Each planned symbol exists, takes just the arguments it is given, and may have as many threads; none is unused."""
    kernels = {(module, name): k for module, o in objects(arch).items() for name, k in o.kernels.items()}
    launches = {(l.module, l.symbol): l for l in planned(archs.ARCHS[arch])}
    assert launches.keys() == kernels.keys()
    for key, l in launches.items():
        explicit = [a for a in kernels[key].metadata[".args"] if not a[".value_kind"].startswith("hidden")]
        if len(explicit) == 1 < len(l.args):  # one struct of them all
            assert explicit[0][".size"] == launch.packer(l.args)[0].size, key
        else:
            assert [a[".offset"] for a in explicit] == offsets(l.args), key
        assert l.block[0] <= kernels[key].max_block, key


def offsets(args: tuple) -> list[int]:
    """Where each argument lies in the buffer: the layout of all before it and itself, less itself."""
    return [launch.packer(args[: i + 1])[0].size - launch.packer((arg,))[0].size for i, arg in enumerate(args)]


@pytest.mark.parametrize("arch", AMD)
def test_caches_are_left_alone(arch):
    """What blocks leave for each other goes past the caches of their dies: no kernel writes back or invalidates all that others
    have there. And no store has a scalar offset: clang may miss that the next instruction overwrites its data."""
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
    """No spills, no scratch, no more LDS than there is."""
    for code_object in objects(arch).values():
        assert code_object.arch == arch
        for name, kernel in code_object.kernels.items():
            statistics = kernel.statistics
            assert statistics["vgpr_spills"] == statistics["sgpr_spills"] == statistics["scratch"] == 0, name
            assert statistics["lds"] <= archs.ARCHS[arch].lds_bytes, name
