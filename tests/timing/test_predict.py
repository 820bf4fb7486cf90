"""Test predicted times of launches, calls and lists: their dependencies and labels."""

from __future__ import annotations

import pytest
import torch
from marks import full

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.archs import ARCHS
from vllm_rocm_ops.core.quantization import BLOCKS
from vllm_rocm_ops.emulator import cases as emulated
from vllm_rocm_ops.models import arguments as model_arguments
from vllm_rocm_ops.ops.shared import experts_tiled
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.ops.shared.tiled_gemm import TiledConfig
from vllm_rocm_ops.timing import launch_time, machines, predict
from vllm_rocm_ops.timing.trace import LINE, Access, Block, Instr, Recording
from vllm_rocm_ops.tools import cli, explain
from vllm_rocm_ops.tools.bench import lists, shapes

MACHINE = machines.MI300X
WEIGHTS = 7 << 29  # the first line of region 7


def loading(number: int, first: int, count: int, waves: int = 4) -> Block:
    """Return a block whose waves load `count` KiB each, eight at a time."""

    def wave(at: int):
        steps = []
        for n in range(count):
            start = first + 8 * (at * count + n)
            steps.append((Instr("vmem", 8 * n, 8), Access(tuple(range(start, start + 8)), 8 * LINE)))
            if n % 8 == 7:
                steps.append((Instr("wait", 8 * n, 4, vm=0), None))
        return [*steps, (Instr("wait", 8 * count, 4, vm=0), None), (Instr("end", 8 * count + 4, 4), None)]

    return Block(number, [wave(at) for at in range(waves)])


def streaming(grid: int, count: int = 64, held: int = 8, cold=frozenset({7})) -> Recording:
    """Return a launch whose blocks load disjoint memory."""
    blocks = [loading(n, WEIGHTS + n * 32 * count, count) for n in range(16)]
    return Recording("streaming", grid, held, blocks, cold)


def test_a_stream_takes_as_long_as_its_bytes():
    found = launch_time.predict(MACHINE, streaming(8 * 304))
    assert found.megabytes == pytest.approx(8 * 304 * 4 * 64 * 1024 / 1e6)
    assert found.bandwidth_us == pytest.approx(found.megabytes * 1e3 / MACHINE["hbm_bandwidth"])
    assert found.bandwidth_us < found.us < 1.15 * found.bandwidth_us


def test_blocks_that_stand_for_others_load_memory_of_their_own():
    found = launch_time.predict(MACHINE, streaming(24 * 304, 8))
    assert found.blocks == 24 and found.bandwidth_us < found.us


def test_infinity_cache_is_faster_than_hbm_while_it_lasts():
    cold, hot = (launch_time.predict(MACHINE, streaming(304, cold=regions)) for regions in ({7}, frozenset()))
    assert hot.us < cold.us
    too_much = launch_time.predict(MACHINE, streaming(8 * 304, cold=frozenset()))
    assert (
        too_much.megabytes > MACHINE["mall_bytes"] / 1e6
        and too_much.us > too_much.megabytes * 1e3 / MACHINE["hbm_bandwidth"]
    )


def test_blocks_beyond_the_compute_units_take_a_second_round():
    one, two = (launch_time.predict(MACHINE, streaming(grid, 8, held=1)) for grid in (304, 305))
    assert (one.blocks, two.blocks) == (1, 2) and two.us > 1.2 * one.us


def test_what_blocks_share_is_loaded_once():
    blocks = [loading(n, WEIGHTS, 64) for n in range(16)]
    shared = launch_time.predict(MACHINE, Recording("shared", 304, 1, blocks, frozenset({7})))
    assert shared.megabytes == pytest.approx(4 * 64 * 1024 / 1e6)
    assert shared.us < launch_time.predict(MACHINE, streaming(304, held=1)).us
    of = launch_time.sharing(MACHINE, Recording("shared", 304, 1, blocks, frozenset({7})))
    assert of.chip[WEIGHTS] == 304 and of.die[WEIGHTS] == 38


def test_idle_blocks_leave_their_bandwidth_to_others():
    busy = streaming(304, held=1)
    half = busy.blocks[:8] + [Block(8 + n, [[(Instr("end", 0, 4), None)]] * 4) for n in range(8)]
    found = launch_time.predict(MACHINE, Recording("half", 304, 1, half, busy.cold))
    assert found.us < 0.7 * launch_time.predict(MACHINE, busy).us


