"""Test the all-reduce with payload and flag apart, on emulated devices: right, bit-equal on all ranks, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from assembly import build_module
from emulated_group import EmulatedGroup
from marks import AMD, CHIPS, FULL, full
from test_all_reduce import check_call, name_of

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import RankMissing, all_reduce, flagged, launches, wire
from vllm_rocm_ops.collectives.wire import BF16, FP8, GROUP_VALUES
from vllm_rocm_ops.core import archs, kernel_arguments
from vllm_rocm_ops.core.launch import I64, Launch, code_object
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.emulator import errors

PAYLOAD = 1 << 20
KINDS = (None, *launches.NORMS.values())


@pytest.fixture
def check(monkeypatch):
    """Return a function that checks a call with a configuration of these stages and blocks per row."""

    def check(arch_name, ranks, op, dtype, rows, hidden, stages=1, parts=1, blocks=64, wire=BF16, **how):
        def default(*of):
            return next(each for each in flagged.configs(*of) if (each.stages, each.parts) == (stages, parts))

        monkeypatch.setattr(flagged, "default", default)
        sizes = {"capacity": 0, "payload": PAYLOAD, "blocks": blocks}
        group = EmulatedGroup(arch_name, ranks, rows + hidden, **sizes, wires=(wire,))
        check_call(arch_name, ranks, op, dtype, rows, hidden, group=group, **how)
        symbols = {launch.symbol for queue in group.queues for _, launch, _ in queue.launches}
        assert all("_flagged_fp8_" in symbol if wire == FP8 else "_flagged_" in symbol for symbol in symbols)

    return check


@pytest.mark.parametrize("op", KINDS, ids=name_of)
def test_every_kind(check, op):
    check(CHIPS[0], 2, op, flagged.DTYPE, 2, 1024, epochs=1)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        (ranks, stages)
        for ranks in launches.RANKS
        for stages in flagged.supported_stages(ranks)
        if (ranks, stages) != (4, 1)
    ],
)
def test_every_number_of_ranks(check, ranks, stages):
    """Rows are fewer and more than ranks, blocks fewer than rows, and slices no multiple of a wave."""
    check(AMD[0], ranks, ops.rms_norm_dynamic_per_token_quant, torch.bfloat16, 3, 552, stages, blocks=2)


@pytest.mark.parametrize(
    ("ranks", "rows", "hidden", "stages", "parts"),
    [
        (2, 3, 16384, 1, 1),
        (3, 1, 16384, 2, 8),
        (4, 2, 7168, 2, 2),
        (8, 1, 2880, 2, 1),
        (3, 1, 8, 2, 1),
    ],
)
def test_rows_of_any_number_and_length_are_reduced(check, ranks, rows, hidden, stages, parts):
    """The sizes include the largest row, several blocks per row, fewer rows than ranks, and one vector."""
    check(AMD[0], ranks, ops.fused_add_rms_norm, torch.bfloat16, rows, hidden, stages, parts, epochs=1)


@pytest.mark.parametrize(
    "how", [{"has_residual": False}, {"adds_one": True}, {"padding": 8}, {"has_addend": True}], ids=str
)
def test_options(check, how):
    check(CHIPS[-1], 2, ops.rms_norm_per_block_quant, torch.bfloat16, 3, 1024, blocks=2, epochs=1, **how)


@pytest.mark.parametrize("op", [ops.rms_norm_dynamic_per_token_quant, ops.rms_norm_mxfp8_quant, None], ids=name_of)
def test_blocks_exchange_sums_and_maxima(check, op):
    """Four blocks share each of three rows."""
    check(AMD[0], 2, op, torch.bfloat16, 3, 2048, parts=4, blocks=4)


def test_the_norm_beside_its_quantization(check):
    check(AMD[0], 2, ops.rms_norm_static_fp8_quant, torch.bfloat16, 5, 512, blocks=2, epochs=1, with_norm=True)


@full
@pytest.mark.parametrize("wire", (BF16, FP8))
@pytest.mark.parametrize("arch_name", AMD)
@pytest.mark.parametrize("hidden", (2048, 6144, 12288))
@pytest.mark.parametrize("ranks", (2, 4, 8))
@pytest.mark.parametrize("op", KINDS, ids=name_of)
def test_every_kernel(check, arch_name, op, ranks, hidden, wire):
    for stages in flagged.supported_stages(ranks, wire):
        check(
            arch_name,
            ranks,
            op,
            flagged.DTYPE,
            3 if hidden == 2048 else 1,
            hidden,
            stages,
            blocks=2,
            epochs=1,
            wire=wire,
        )


# FP8 on the wire


@pytest.mark.parametrize(
    ("arch_name", "ranks", "op", "rows", "hidden", "stages", "parts", "how"),
    [
        (AMD[0], 2, ops.rms_norm_dynamic_per_token_quant, 3, 552, 1, 1, {}),
        (AMD[1], 2, ops.rms_norm_and_per_block_quant, 1, 2048, 1, 1, {"has_addend": True}),
        (AMD[0], 4, ops.fused_add_rms_norm_static_fp8_quant, 3, 1032, 2, 1, {}),
        (AMD[0], 8, ops.rms_norm_per_block_quant, 1, 7168, 2, 1, {}),
        (AMD[1], 3, ops.fused_add_rms_norm, 2, 2880, 2, 2, {}),
        (AMD[0], 5, None, 2, 4104, 2, 2, {"padding": 8}),
    ],
    ids=name_of,
)
def test_fp8_on_the_wire(check, arch_name, ranks, op, rows, hidden, stages, parts, how):
    """Groups of 128 values are complete and not, slices are of whole groups, and fewer blocks than rows."""
    check(arch_name, ranks, op, flagged.DTYPE, rows, hidden, stages, parts, blocks=2 * parts, wire=FP8, epochs=1, **how)


@pytest.mark.parametrize(("arch_name", "ranks"), [(AMD[0], 2), (AMD[1], 2), (AMD[0], 3)])
def test_groups_that_are_hard_to_scale(arch_name, ranks):
    """Bits are the reference's: of zeros, subnormal and largest numbers, borders of powers of two, infinity and NaN."""
    group = EmulatedGroup(arch_name, ranks, capacity=0, payload=PAYLOAD, wires=(FP8,))
    fp8, largest = group.devices.arch.fp8_dtype, torch.finfo(flagged.DTYPE).max
    inputs = [
        torch.randn(1, 12 * GROUP_VALUES + 16, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)
    ]
    x = inputs[0]
    x[0, 0] = 1e6  # a lane behind the last group's end holds it, too
    hard = [0.0, -0.0, 1e-40, 2.0**-126, largest / 4, 1.75, 1.7578125, 448.0, 450.0, torch.inf, -torch.inf, torch.nan]
    for number, value in enumerate(hard[1:], 1):
        for each in inputs:
            each[0, number * GROUP_VALUES : (number + 1) * GROUP_VALUES] *= 1e-3 if abs(value) > 1e-30 else 0
        x[0, number * GROUP_VALUES + number] = value
    inputs = [each.to(flagged.DTYPE) for each in inputs]
    results = [reduce.sum(each) for reduce, each in zip(group.reduces, inputs)]
    group.run()
    wanted = wire.fp8_sum(inputs, fp8)
    assert wanted.isnan().sum() == 3 * GROUP_VALUES and wanted[:, -16:].abs().max() > 0
    for result in results:
        assert torch.equal(result.nan_to_num(7.0, 8.0), wanted.nan_to_num(7.0, 8.0))


