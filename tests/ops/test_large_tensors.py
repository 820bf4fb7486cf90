"""Test that tensors above 2 and 4 GB are computed right, or that the reference runs with a reason.

test_far_apart.py has a call of every op. Few rows, or experts, are far apart, so that their offsets are large. On the
CPU, memory is allocated only where it is written; the emulator reports a read between rows as an error.
"""

from __future__ import annotations

import dataclasses
import math
import mmap

import pytest
import torch
from marks import CHIPS, few_of
from op_tests import executors

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch, op, quantization
from vllm_rocm_ops.core.correctness import (
    FLOOR,
    all_in_float64,
    as_tuple,
    check,
    check_terms,
    clone,
    generator_of,
    unwritten_is_nan,
)
from vllm_rocm_ops.core.launch import Workspace
from vllm_rocm_ops.core.stats import reset_stats, stats
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.shared import experts_quantize, experts_tiled, gemm, skinny_gemm
from vllm_rocm_ops.ops.shared.experts import SCHEMES

GB = 2**30
FAR = 2**25 - 16  # maximum bytes between the rows of a skinny GEMM
TILE_FAR = (2**31 - 4096) // 256 // 16 * 16  # of a tiled GEMM
MX_FAR = 2**24 - 16  # of an MX-FP8 GEMM
EXECUTORS = pytest.mark.parametrize("executor", few_of([*executors()][1::-1]), indirect=True)  # gfx950 has MX-FP8 GEMMs


def reach(shape, strides, size: int) -> int:
    """Return the bytes from a tensor's first to its last."""
    return (sum((n - 1) * stride for n, stride in zip(shape, strides)) + 1) * size