@pytest.mark.parametrize(
    ("op", "shape", "least", "most"), [(ops.rms_norm, (8, 16384), 1, 8), (ops.scaled_mm, (1, 4096), 1, 20)]
)
def test_a_call_is_predicted(capsys, op, shape, least, most):
    assert cli.main(["predict", op.name, "--shape", "x".join(map(str, shape))]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{op.name} on MI300X: predicted ") and " us, not measured; +-" in first
    assert least < float(first.partition("predicted ")[2].split()[0]) < most
    assert others and all(": predicted " in line for line in others)


@pytest.fixture
def few_blocks(monkeypatch):
    monkeypatch.setattr(predict, "BLOCKS", 16)


@pytest.mark.usefixtures("few_blocks")
def test_more_memory_takes_longer():
    def us(n: int) -> float:
        a, b = (torch.empty(1, 2048, device="meta"), torch.empty(n, 2048, device="meta").t())
        given = {"a": a.to(MACHINE.arch.fp8_dtype), "b": b.to(MACHINE.arch.fp8_dtype), "bias": None}
        given |= {"scale_a": torch.empty(1, device="meta"), "scale_b": torch.empty(1, device="meta")}
        return sum(
            kernel.prediction.us
            for kernel in predict.predict_call(ops.scaled_mm, given | {"out_dtype": torch.bfloat16}, MACHINE)
        )

    assert us(65536) > 2 * us(16384) > 10


@pytest.mark.usefixtures("few_blocks")
def test_launches_find_what_the_ones_before_left_them(monkeypatch):
    """Blocks of the second GEMM read which experts were hit; without that they load nothing."""
    monkeypatch.setattr(predict, "MAX_WAVES", 0)
    assert weights_read(experts_of(4, 16)) > 0.8 * 16


@pytest.mark.usefixtures("few_blocks")
def test_tiled_experts_find_all_tiles_however_many_waves_sort_tokens(monkeypatch):
    """A block of the sort writes the tiles of one expert."""
    monkeypatch.setattr(predict, "MAX_WAVES", 0)
    assert weights_read(experts_of(8, 200), experts_tiled.TiledConfig(64)) > 0.8 * 64


@pytest.mark.usefixtures("few_blocks")
def test_tokens_go_to_the_experts_that_ids_name():
    given = experts_of(4, 16)
    ids = torch.arange(given["topk_ids"].numel(), dtype=torch.int32).reshape(given["topk_ids"].shape) % 2
    assert 0.5 < weights_read(given | {"topk_ids": ids}) < 2.4


def experts_of(tokens: int, experts: int) -> dict:
    """Return arguments of a call of experts."""
    inputs = Inputs("meta", torch.Generator(), MACHINE.arch.fp8_dtype, torch.bfloat16)
    sizes = experts, experts, 8, 256, 128
    return ops.fused_experts.Arguments(*model_arguments.experts(tokens, inputs, *sizes, BLOCKS))._asdict()


def weights_read(given: dict, config=None) -> float:
    """Return the number of experts whose weight bytes a call moves, the smaller of its two GEMMs."""
    kernels, found = predict.predict_call(ops.fused_experts, given, MACHINE, config=config), []
    for name, weight in (("gate_up", given["w1"]), ("down", given["w2"])):
        (kernel,) = [kernel for kernel in kernels if name in kernel.symbol]
        found.append(kernel.prediction.megabytes * 1e6 / (weight[0].numel() * weight.element_size()))
    return min(found)


def test_no_launch_is_faster_than_its_bytes():
    for grid in (8 * 304 - 1, 8 * 304 + 1, 9 * 304):
        found = launch_time.predict(MACHINE, streaming(grid, 16))
        assert found.us >= found.bandwidth_us


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize(
    ("op", "contexts"),
    [pytest.param(ops.mla_decode, (512, 2048), marks=full), (ops.paged_attention_decode, (128, 512))],
)
def test_attention_reads_as_many_keys_as_are_said(op, contexts):
    """The last block of mla_decode combines the results of fewer keys in the same launch."""
    given = explain.example(op, ARCHS["gfx942"])
    cache = given["kv_cache" if op is ops.mla_decode else "key_cache"]
    bytes_of_key = cache[0, 0].numel() * cache.element_size() * (1 if op is ops.mla_decode else 2)
    keys = (contexts[1] - contexts[0]) * len(given["seq_lens"])
    short, long = (predict.predict_call(op, given, MACHINE, context)[0].prediction for context in contexts)
    assert long.us > short.us
    assert 0.9 < (long.megabytes - short.megabytes) * 1e6 / (keys * bytes_of_key) < 1.6


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("rows", [1, 2])
def test_requests_without_values_are_no_padding(rows):
    """All states of a decode step of Gated DeltaNet are loaded."""
    op = ops.gated_delta_net_decode
    name = "drafts" if rows == 2 else "qwen3.5"
    case = next(case for case in op.cases() if case.name == name)
    given = op.Arguments(*case.make("meta", torch.Generator(), MACHINE.arch.fp8_dtype))._asdict()
    requests, heads = len(given["indices"]), given["state"].shape[1]
    (kernel,) = predict.predict_call(op, given, MACHINE)
    states = requests * heads * 128 * 128 * given["state"].element_size() / 1e6
    assert kernel.prediction.megabytes > states


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["rms_norm", "--arch", "H200"],
            "arch must be a product with a timing model (MI300X, MI308X, MI325X, MI350X, MI355X), got H200",
        ),
        (["rms_norm", "--shape", "0x4096"], "no kernel serves this call"),
        (["rows", "--arch", "H200"], "arch must be a product with a timing model (MI300X"),
        (["rows", "--tp", "2"], "the list rows does not support --tp"),
        ([], "the following arguments are required: op"),
        (["rms_norm", "--model", "tiny-llama"], "unrecognized arguments: --model"),
        (["mla_decode", "--context", "0"], "--context: must be 1 to 1048576 keys, got 0"),
    ],
)
def test_what_cannot_be_predicted_says_why(capsys, arguments, message):
    try:
        assert cli.main(["predict", *arguments]) == 2
    except SystemExit as error:
        assert error.code == 2
    assert message in capsys.readouterr().err