@pytest.mark.parametrize(("ranks", "error"), [(2, 0.027), (3, 0.038), (8, 0.038)])
@pytest.mark.parametrize("fp8", LIMIT)
def test_the_error_of_fp8_on_the_wire(ranks, error, fp8):
    """Beside the float64 sum of normal values: one rounding to 4 bits with two ranks, two roundings with more."""
    inputs = [torch.randn(8, 8192, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(ranks)]
    exact = sum(x.double() for x in inputs)
    assert abs((wire.fp8_sum(inputs, fp8) - exact).norm() / exact.norm() - error) < 1e-3


def test_fp8_serves_only_calls_above_one_shot():
    """And of those, where its conversions are predicted to take less time than the bytes."""
    group = EmulatedGroup(AMD[0], 8, payload=flagged.PAYLOAD, wires=(FP8, BF16))
    reduce, most = group.reduces[0], launches.CAPACITY * launches.VALUES_IN_WORD // 16384

    def formats(x, rows):
        return {each.wire for each in flagged.configs(launches.Sum(x[:rows]), reduce.arch, reduce.group)}

    x = torch.empty(64, 16384, dtype=flagged.DTYPE)
    assert [formats(x, rows) for rows in (most, most + 1)] == [{BF16}, {FP8, BF16}]
    assert [reduce.wire(None, x[:rows]) for rows in (most, most + 1, 64)] == [BF16, BF16, FP8]
    reduce.sum(x)
    assert group.queues[0].launches[-1][1].symbol == "all_reduce_flagged_fp8_bf16_8_x4"
    padded = torch.empty(2048, 512, dtype=flagged.DTYPE)  # to 2048 columns
    assert [formats(padded, rows) for rows in (1024, 2048)] == [{FP8, BF16}, {BF16}]
    assert reduce.wire(None, torch.empty(4097, 512, dtype=flagged.DTYPE)) == BF16, "no kernel"


def test_a_wire_that_there_is_not(monkeypatch):
    monkeypatch.setenv(wire.VARIABLE, "int4")
    with pytest.raises(ValueError, match="VLLM_ROCM_OPS_ALL_REDUCE_WIRE must be bf16 or fp8, got 'int4'"):
        wire.allowed()


# Schedules, and planted faults


@pytest.fixture(scope="module", params=[AMD[0], pytest.param(AMD[1], marks=full)])
def built(request, tmp_path_factory):
    """Return the architecture, and the code object of flagged.hip."""
    path = tmp_path_factory.mktemp("flagged") / f"{request.param}.co"
    build_module().compile_source(Path(__file__).with_name("flagged.hip"), request.param, path, (), debug=True)
    return request.param, path


class WrongSum(AssertionError):
    """A result that differs from the sum of the ranks' inputs, though each access was allowed."""


ONE, MANY = (1, 1024), (3, 1032)  # the last: slices of no whole wave, and fewer blocks than rows
OF_FP8 = {size: (size[0], 2056 if FULL else 1160) for size in (ONE, MANY)}  # groups and slices are complete and not


def run_sums(built, ranks: int, seed: int, sizes, kernel="right", stages=2, **options) -> None:
    """Run an all-reduce of each size, and compare all sums."""
    arch_name, path = built
    if kernel.startswith("fp8"):
        options, sizes = options | {"wires": (FP8,)}, [OF_FP8[size] for size in sizes]

    def adapt(launch: Launch) -> Launch:
        takes = kernel_arguments.parameters(code_object(launch.module, arch_name), launch.symbol)

        def given(name: str, type: str):
            value = launch.args[name]
            if type == "i64":
                return I64(value)
            return value - (1 << 32) if type == "u32" and value >= 1 << 31 else value

        values = (given(name, type) for name, (_, type) in takes.arguments.items())
        of_ranks = 8 if ranks > 2 and kernel.startswith("fp8") else ranks
        return Launch("", f"{kernel}_{of_ranks}", launch.grid, launch.block, tuple(values))

    group = EmulatedGroup(
        arch_name, ranks, seed, capacity=0, payload=PAYLOAD, blocks=2, code=path, adapt=adapt, **options
    )
    generator, calls = torch.Generator().manual_seed(seed), []
    with pytest.MonkeyPatch.context() as patch:
        usual = flagged.configs
        patch.setattr(flagged, "configs", lambda *of: [each for each in usual(*of) if each.stages == stages])
        for size in sizes:
            inputs = [torch.randint(-15, 16, size, generator=generator).bfloat16() for _ in range(ranks)]
            wanted = wire.fp8_sum(inputs, group.devices.arch.fp8_dtype) if "wires" in options else sum(inputs)
            calls.append((wanted, [reduce.sum(x) for reduce, x in zip(group.reduces, inputs)]))
    group.run()
    for number, (wanted, results) in enumerate(calls):
        for rank, result in enumerate(results):
            if not torch.equal(result, wanted):
                raise WrongSum(f"rank {rank}, launch {number}")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("ranks", "stages"), [(ranks, stages) for ranks in (2, 4, 8) for stages in flagged.supported_stages(ranks)]
)
def test_schedules(built, ranks, stages):
    """Four launches, so that each buffer is used again, with grids of other sizes between."""
    for seed in range(max(1, (100 if FULL else 4) // ranks)):
        run_sums(built, ranks, seed, (ONE, MANY, ONE, MANY), stages=stages)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 2), pytest.param(8, 2, marks=full)])
