"""The sources use the field's words: the identifiers in this list occur nowhere in csrc and the package."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "vllm_rocm_ops")
SUFFIXES = (".h", ".hip", ".cpp", ".py")

# identifier: its replacement, names or a phrase. Ordinary English words are not in the list.
REPLACED = {
    # Skinny GEMMs
    "Finish": "TileEpilogue",
    "Narrow": "WaveSplitK",
    "NARROW": "WAVE_SPLIT_K",
    "SKINNY": "STREAMED_TILE",
    "Turn": "KSlice",
    "kTurn": "kSliceSteps",
    "multiply_turn": "multiply_slice",
    "kRing": "kStages",
    "bring_tokens": "produce_tokens",
    "kBringers": "kProducerWaves",
    "bringer": "producer",
    "kMaxPieces": "kMaxVecs",
    "store_piece": "store_vec",
    "kTeams": "kConsumerGroups",
    "kTeamThreads": "kConsumerThreads",
    "team_wave": "consumer_wave",
    "team_barrier": "consumer_barrier",
    "first_sharer": "first_block",
    "last_sharer": "last_block",
    "in_longer": "remainder_units",
    "tile_units": "units_per_tile",
    "by_tile_units": "units_per_tile_divisor",
    "by_units": "units_per_block_divisor",
    "by_longer_units": "longer_block_divisor",
    "ends_here": "is_second_tile",
    "kRun": "kVec",
    "kLaneRuns": "kLaneVecs",
    "store_run": "store_vec",
    "kLoaded": "kFreeFloats",
    "WIDE_HEADER": "gemm/skinny/streamed_tile.h",
    # Tiled GEMMs
    "Filler": "TileLoader",
    "fill_a": "loader_a",
    "fill_b": "loader_b",
    "kPatchTokens": "kAccumulatorTokens",
    "kPatchRows": "kAccumulatorRows",
    "kPatchesM": "kAccumulatorsM",
    "kPatchesN": "kAccumulatorsN",
    "patch_token": "accumulator_token",
    "patch_row": "accumulator_row",
    "kTurns": "kPingPong",
    "change_turns": "ping_pong_barrier",
    "kPiece": "kVecBytes",
    "kPieces": "kRowVecs",
    "by_piece": "is_fragment_order",
    "b_piece": "b_vec",
    "kTogether": "kFragmentRows",
    "kDies": "kXcds",
    "work_of": "remap_to_xcd",
    "per_die": "per_xcd",
    "add_slices": "reduce_split_k",
    # Arguments and the experts
    "MxProduct": "MxProblem, SkinnyProblem, TiledProblem, GroupedProblem",
    "kPaired": "kGated",
    "kBegins": "kBeginsItem",
    "sum_parts": "add_split_k",
    "share_of": "lane_experts",
    "is_mine": "is_found",
    # Costs
    "CROWDED_US": "the penalty of co-resident blocks",
    "DRAIN_US": "the cost of a split tile",
    # Seams
    "ours_or": "run_or_native",
    "stock_class": "native_class",
    "can_hold": "can_keep",
    "handover": "fused_quant",
    "put_first": "register_first",
    # Results
    "steps_apart": "count_ulps",
    "HALF_STEP": "HALF_ULP",
    "SMALLEST_HALF_STEP": "SMALLEST_HALF_ULP",
    # Plans
    "CHUNK": "VECTOR",
    "chunk_counts": "vectors_per_thread",
    "pieces_per_thread": "vectors_per_thread",
    "ROW_CHUNKS": "ROW_VECTORS",
    "in_piece": "in_vector",
    "RING_PANELS": "STAGE_PANELS",
    "NARROW_UNIT": "WAVE_SPLIT_K_UNIT",
    "END_US": "TILE_EPILOGUE_US",
    "IDLE": "IDLE_COST",
    "ALONE": "SINGLE_BLOCK_RATE",
    "SLICES": "SPLIT_K",
    "AGAIN_US": "FURTHER_TILE_US",
    "AGAIN": "FURTHER_TILE_COST",
    "OF_BLOCK": "BLOCK_RATE",
    "PAIR": "UNIT_BYTES",
    "parted": "split_k",
    "most_parts": "most_slices",
    "of_part": "of_slice",
    "scale_run": "scale_k",
}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


@pytest.mark.parametrize("identifier", REPLACED)
def test_an_identifier_is_gone(identifier):
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b{identifier}\b", line)
    ]
    assert not found, f"{identifier} is {REPLACED[identifier]} now"


def test_what_replaces_them_is_there():
    text = "\n".join(path.read_text() for path in sources())
    names = {name for value in REPLACED.values() for name in value.split(", ")}
    assert [name for name in sorted(names) if name.isidentifier() and not re.search(rf"\b{name}\b", text)] == []