def printed(capsys, *arguments: str) -> str:
    """Return the output of a command that succeeds."""
    assert cli.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("few_blocks")
def test_a_call_is_predicted_with_its_arguments_on_a_product(capsys):
    call = "rms_norm", "--with", "weight=none", "--arch", "MI308X", "--shape"
    predicted = printed(capsys, "predict", *call, "fp16[3x512]")
    assert "rms_norm on MI308X: predicted " in predicted and "not measured; " in predicted
    assert "rms_norm_fp16_" in predicted and "rms_norm_bf16_" in printed(capsys, "predict", *call, "3x512")


@pytest.mark.usefixtures("few_blocks")
def test_lists_are_predicted(capsys, monkeypatch):
    monkeypatch.setattr(shapes, "HIDDEN", (512,))
    assert cli.main(["predict", "rows", "--batch", "4"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "MI300X: predicted times in us, not measured" and len(lines) > 4
    assert all(": predicted " in line and line.endswith(" us, band +-13%") for line in lines), lines
    case = next(case for case in ops.rms_norm.cases() if case.name.startswith("bf16"))
    attention = next(iter(ops.paged_attention_decode.cases()))
    some = [shapes.Shape(ops.rms_norm, case), shapes.Shape(ops.paged_attention_decode, attention)]
    monkeypatch.setitem(lists.LISTS, "rows", lambda: some)
    assert cli.main(["predict", "rows", "--arch", "MI355X"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    mi355x = machines.MI355X
    given = ops.rms_norm.Arguments(*case.make("meta", torch.Generator(), mi355x.arch.fp8_dtype))._asdict()
    us = sum(kernel.prediction.us for kernel in predict.predict_call(ops.rms_norm, given, mi355x))
    assert first.startswith("MI355X") and f"  rms_norm {case.name}: predicted {us:.1f} us, band unknown" in lines
    assert any(line.endswith("see vllm-rocm-ops predict paged_attention_decode --context") for line in lines)


def test_kinds_of_kernels_that_were_never_compared_have_no_band():
    assert predict.band(ops.topk_softmax).ratio is None and "unknown" in predict.band(ops.fused_experts).text
    of = machines.CALIBRATION["classes"]["skinny GEMM"]
    assert predict.band(ops.scaled_mm).ratio == max(half["largest"] for half in of.values())


@pytest.mark.parametrize(
    ("grid", "tiles"), [(96, 24), (144, 24), (864, 144), (132, 4), (1008, 36), (528, 33), (147, 21)]
)
def test_of_blocks_that_share_tiles_whole_tiles_are_recorded(grid, tiles):
    found, sharing = predict.sampled(grid, 64, tiles), -(-grid // tiles)
    assert found == sorted(set(found)) and 0 <= found[0] and found[-1] < grid
    assert len(found) <= 64 + 2 * sharing

    def remapped(block: int) -> int:  # remap_to_xcd
        die, each, more = block % 8, grid // 8, grid % 8
        return die * each + min(die, more) + block // 8

    assert sorted(remapped(block) for block in range(grid)) == list(range(grid))
    orders = {
        "neighbors": [block * tiles // grid for block in range(grid)],
        "apart": [remapped(block) % tiles for block in range(grid)],
        "neighbors on a die": [remapped(block) * tiles // grid for block in range(grid)],
    }
    for order, tile_of in orders.items():
        assert any(tile_of.count(tile) == [tile_of[b] for b in found].count(tile) for tile in range(tiles)), order


def test_blocks_that_share_nothing_are_spread():
    assert predict.sampled(1000, 64, 0) == predict.sampled(1000, 64, 1000) == emulated.sample(1000, 64)
    assert predict.sampled(40, 64, 10) == list(range(40))


def test_all_splits_of_a_request_are_recorded():
    """The last block combines them, so that a sample without one of them takes less time."""
    found = predict.of_columns((100, 8, 1), 64)
    assert len(found) == 64 and len({block % 100 for block in found}) == 8
    assert all({block % 100 + split * 100 for split in range(8)} <= set(found) for block in found)


def test_a_split_product_adds_up_what_others_left_whatever_the_number_of_slices():
    """With six slices, no 16 neighbors have all of a tile's."""
    arguments = ops.block_scaled_mm.linear(
        128, Inputs("meta", torch.Generator(), torch.float8_e4m3fnuz, torch.bfloat16), 3072, 768
    )
    a, op = ops.block_scaled_mm.Arguments(*arguments), ops.block_scaled_mm
    (kernel,) = predict.predict_call(op, a._asdict(), MACHINE, config=TiledConfig(128, 128, 6))
    steps = sorted(sum(map(len, block.waves)) for block in kernel.recording.blocks)
    assert kernel.recording.grid == 144 and steps[-1] > 1.5 * steps[0]


@pytest.mark.parametrize("product", ["mi325x", "MI355X"])
def test_other_products_have_no_error_band(capsys, product):
    assert cli.main(["predict", "rms_norm", "--shape", "1x4096", "--arch", product]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert (
        f"on {product.upper()}: predicted " in head
        and f"no published decode times of {product.upper()} to compare" in head
    )


def test_unmeasured_constants_are_marked_as_guesses():
    for machine in (machines.MI325X, machines.MI355X):
        assert all(constant.kind != "fitted" for constant in machine.constants.values())
    gfx942 = [
        each for each in machines.MI355X.constants.values() if each.kind == "measured" and "MI300X" in each.source
    ]
    assert not gfx942 and machines.MI325X["hbm_bandwidth"] > MACHINE["hbm_bandwidth"]
    assert predict.band(ops.scaled_mm, "MI355X").ratio is None


def test_tiled_kernels_of_the_plugin_have_the_clock_of_others():
    wave = [(Instr("matrix", 8 * n, 8, cycles=16), None) for n in range(64)]
    block = Block(0, [[*wave, (Instr("end", 512, 4), None)]] * 4)
    tiled, skinny = (
        predict.timed(MACHINE, Recording(name, 1, 1, [block], frozenset()))
        for name in ("scaled_mm_tiled_row_128x128", "scaled_mm_skinny_16")
    )
    assert tiled.us == pytest.approx(tiled.cycles / MACHINE["matrix_clock"])
    assert skinny.us == pytest.approx(skinny.cycles / MACHINE["clock"])


def test_many_turns_are_like_the_last_one(monkeypatch):
    def us(grid: int) -> float:
        wave = [(Instr("valu", 4 * n, 4), None) for n in range(200)]
        blocks = [Block(n, [[*wave, (Instr("end", 800, 4), None)]] * 4) for n in range(8)]
        return launch_time.predict(MACHINE, Recording("k", grid, 2, blocks, frozenset())).us

    whole = us(12 * 304), us(13 * 304)
    monkeypatch.setattr(launch_time, "MAX_STEPS", 1)
    assert [us(12 * 304), us(13 * 304)] == pytest.approx(whole, rel=0.02)