def test_schedules_with_fp8(built, ranks, stages):
    for seed in range(max(1, (50 if FULL else 2) // ranks)):
        run_sums(built, ranks, seed, (ONE, MANY, ONE, MANY), "fp8", stages)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 2)])
def test_epochs_come_round(built, ranks, stages):
    for seed in range(2):
        run_sums(built, ranks, seed, (ONE, ONE, MANY, ONE), stages=stages, epoch=2**32 - 3)


BUGS = {
    "flag_first": (errors.StaleRead, {}),
    "store_scope": (errors.StaleRead, {}),
    "load_scope": (errors.StaleRead, {}),
    "no_release": (errors.StaleRead, {}),
    "no_acquire": (errors.StaleRead, {}),
    "no_wait": (errors.GlobalRace, {}),
    "any_epoch": (errors.GlobalRace, {}),
    "swap": ((errors.GlobalRace, errors.Deadlock), {"stages": 1}),  # two stages would do with one buffer
    "skip_peer": ((errors.GlobalRace, WrongSum), {}),
    "narrow_epoch": (errors.GlobalRace, {}),
    "fresh_memory": (errors.GlobalRace, {"epoch": 2**32 - 2}),
    "dropped": (WrongSum, {}),
    "boundary": ((errors.GlobalRace, WrongSum), {}),
    "fp8_flag_first": (errors.StaleRead, {}),
    "fp8_scale_scope": (errors.StaleRead, {}),
    "fp8_half_groups": (WrongSum, {}),
    "two_streams": ((errors.GlobalRace, errors.Deadlock, WrongSum), {"kernel": "right", "streams": 2}),
}
"""The error that finds each planted fault, and the arguments of its launches."""


