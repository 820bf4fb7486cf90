"""Test all-reduce, norm and quantization in one kernel, on emulated devices: right, bit-equal on all ranks, no hang."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from all_reduce_calls import (
    EPSILON,
    arguments,
    as_summed,
    bits,
    check_results,
    generator_of,
    inputs_of,
    place_of_residual,
)
from emulated_group import EmulatedGroup
from marks import AMD, CHIPS, full

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import RankMissing, all_reduce, launches
from vllm_rocm_ops.core import archs, correctness

DTYPES = (torch.bfloat16, torch.float16)


def check_call(
    arch_name: str,
    ranks: int,
    op,
    dtype,
    rows: int,
    hidden: int,
    epochs=2,
    padding=0,
    with_norm=False,
    group=None,
    **how,
):
    """Check calls over several epochs, each with new inputs."""
    group = group or EmulatedGroup(arch_name, ranks, seed=rows + hidden)
    arch, generator = group.devices.arch, generator_of(arch_name, ranks, op and op.name, dtype, rows, hidden)
    calls = []
    for _ in range(epochs):
        inputs = inputs_of(ranks, rows, hidden, dtype, generator, padding)
        args = arguments(op, arch, dtype, rows, hidden, generator, **how)
        of_ranks = [[correctness.clone(v) for v in args] for _ in range(ranks)]
        results = []
        for reduce, x, own in zip(group.reduces, inputs, of_ranks):
            with correctness.unwritten_is_nan():
                got = reduce(op, x, *own, with_norm=with_norm) if op else reduce.sum(x)
            results.append(correctness.as_tuple(got))
        calls.append((inputs, args, results, of_ranks))
    group.run()
    for inputs, args, results, of_ranks in calls:
        place = place_of_residual(op)
        residuals = [] if place is None else [own[place] for own in of_ranks]
        inputs, args = as_summed(group.reduces[0], op, inputs, args)
        assert op or len(inputs) > 1 or torch.equal(results[0][0], *inputs)
        if with_norm:
            normed = [(got[-1],) for got in results]
            plain = ops.rms_norm if place is None or args[place] is None else ops.fused_add_rms_norm
            by_name = dict(zip(op.Arguments._fields[1:], args))
            of_plain = [by_name[name] for name in plain.Arguments._fields[1:]]
            if op.name not in ("rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant"):  # these round otherwise
                check_results(plain, inputs, of_plain, normed, [])
            assert all(torch.equal(bits(got[0]), bits(normed[0][0])) for got in normed)
            results = [got[:-1] for got in results]
        check_results(op, inputs, args, results, residuals)


KERNELS = [(None, torch.bfloat16), *itertools.product(launches.NORMS.values(), DTYPES)]


def name_of(value) -> str:
    return "sum" if value is None else getattr(value, "name", str(value).removeprefix("torch."))


@pytest.mark.parametrize("arch_name", CHIPS)
@pytest.mark.parametrize(("op", "dtype"), KERNELS, ids=name_of)
def test_every_kind(arch_name, op, dtype):
    check_call(arch_name, 2, op, dtype, 2, 1024)


@pytest.mark.parametrize("ranks", launches.RANKS)
def test_every_number_of_ranks(ranks):
    check_call(AMD[0], ranks, ops.rms_norm_dynamic_per_token_quant, torch.bfloat16, 1, 1024)


@pytest.mark.parametrize("arch_name", AMD)
@pytest.mark.parametrize(
    ("ranks", "rows", "hidden"),
    [(8, 5, 512), (4, 3, 1536), (2, 1, 16384), (8, 1, 7168), (3, 1, 2880), (2, 1, 8), (5, 2, 136)],
)
def test_rows_of_any_number_and_length_are_reduced(arch_name, ranks, rows, hidden):
    """The sizes include five tokens on 8 ranks, several blocks per row, the largest row, and rows that no wave divides."""
    check_call(arch_name, ranks, ops.fused_add_rms_norm, torch.bfloat16, rows, hidden, epochs=1)


@pytest.mark.parametrize(
    "how",
    [
        {"has_residual": False},
        {"adds_one": True},
        {"adds_one": True, "has_residual": False},
        {"padding": 8},
        {"has_addend": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "op", [ops.rms_norm_dynamic_per_token_quant, ops.rms_norm_mxfp8_quant, ops.rms_norm_per_block_quant], ids=name_of
)
def test_options(op, how):
    check_call(AMD[0], 2, op, torch.bfloat16, 2, 512, epochs=1, **how)


def test_without_a_weight():
    check_call(AMD[0], 2, ops.fused_add_rms_norm, torch.float16, 2, 512, epochs=1, has_weight=False)


@pytest.mark.parametrize(
    "op",
    [op for op in launches.NORMS.values() if "quant" in op.name and op is not launches.NORM_AND_QUANT],
    ids=name_of,
)
def test_with_norm(op):
    check_call(AMD[0], 2, op, torch.bfloat16, 2, 512, epochs=1, with_norm=True)


def test_with_norm_of_an_op_that_returns_it():
    group, x = EmulatedGroup(AMD[0], 2), torch.zeros(1, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="with_norm must be False, as the op returns the norm, got True"):
        group.reduces[0](launches.NORM_AND_QUANT, x, None, EPSILON, torch.float8_e4m3fnuz, with_norm=True)


@pytest.mark.parametrize("arch_name", CHIPS)
@pytest.mark.parametrize("op", [ops.fused_add_rms_norm, launches.NORM_AND_QUANT], ids=name_of)
def test_addends_of_long_rows(arch_name, op):
    """A thread adds two chunks, and a row has several blocks."""
    check_call(arch_name, 2, op, torch.bfloat16, 1, 7168, epochs=1, has_addend=True)


@full
@pytest.mark.parametrize("arch_name", AMD)
@pytest.mark.parametrize("hidden", (1024, 12288))
@pytest.mark.parametrize("ranks", (2, 4, 8))
@pytest.mark.parametrize(("op", "dtype"), [(None, torch.float16), *KERNELS], ids=name_of)
def test_every_kernel(arch_name, op, dtype, ranks, hidden):
    check_call(arch_name, ranks, op, dtype, 1 + (hidden < 2048), hidden)


@pytest.mark.parametrize("op", [ops.rms_norm_per_block_quant, launches.NORM_AND_QUANT], ids=name_of)
@pytest.mark.parametrize("arch_name", CHIPS)
def test_the_bits_of_two_ops(arch_name, op):
    """Bits are equal to an all-reduce followed by the op, which the emulator runs separately, in every configuration."""
    from vllm_rocm_ops.core import launch as core
    from vllm_rocm_ops.emulator import Emulator

    ranks, rows, hidden = 4, 2, 2048
    generator = generator_of("two ops")
    inputs = inputs_of(ranks, rows, hidden, torch.bfloat16, generator)
    args = arguments(op, archs.named(arch_name), torch.bfloat16, rows, hidden, generator)
    configs = launches.configs(
        op.Arguments(inputs[0], *args), archs.named(arch_name), EmulatedGroup(arch_name, 2).reduces[0].group
    )
    assert [config.parts for config in configs][:3] == [1, 2, 4]
    outputs = []
    for config in configs:
        group = EmulatedGroup(arch_name, ranks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launches, "default", lambda *of, config=config: config)
            outputs += [reduce(op, x, *map(correctness.clone, args)) for reduce, x in zip(group.reduces, inputs)]
        group.run()
    with core.executor(Emulator(arch_name)):
        wanted = op(launches.reference(None, inputs), *map(correctness.clone, args))
    for got in outputs:
        assert all(torch.equal(bits(output), bits(other)) for output, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("arch_name", CHIPS)
@pytest.mark.parametrize("op", [ops.rms_norm_dynamic_per_token_quant, ops.rms_norm_mxfp8_quant, None], ids=name_of)
def test_blocks_exchange_sums_and_maxima(monkeypatch, arch_name, op):
    """Rows have the maximum number of blocks."""
    monkeypatch.setattr(launches, "default", lambda *of: launches.configs(*of)[-1])
    check_call(arch_name, 2, op, torch.bfloat16, 2, 2048)


# A rank that never comes


def assert_names(text: str, late: int, ranks: int) -> None:
    """Check that the error names the late rank, and possibly others that are slower than the short limit."""
    match = re.fullmatch(
        rf"all_reduce: ranks? ([0-9, ]+) of {ranks} did not come in epoch 2: rank \d waited for more than 8e-06 s\. .*",
        text,
    )
    assert match and str(late) in match[1].split(", "), text


@pytest.mark.parametrize("arch_name", AMD)
@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (8, 2)])
def test_a_missing_rank_is_reported_with_nan_results(arch_name, ranks, rows):
    """The other ranks end with NaN in all results, and report whom they waited for and when.

    The next calls end at once, and so does the late rank when it comes.
    """
    group = EmulatedGroup(arch_name, ranks, seed=ranks, limit_us=8)
    generator = generator_of("never", ranks)
    late = ranks - 1

    def call(of_ranks) -> list[torch.Tensor]:
        inputs = inputs_of(ranks, rows, 1024, torch.bfloat16, generator)
        args = arguments(ops.fused_add_rms_norm, group.devices.arch, torch.bfloat16, rows, 1024, generator)
        made = {
            rank: ops.fused_add_rms_norm.Arguments(inputs[rank], *map(correctness.clone, args)) for rank in of_ranks
        }
        return [group.reduces[rank](ops.fused_add_rms_norm, *a) for rank, a in made.items()]

    whole = call(range(ranks))
    group.run()
    failed = call(range(late))
    after = call(range(late))
    group.run()
    assert not any(result.isnan().any() for result in whole)
    assert all(result.isnan().any(dim=-1).all() for result in (*failed, *after))
    for rank in range(late):
        with pytest.raises(RankMissing) as caught:
            group.reduces[rank].sum(torch.zeros(1, 512, dtype=torch.bfloat16))
        assert_names(str(caught.value), late, ranks)
    group.reduces[late].check()
    group.inboxes[late][launches.HEADER_BYTES // 8 :] = 0  # words are of one run
    comes = call([late])
    group.run()
    with pytest.raises(RankMissing) as caught:
        group.reduces[late].check()
    assert_names(str(caught.value), late, ranks)
    assert comes[0].shape == (rows, 1024)


@pytest.mark.parametrize(("epoch", "seen"), [(1, 1), (17, 19), (2**20 - 1, 2**20 + 1), (2**32 - 1, 3), (5, 4)])
def test_the_error_word_is_decoded(epoch, seen):
    group = EmulatedGroup(AMD[0], 8).reduces[0].group
    error = 1 << 31 | 0b101000 | 7 << 8 | (epoch & 0xFFFFF) << 11
    text = all_reduce.missing_rank_message(seen << 32 | error, group)
    assert text.startswith(
        f"all_reduce: ranks 3, 5 of 8 did not come in epoch {epoch}: rank 7 waited for more than 1 s."
    )


@pytest.mark.parametrize(("seconds", "advises"), [(None, True), (2.0, False)])
def test_an_error_advises_a_variable_only_where_it_sets_the_limit(seconds, advises):
    reduce = EmulatedGroup(AMD[0], 2).reduces[0]
    reduce.limit(seconds)
    assert (
        "VLLM_ROCM_OPS_ALL_REDUCE_LIMIT" in all_reduce.missing_rank_message(1 << 31 | 0b10, reduce.group)
    ) == advises


# Unsupported calls


def test_unsupported_calls_are_refused():
    group = EmulatedGroup(AMD[0], 2)
    reduce, op = group.reduces[0], ops.rms_norm
    weight = torch.ones(512, dtype=torch.bfloat16)
    few = torch.zeros(2, 512, dtype=torch.bfloat16)
    assert reduce.unsupported(op, few, weight, EPSILON) == "" == reduce.unsupported(None, few)
    many = torch.zeros(513, 512, dtype=torch.bfloat16)
    assert "input has at most 262144 values (512 KiB, twice that between ranks)" in reduce.unsupported(None, many)
    assert "rows have at most 64 blocks, so that all are resident" in reduce.unsupported(None, many)
    wide = torch.zeros(1, 16392, dtype=torch.bfloat16)
    assert reduce.unsupported(None, wide) == "the kernels require that hidden is at most 16384"
    assert "multiple of 8" in reduce.unsupported(None, torch.zeros(2, 12, dtype=torch.bfloat16))
    assert "bfloat16 or float16" in reduce.unsupported(None, few.float())
    assert "layer_norm is one of rms_norm" in reduce.unsupported(ops.layer_norm, few, weight, None, EPSILON)
    with pytest.raises(ValueError, match="rms_norm: weight must be bfloat16"):
        reduce(op, few, weight[:8], EPSILON)
    with pytest.raises(ValueError, match="all_reduce: the kernels require that .*`all_reduce` must be given, got None"):
        reduce.sum(wide)
    with pytest.raises(ValueError, match="fused_add_rms_norm: residual must have memory of its own"):
        reduce(ops.fused_add_rms_norm, few, few, weight, EPSILON)


def test_the_given_all_reduce_serves_unsupported_calls():
    group = EmulatedGroup(AMD[0], 2)
    reduce = all_reduce.AllReduce(
        group.reduces[0].group, group.devices.arch, group.reports[0], all_reduce=lambda x: 2 * x
    )
    x = torch.randn(2, 12, generator=generator_of("elsewhere")).bfloat16()
    weight = torch.ones(12, dtype=torch.bfloat16)
    assert torch.equal(reduce.sum(x), 2 * x)
    assert torch.equal(reduce(ops.rms_norm, x, weight, EPSILON), ops.rms_norm(2 * x, weight, EPSILON))
    scale = torch.tensor([0.1])
    fp8, residual, wanted = torch.float8_e4m3fn, x.flip(0), x.flip(0)
    got, normed = reduce(ops.rms_norm_static_fp8_quant, x, weight, scale, EPSILON, fp8, with_norm=True)
    assert torch.equal(normed, ops.rms_norm(2 * x, weight, EPSILON)) and got.dtype == fp8
    op, arguments = ops.fused_add_rms_norm_static_fp8_quant, (weight, scale, EPSILON, fp8)
    _, normed = reduce(op, x, residual, *arguments, with_norm=True)
    assert torch.equal(normed, ops.fused_add_rms_norm(2 * x, wanted, weight, EPSILON)) and torch.equal(residual, wanted)
    empty = x.new_empty(0, 12)
    assert reduce.sum(empty).shape == (0, 12)


def test_blocks_of_a_row():
    """A norm's row has more blocks if reading it takes longer than an exchange; sums have all that are resident."""

    def parts(ranks: int, rows: int, hidden: int, blocks: int = 304, is_norm: bool = True) -> int:
        group = launches.Group(0, (0,) * ranks, 0, 0, blocks, 1)
        x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta")
        a = ops.rms_norm.Arguments(x, None, EPSILON, False) if is_norm else launches.Sum(x)
        return launches.default(a, archs.named(AMD[0]), group).parts

    assert (parts(8, 1, 7168), parts(8, 4, 16384), parts(8, 5, 7168)) == (8, 8, 8)
    assert (parts(2, 1, 7168), parts(8, 1, 1024), parts(8, 40, 7168)) == (1, 1, 4)
    assert (parts(2, 1, 7168, is_norm=False), parts(8, 1, 1024, is_norm=False)) == (8, 2)
    assert (parts(8, 5, 7168, blocks=23), parts(8, 5, 7168, blocks=16)) == (4, 2)
    assert (
        launches.configs(
            launches.Sum(torch.empty(300, 7168)), archs.named(AMD[0]), launches.Group(0, (0,) * 8, 0, 0, 304, 1)
        )
        == []
    )


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1e9", "nan"])
def test_limit(monkeypatch, value):
    assert all_reduce.limit_us(None) == 60_000_000
    monkeypatch.setenv("VLLM_ROCM_OPS_ALL_REDUCE_LIMIT", value)
    with pytest.raises(ValueError, match=f"must be above 0 and at most 4294 seconds, got {value}"):
        all_reduce.limit_us(None)


def test_kernels_are_those_of_plans():
    assert sum(map(len, launches.symbols().values())) == 84
