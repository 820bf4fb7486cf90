"""Bugs in the quantizing epilogue of decode attention."""

from vllm_rocm_ops import ops

from ..bug import Bug, Call, Cases

SAID = "output out(_scales)?: (error|mean error|off by|NaNs differ)"

BUGS = (
    Bug(
        "a scale of half a head",
        "attention/output.h",
        "if constexpr (kLanes == 32) absmax = Max{}(absmax, wave::from_lane(absmax, wave::lane() ^ 16));",
        "",
        Cases(ops.paged_attention_decode, "groups", said=SAID),
    ),
    Bug(
        "a scale of every other pair",
        "attention/output.h",
        "absmax = max_abs(max_abs(absmax, vecs[v].lo), vecs[v].hi);",
        "absmax = max_abs(absmax, vecs[v].lo);",
        Cases(ops.paged_attention_decode, "groups-native", on="gfx950", said=SAID),
    ),
    Bug(
        "scales of heads stored at one address",
        "attention/output.h",
        "of.head * p.out_scales_head_stride, scale",
        "of.row * p.out_scales_head_stride, scale",
        Cases(ops.paged_attention_decode, "groups-of-fp8", said="argument problem.out_scales is also written"),
    ),
    Bug(
        "scales not stored",
        "attention/output.h",
        "if (first_dim == 0)",
        "if (first_dim < 0)",
        Cases(ops.paged_attention_decode, "groups", on="gfx950", said="NaNs differ"),
    ),
    Bug(
        "a round left out",
        "attention/decode_sums.h",
        "if constexpr (kGrouped) whole[i][round] =",
        "if constexpr (kGrouped) whole[i][0] =",
        Cases(ops.paged_attention_decode, "groups-native-of-fp8", on="gfx950", said=SAID),
    ),
    Bug(
        "multiplied by the scale",
        "attention/output.h",
        "values *= 1.0f / mem::load<float>(p.out_scale);",
        "values *= mem::load<float>(p.out_scale);",
        Cases(ops.paged_attention_decode, "out-fp8", said=SAID),
    ),
    Bug(
        "scale from an unrounded result",
        "attention/output.h",
        "x.lo = round_to<T>(x.lo);",
        "",
        Call("test_attention_output.require_same_bits", "groups", as_executor=False),
    ),
)