@pytest.mark.parametrize("bug", BUGS)
def test_protocol_faults_are_found_within_a_few_schedules(built, bug):
    kinds, options = BUGS[bug]

    def finds(seed: int) -> bool:
        try:
            run_sums(built, 4, seed, (ONE,) * 4, **({"kernel": bug} | options))
        except kinds:
            return True
        return False

    assert any(finds(seed) for seed in range(32))


# A rank that never comes


@pytest.mark.parametrize(("ranks", "stages", "wire"), [(2, 1, BF16), (8, 2, BF16), (2, 1, FP8), (3, 2, FP8)])
def test_a_missing_rank_is_reported_with_nan_results(monkeypatch, ranks, stages, wire):
    """The other ranks end with NaN in every row, the next calls in one shot too, and so does the late rank."""
    usual = flagged.configs
    monkeypatch.setattr(flagged, "configs", lambda *of: [each for each in usual(*of) if each.stages == stages])
    group = EmulatedGroup(AMD[0], ranks, seed=ranks, capacity=1024, payload=PAYLOAD, limit_us=16, wires=(wire,))
    late, many, few = ranks - 1, torch.ones(3, 1024).bfloat16(), torch.ones(1, 1024).bfloat16()
    whole = [reduce.sum(many) for reduce in group.reduces]
    group.run()
    assert all((result == ranks).all() for result in whole)
    failed = [reduce.sum(many) for reduce in group.reduces[:late]]
    group.run()
    after = [reduce._decide(None, False, (few,))((few,)) for reduce in group.reduces[:late]]
    group.run()
    assert all(result.isnan().any(dim=-1).all() for result in (*failed, *after))
    for reduce in group.reduces[:late]:
        with pytest.raises(RankMissing, match=f"rank.* {late}.* of {ranks} did not come in epoch 2"):
            reduce.check()
    group.reduces[late].sum(many)
    group.run()
    with pytest.raises(RankMissing):
        group.reduces[late].check()