def reserved(shape, dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor of zeros that allocates memory only where it is touched."""
    no_reserve = 0x4000  # Linux's MAP_NORESERVE
    needed = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, needed, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(shape)


def spread(tensor: torch.Tensor, *steps: int, device: str) -> torch.Tensor:
    """Return a tensor's values with these byte strides."""
    size = tensor.element_size()
    strides = [step // size for step in steps]
    needed = reach(tensor.shape, strides, size)
    if device == "cuda":
        torch.cuda.empty_cache()
        storage = torch.empty(needed // size, dtype=tensor.dtype, device=device)
    else:
        storage = reserved((needed // size,), tensor.dtype)
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


def run(the_op: op.Op, arguments: tuple, apart: dict[str, tuple[int, ...]], executor, configs=None) -> None:
    """Compare every configuration, or some, on spread arguments with the reference on the original ones."""
    device, arch = executor
    small = the_op.Arguments(*arguments)
    left = [clone(v) for v in small]
    reference = as_tuple(the_op.reference(*left))
    of_oracle = all_in_float64(the_op, small)
    oracle = as_tuple(the_op.reference(*of_oracle))
    on_device = small._replace(**{n: clone(v, device) for n, v in small._asdict().items()})
    for config in configs or the_op.configs(small, arch):
        large = on_device._replace(**{n: spread(getattr(small, n), *s, device=device) for n, s in apart.items()})
        reset_stats()
        with the_op.running(config), unwritten_is_nan():
            ours = as_tuple(the_op(*large))
        (ran,) = stats()[the_op.name]
        assert not ran.startswith("fallback"), ran
        floor = max(FLOOR, arch.sum_rounding) if the_op.sums and device == "cuda" else FLOOR
        for i, (mine, theirs, exact) in enumerate(zip(ours, reference, oracle)):
            check(f"{config} output {i}", mine, theirs, exact.double(), not the_op.sums, floor)
        for name in (*the_op.mutates, *the_op.writes):
            expected, found = left[small._fields.index(name)], getattr(large, name)
            if name in (*the_op.inexact, *the_op.writes) and expected is not None:
                exact = of_oracle[small._fields.index(name)].double()
                pair = (one.clone(memory_format=torch.contiguous_format) for one in (found, expected))
                check(f"{config} {name}", *pair, exact, not the_op.sums, floor)  # one row has any stride
            else:
                assert expected is None or torch.equal(found.cpu(), expected), name


def gemm_arguments(the_op: op.Op, m: int, n: int, k: int, fp8: torch.dtype) -> tuple:
    generator = generator_of(f"{the_op.name} {m} {n} {k}")

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) + 0.5

    def e8m0(rows: int) -> torch.Tensor:
        return torch.randint(120, 134, (rows, k // 32), generator=generator, dtype=torch.uint8)

    a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    if the_op is ops.unquantized_gemm:
        return a.bfloat16(), b.bfloat16()
    if the_op is ops.gemm:
        return (a * 9).to(torch.int8), (b * 9).to(torch.int8).t(), torch.bfloat16, rand(m, 1), rand(n, 1)
    a, b = a.to(fp8), b.to(fp8)
    if the_op is ops.mxfp8_scaled_mm:
        return a, b, e8m0(m), e8m0(n), torch.bfloat16
    if the_op is ops.scaled_mm:
        return a, b.t(), rand(m, 1), rand(n, 1), torch.bfloat16
    return a, b, rand(m, -(-k // gemm.BLOCK)), rand(-(-n // gemm.BLOCK), -(-k // gemm.BLOCK)), torch.bfloat16


SKINNY = (ops.scaled_mm, ops.block_scaled_mm, ops.unquantized_gemm)


@EXECUTORS
@pytest.mark.parametrize("the_op", SKINNY, ids=lambda o: o.name)
@pytest.mark.parametrize("m", few_of([64, 5]))
def test_skinny_products(the_op, m, executor):
    """64 tokens extend over almost 2 GB, the maximum, and rows of the weight over more than 4."""
    a, b, *rest = gemm_arguments(the_op, m, 2**32 // FAR + 9, 192, executor[1].fp8_dtype)
    size = a.element_size()
    apart = {the_op.Arguments._fields[0]: (FAR, size)}
    apart[the_op.Arguments._fields[1]] = (size, FAR) if the_op is ops.scaled_mm else (FAR, size)
    run(the_op, (a, b, *rest), apart, executor)


@EXECUTORS
@pytest.mark.parametrize("the_op", SKINNY[:2], ids=lambda o: o.name)
@pytest.mark.parametrize("m, n", [(2**32 // TILE_FAR + 9, 130), (65, 2**32 // TILE_FAR + 9)], ids=["tokens", "weight"])
def test_tiled_products(the_op, m, n, executor):
    a, b, *rest = gemm_arguments(the_op, m, n, 160, executor[1].fp8_dtype)
    apart = {"a": (TILE_FAR, 1)} if m > n else {"b": (1, TILE_FAR) if the_op is ops.scaled_mm else (TILE_FAR, 1)}
    run(the_op, (a, b, *rest), apart, executor)


@EXECUTORS
@pytest.mark.parametrize("m", [5, 70])
def test_scales_of_tokens(m, executor):
    """Token scales of a block-scaled GEMM may extend over 2 GB."""
    arguments = gemm_arguments(ops.block_scaled_mm, m, 130, 384, executor[1].fp8_dtype)
    for steps in (((2**31 - 64) // (m - 1) // 4 * 4, 4), (4, (2**31 - 4 * m) // 2 // 4 * 4)):
        run(ops.block_scaled_mm, arguments, {"scale_a": steps}, executor)


@EXECUTORS
@pytest.mark.parametrize("m, n", [(5, 265), (64, 265), (265, 70), (66, 265)])
def test_mx_products(m, n, executor):
    if not executor[1].block_scales:
        return  # the reference runs
    apart = {"a": (MX_FAR, 1), "scale_a": (MX_FAR, 1), "b": (MX_FAR, 1), "scale_b": (MX_FAR, 1)}
    arguments = gemm_arguments(ops.mxfp8_scaled_mm, m, n, 256, torch.float8_e4m3fn)
    run(ops.mxfp8_scaled_mm, arguments, apart, executor)


EXPERTS = {case.name: case for case in ops.fused_experts.cases()}


@EXECUTORS
@pytest.mark.parametrize(
    "case",
    few_of(
        [
            "block",
            "block-quantized",
            "block-m17-one-expert",
            "channel",
            "bf16",
            "mx",
            "mx-quantized",
            "block-m65",
            "channel-m70",
            "bf16-m70",
        ]
    ),
)
def test_experts(case, executor):
    """Rows of an expert's weights extend over almost 2 GB, experts over 4 and more, and inputs quantized before over 4."""
    arch = executor[1]
    arguments = EXPERTS[case].make("cpu", generator_of(case), arch.fp8_dtype)
    small = ops.fused_experts.Arguments(*arguments)
    if not ops.fused_experts.configs(small, arch):
        return  # no kernel of this arch supports it: the reference runs
    m, size = len(small.hidden), small.w1.element_size()
    apart = {name: (2**31, (2**31 - 4096) // getattr(small, name).shape[1] // 16 * 16, size) for name in ("w1", "w2")}
    row = (2**31 - 4096) // m if small.w1.dtype == small.hidden.dtype else 2**32 // (m - 1) + 16
    apart["hidden"] = (row // 16 * 16, small.hidden.element_size())
    run(ops.fused_experts, arguments, apart, executor)


ROWS = [o for o in op.registered() if o.Arguments._fields[0] == "input"]


HEADS = {o: c for o in ROWS for c in o.cases() if c.name == "3x8-heads"}


@EXECUTORS
@pytest.mark.parametrize("the_op", HEADS, ids=lambda o: o.name)
def test_heads(the_op, executor):
    """Heads of three rows extend over 8 GB."""
    arguments = HEADS[the_op].make("cpu", generator_of(the_op.name), executor[1].fp8_dtype)
    run(the_op, arguments, {"input": (2**32 + 32, 512, 2)}, executor)


# Outputs and workspaces of more than 2^31 bytes: only the last blocks of each launch run, which write beyond that.


def run_last(emulator, planned: launch.Launch, blocks: int) -> dict[int, torch.Tensor]:
    """Run the last blocks along x, and return the workspaces in reserved memory, by their ids."""
    workspaces = {
        id(arg): reserved((int(arg),), torch.uint8) for arg in planned.named.values() if isinstance(arg, Workspace)
    }
    filled = planned.with_each(lambda arg: workspaces.get(id(arg), arg))
    x, y, _ = planned.grid
    chosen = [row * x + last for row in range(y) for last in range(x - blocks, x)]
    emulator.run(launch.code_object(planned.module, emulator.arch.name), filled, blocks=chosen)
    return workspaces


def allocate_reserved(the_op: op.Op, a):
    on_meta = the_op.Arguments(*(v.to("meta") if isinstance(v, torch.Tensor) else v for v in a))
    outputs = tuple(reserved(v.shape, v.dtype) for v in as_tuple(the_op.allocate(on_meta)))
    return outputs if len(outputs) > 1 else outputs[0]


def with_zeros_before(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    large = reserved((rows, *tensor.shape[1:]), tensor.dtype)
    large[-len(tensor) :] = tensor
    return large


def check_last_rows(the_op: op.Op, arguments: tuple, names: tuple[str, ...], rows: int, blocks: int, arch_name: str):
    """Check the last rows of outputs, with the given arguments as the last of `rows` rows.

    `names` are the arguments with rows. Races are not looked for, as the emulator distinguishes only 2^20 waves.
    """
    emulator, small = Emulator(arch_name, races=False), the_op.Arguments(*arguments)
    left = [clone(v) for v in small]
    reference = as_tuple(the_op.reference(*left))
    oracle = as_tuple(the_op.reference(*all_in_float64(the_op, small)))
    fitting = the_op.configs(small, emulator.arch)
    for config in dict.fromkeys((fitting[0], fitting[-1])):
        large = small._replace(**{name: with_zeros_before(getattr(small, name), rows) for name in names})
        outputs = allocate_reserved(the_op, large)
        assert as_tuple(outputs)[0].nbytes > 2**31
        (planned,) = the_op.plan(config, outputs, large, emulator.arch)
        run_last(emulator, planned, blocks)
        for i, (mine, theirs, exact) in enumerate(zip(as_tuple(outputs), reference, oracle)):
            check(f"{config} output {i}", mine[-len(theirs) :], theirs, exact.double(), True, FLOOR)
        for name in the_op.mutates:
            expected = left[small._fields.index(name)]
            assert expected is None or torch.equal(getattr(large, name)[-len(expected) :], expected), name


EMULATED = pytest.mark.parametrize("arch_name", CHIPS)


@EMULATED
@pytest.mark.parametrize("the_op", ROWS, ids=lambda o: o.name)
def test_last_of_many_rows(the_op, arch_name):
    case = next(c for c in the_op.cases() if c.name == "bf16")
    arguments = case.make("cpu", generator_of(case.name), archs.named(arch_name).fp8_dtype)
    rows_of = tuple(n for n in ("input", "gate", "tokens", "residual") if n in the_op.Arguments._fields)
    check_last_rows(the_op, arguments, rows_of, 2**31 // 4096 + 5, 3, arch_name)


@EMULATED
def test_last_of_many_tokens(arch_name):
    arguments = torch.randn(4, 32, generator=generator_of("tokens")).bfloat16(), 32, True
    check_last_rows(ops.topk_softmax, arguments, ("gating_output",), 2**24 + 4, 1, arch_name)


@EMULATED
@pytest.mark.parametrize(
    "m, n, k, blocks", [(64, 2**26 + 64, 16, 1), (2**16 + 64, 2**15 + 128, 128, 8)], ids=["skinny", "tiled"]
)
def test_last_of_a_large_product(m, n, k, blocks, arch_name):
    """Each block has one tile, and the last blocks, one per die, have the last tiles."""
    emulator, one = Emulator(arch_name), torch.ones(1)
    fp8, generator = emulator.arch.fp8_dtype, generator_of("product")
    last_a, last_b = (torch.randn(rows, k, generator=generator).to(fp8) for rows in (64, min(n, 64)))
    a, b = with_zeros_before(last_a, m), with_zeros_before(last_b, n)
    given = ops.scaled_mm.Arguments(a, b.t(), one, one, torch.bfloat16)
    config = skinny_gemm.SkinnyConfig(64, 1, n // 64) if m == 64 else ops.scaled_mm.configs(given, emulator.arch)[0]
    out = allocate_reserved(ops.scaled_mm, given)
    (planned,) = ops.scaled_mm.plan(config, out, given, emulator.arch)
    run_last(emulator, planned, blocks)
    last_a, last_b = last_a.double(), last_b.double()
    terms = last_a.abs() @ last_b.abs().t()
    check_terms(f"{config}", out[-64:, -64:], last_a @ last_b.t(), terms, FLOOR)


def last_of(the_op: op.Op, small, m: int, n: int):
    """Return the arguments of a product as the last of `m` and `n` rows and columns, the others zero."""
    large = {}
    for name, x in small._asdict().items():
        if not isinstance(x, torch.Tensor):
            continue
        rows = x.t() if name == "b" and x.stride(0) == 1 else x
        count = m if name in ("a", "x", "scale_a") else n
        rows = with_zeros_before(rows, count if len(rows) == 64 else -(-count // gemm.BLOCK))
        large[name] = rows.t() if name == "b" and x.stride(0) == 1 else rows
    return small._replace(**large)


def columns_first(x: torch.Tensor) -> torch.Tensor:
    """Return a large tensor's last 64 rows, and zeros before, with rows as its innermost dimension."""
    other = reserved((x.shape[1], len(x)), x.dtype).t()
    other[-64:] = x[-64:]
    return other


PRODUCTS = [(the_op, "") for the_op in (*SKINNY, ops.mxfp8_scaled_mm)]
PRODUCTS += [(ops.gemm, kind) for kind in ("", "any", "blocks")]


@EMULATED
@pytest.mark.parametrize("the_op, kind", PRODUCTS, ids=lambda v: getattr(v, "name", v))
def test_results_of_more_than_32_bits(the_op, kind, arch_name):
    """Tiles of each product store more than 2^32 results."""
    emulator, (m, n, k) = Emulator(arch_name), (2**16 + 64, 2**16 + 128, 128)
    is_mx = the_op is ops.mxfp8_scaled_mm
    if is_mx and not emulator.arch.block_scales:
        return  # the reference runs
    arguments = gemm_arguments(the_op, 64, 64, k, torch.float8_e4m3fn if is_mx else emulator.arch.fp8_dtype)
    small = the_op.Arguments(*arguments)
    if kind == "blocks":
        small = small._replace(scale_a=small.scale_a[:, :1], scale_b=torch.ones(1, 1), block_scales=True)
    given = last_of(the_op, small, m, n)
    if kind == "any":
        given = given._replace(a=columns_first(given.a))
    rules = [rule for rule, holds in the_op.can_implement(given, emulator.arch) if not holds]
    assert not rules, rules
    config = next(c for c in the_op.configs(given, emulator.arch) if getattr(c, "split_k", 1) == 1)
    if is_mx:
        config = dataclasses.replace(config, blocks=-(-m // config.tokens) * -(-n // config.kernel.rows))
    out = allocate_reserved(the_op, given)
    assert out.numel() > 2**32
    (planned,) = the_op.plan(config, out, given, emulator.arch)
    run_last(emulator, planned, 8)
    exact = the_op.reference(*all_in_float64(the_op, small)).double()
    check(f"{config}", out[-64:, -64:].contiguous(), the_op.reference(*small), exact, False, FLOOR)


@EMULATED
def test_last_of_a_long_stream(arch_name):
    """The last block of 2^16 copies the last run of 4 KB of every 256 MB."""
    emulator, last = Emulator(arch_name), torch.arange(1024, dtype=torch.int32)
    words = with_zeros_before(last, 17 * 2**26)
    a = ops.stream_memory.Arguments(words, "copy", 2**16)
    (config,) = ops.stream_memory.configs(a, emulator.arch)
    out = allocate_reserved(ops.stream_memory, a)
    (planned,) = ops.stream_memory.plan(config, out, a, emulator.arch)
    run_last(emulator, planned, 1)
    assert torch.equal(out[-1024:], last)


@EMULATED
@pytest.mark.parametrize("kind", ["channel", "block", "int8"])
def test_last_rows_that_are_quantized(kind, arch_name):
    """They are the inputs of the experts."""
    emulator, (rows, columns) = Emulator(arch_name), (2**18 + 3, 8192)
    fp8, last = emulator.arch.fp8_dtype, torch.randn(2, columns, generator=generator_of(kind)).bfloat16()
    hidden = experts_quantize.UnquantizedRows(with_zeros_before(last, rows), rows, columns, columns, torch.bfloat16)
    scheme, to_int8 = SCHEMES["channel" if kind == "int8" else kind], kind == "int8"
    written, planned = experts_quantize.quantize(hidden, scheme, None, emulator.arch, to_int8=to_int8)
    ours = run_last(emulator, planned, 2)[id(written.rows)].view(fp8).reshape(rows, columns)[-2:]
    runs = last.float().unflatten(-1, (-1, 128 if kind == "block" else columns))
    if kind == "int8":
        expected, _ = quantization.int8(runs, None)
    else:
        expected, _ = quantization.per_token(runs, fp8, None)
    assert torch.equal(ours.view(torch.uint8), expected.flatten(-2).view(torch.uint8))


@EMULATED
def test_last_tokens_that_are_combined(arch_name):
    """They combine the experts' results, 9 rows of fp32 per token."""
    emulator, (m, h, topk) = Emulator(arch_name), (2**15 + 5, 8192, 9)
    w1, w2 = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((16, 32, h), (16, h, 16)))
    ids = torch.arange(topk, dtype=torch.int32).expand(m, topk).contiguous()
    hidden = reserved((m, h), torch.bfloat16)
    a = ops.fused_experts.Arguments(hidden, w1, w2, torch.ones(m, topk), ids, torch.bfloat16)
    out = allocate_reserved(ops.fused_experts, a)
    planned = experts_tiled.launches(experts_tiled.TiledConfig(64), out, a, emulator.arch)[-1]
    last = torch.randn(2 * topk, h, generator=generator_of("combine"))
    results = with_zeros_before(last, m * topk)
    run_last(emulator, planned.with_each(lambda arg: results if isinstance(arg, Workspace) else arg), 2)
    exact = last.double().reshape(2, topk, h).sum(1)
    assert (out[-2:].double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@EMULATED
def test_last_tile_of_experts(arch_name):
    """The activations and the results of an expert's last pairs are beyond 2^32."""
    emulator, (m, topk, size) = Emulator(arch_name), (2**24 + 8, 8, 32)
    generator, pairs, dtype = generator_of("tile"), m * topk, torch.bfloat16
    last, w1, w2 = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((8, size), (2 * size, size), (size, size))
    )
    ids, weights = (reserved((m, topk), d) for d in (torch.int32, torch.float32))
    weights[-8:] = 1
    a = ops.fused_experts.Arguments(with_zeros_before(last, m), w1[None], w2[None], weights, ids, dtype)
    rules = [rule for rule, holds in ops.fused_experts.can_implement(a, emulator.arch) if not holds]
    assert not rules, rules
    out = allocate_reserved(ops.fused_experts, a)
    _, *products, _ = experts_tiled.launches(experts_tiled.TiledConfig(64), out, a, emulator.arch)
    order = torch.arange(pairs - 64, pairs, dtype=torch.int32).flip(0)
    activations, results = reserved((pairs, size), dtype), reserved((pairs, size), torch.float32)
    given = {
        "sorted": with_zeros_before(order, pairs),
        "tiles": torch.tensor([[pairs, 1, 0, 0], [0, pairs - 64, pairs, 0]], dtype=torch.int32),
    }
    for planned, operands in zip(products, ({"out": activations}, {"a": activations, "out": results}), strict=True):
        replaced = {f"problem.{name}": value for name, value in (given | operands).items()}
        assert replaced.keys() == {name for name, value in planned.named.items() if isinstance(value, Workspace)}
        planned = planned._replace(args=planned.args | replaced)
        emulator.run(launch.code_object(planned.module, emulator.arch.name), planned, blocks=[0])
    gate, up = (last.double() @ w1.double().t()).repeat_interleave(topk, 0).flip(0).chunk(2, 1)
    exact, act = torch.nn.functional.silu(gate) * up, activations[-64:].double()
    assert (act - exact).abs().max() <= 2**-8 * exact.abs().max()
    exact = (act @ w2.double().t()).flip(0)
    assert (results[-64:].double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@EMULATED
def test_e8m0_scales_far_apart(arch_name):
    """These are a weight's scales, which are widened."""
    emulator = Emulator(arch_name)
    arguments = gemm_arguments(ops.block_scaled_mm, 5, 304, 384, emulator.arch.fp8_dtype)
    scales = torch.randint(120, 134, (3, 3), generator=generator_of("e8m0"), dtype=torch.uint8)
    small = (*arguments[:3], scales.view(torch.float8_e8m0fnu), torch.float32)
    with launch.executor(emulator):
        run(ops.block_scaled_mm, small, {"scale_b": (2**30 + 64, 1)}, ("cpu", emulator.arch))


def explain(the_op: op.Op, arch: str, *args, **kwargs) -> str:
    return the_op.explain(*args, **kwargs, arch=arch).source


def meta(*shape: int, dtype=torch.float32, strides=None) -> torch.Tensor:
    strides = strides or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


ARCHS = pytest.mark.parametrize("arch", [a.name for a in archs.ARCHS.values()])


@ARCHS
def test_products_above_2gb_fall_back_with_a_reason(arch):
    fp8 = archs.named(arch).fp8_dtype
    one, bf16 = meta(1), torch.bfloat16

    def scaled(m: int, n: int, k: int, a_stride: int, b_stride: int) -> str:
        a, b = meta(m, k, dtype=fp8, strides=(a_stride, 1)), meta(n, k, dtype=fp8, strides=(b_stride, 1)).t()
        return explain(ops.scaled_mm, arch, a, b, one, one, bf16)

    assert "fallback" not in scaled(64, 200, 256, FAR, FAR)
    assert scaled(64, 200, 256, 2**25, 256).endswith("a's rows have one stride, a multiple of 16 bytes below 32 MB")
    assert scaled(64, 200, 256, 256, 2**25).endswith("b's rows have one stride, a multiple of 16 bytes below 32 MB")
    assert "fallback" not in scaled(600, 600, 256, TILE_FAR, TILE_FAR)
    assert scaled(600, 200, 256, 2**23, 256).endswith("256 rows of a span less than 2 GB")
    assert scaled(600, 200, 256, 256, 2**23).endswith("256 rows of b span less than 2 GB")
    assert scaled(4, 2**20, 2**16, 2**16, 2**16).endswith("N rows below 64 GB")
    assert scaled(1, 2**30, 16, 16, 16).endswith("N is at least 1 and below 2^30")
    assert "K is at least 1, rows along K are below 32 MB" in scaled(2, 64, 2**25, 16, 16)
    a, b = meta(1, 256, dtype=fp8), meta(256, 256, dtype=fp8)
    scale_b = meta(2, 2, strides=(2**31, 1))
    why = explain(ops.block_scaled_mm, arch, a, b, meta(1, 2), scale_b, bf16)
    assert why.endswith("scale_b's row stride is below 2^31 elements")


@ARCHS
def test_experts_above_2gb_fall_back_with_a_reason(arch):
    fp8, bf16 = archs.named(arch).fp8_dtype, torch.bfloat16

    def experts(m: int, experts: int, h: int, inner: int, dtype, row: int = 0, hidden_row: int = 0, topk: int = 1):
        row, hidden_row = row or h, hidden_row or h
        scales = [meta(experts), meta(experts)] if dtype == fp8 else [None, None]
        return explain(
            ops.fused_experts,
            arch,
            meta(m, h, dtype=bf16, strides=(hidden_row, 1)),
            meta(experts, 2 * inner, h, dtype=dtype, strides=(2 * inner * row, row, 1)),
            meta(experts, h, inner, dtype=dtype),
            meta(m, topk),
            meta(m, topk, dtype=torch.int32),
            bf16,
            *scales,
        )

    for m in (64, 70):
        assert "fallback" not in experts(m, 4, 256, 128, fp8, hidden_row=2**30)
        assert "fallback" not in experts(m, 4, 256, 128, bf16, hidden_row=2**23)
        why = "hidden, if no launch quantizes it first, spans less than 2 GB"
        assert experts(m, 4, 256, 128, bf16, hidden_row=2**24).endswith(why)
        assert experts(m, 4, 256, 128, fp8, row=2**23).endswith("an expert's w1 spans less than 2 GB")
    assert "Streamed" in experts(64, 4, 64, 2**15, bf16)
    assert "Tiled" in experts(64, 4, 64, 2**16, bf16)  # the streamed kernels' division into items would be off


def test_mx_products_above_2gb_fall_back_with_a_reason():
    def product(m: int, n: int, stride: int) -> str:
        fp8, u8 = torch.float8_e4m3fn, torch.uint8
        rows = [meta(rows, 256, dtype=fp8, strides=(stride, 1)) for rows in (m, n)]
        scales = [meta(rows, 8, dtype=u8) for rows in (m, n)]
        return explain(ops.mxfp8_scaled_mm, "gfx950", *rows, *scales, torch.bfloat16)

    assert "fallback" not in product(300, 300, MX_FAR)
    assert product(300, 300, 2**24).endswith("a's row stride is below 16 MB; b's row stride is below 16 MB")
    assert product(1, 2**30, 256).endswith("M and N are below 2^30")