# Configurations, and unsupported calls


def config_of(arch_name: str, ranks: int, rows: int, hidden: int, blocks: int = 304) -> tuple[int, int, int]:
    """Return stages, blocks per row and rows of blocks."""
    group = launches.Group(0, (0,) * ranks, 0, 0, blocks, 1, payload=flagged.PAYLOAD)
    a = ops.rms_norm.Arguments(torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta"), None, 1e-6, False)
    config = flagged.default(a, archs.named(arch_name), group)
    assert config.row_blocks * config.parts <= blocks
    return config.stages, config.parts, config.row_blocks


def test_stages_and_blocks():
    """Two ranks send all in one trip. More blocks share a row where there are few rows, if all are resident."""
    assert config_of(AMD[0], 2, 64, 16384) == (1, 4, 64)
    assert config_of(AMD[0], 8, 64, 16384) == (2, 4, 64)
    assert config_of(AMD[0], 8, 128, 16384) == (2, 1, 128)
    assert config_of(AMD[0], 8, 292, 7168) == (2, 1, 292)
    assert config_of(AMD[0], 8, 292, 7168, blocks=132) == (2, 1, 132)
    assert config_of("sm_90", 4, 8, 16384) == (1, 8, 8)


@pytest.mark.parametrize(
    ("arch_name", "ranks", "most"), [(AMD[0], 2, 3), (AMD[0], 8, 3), ("sm_90", 2, 16), ("sm_90", 8, 3)]
)
def test_words_are_sent_while_a_flag_takes_longer(arch_name, ranks, most):
    """A word has twice the bytes of its values, a flag is a trip more."""
    arch = archs.named(arch_name)
    group = launches.Group(0, (0,) * ranks, 0, 0, arch.compute_units, 1, payload=flagged.PAYLOAD)
    sums = [launches.Sum(torch.empty(rows, 16384, dtype=torch.bfloat16, device="meta")) for rows in range(1, 33)]
    chosen = [all_reduce.choose_protocol(None, a, arch, group) for a in sums]
    assert chosen == [(launches, "")] * most + [(flagged, "")] * (32 - most)


def test_calls_go_to_the_protocol_of_their_size():
    group = EmulatedGroup(AMD[0], 2, payload=flagged.PAYLOAD)
    reduce = group.reduces[0]

    def symbol(rows: int, hidden: int = 16384) -> str:
        reduce.sum(torch.empty(rows, hidden, dtype=torch.bfloat16))
        return group.queues[0].launches[-1][1].symbol

    assert symbol(3) == "all_reduce_bf16_2_x2" and symbol(5) == "all_reduce_flagged_bf16_2_x4" == symbol(128)
    assert symbol(128, 512) == "all_reduce_flagged_bf16_2_x1", "more rows than resident blocks"
    many = torch.empty(129, 16384, dtype=torch.bfloat16)
    assert reduce.unsupported(None, many) == "the kernels require that input has at most 2097152 values (4 MiB)"
    wide = torch.empty(9, 16392, dtype=torch.bfloat16)
    assert "hidden is at most 16384" in reduce.unsupported(None, wide)
    half = torch.empty(17, 16384, dtype=torch.float16)
    assert reduce.unsupported(None, half) == "the kernels require that more than 262144 values are bfloat16"
    padded = torch.empty(4000, 520, dtype=torch.bfloat16)
    assert "its rows fit in 10485760 bytes of an inbox" in reduce.unsupported(None, padded)
