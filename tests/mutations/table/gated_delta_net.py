"""Bugs in Gated DeltaNet's decode step."""

from vllm_rocm_ops import ops

from ..bug import Bug, Call, Cases, Tests

SEAM, LAYER = Tests("test_gated_delta_net_seam.py"), "vllm/attention/gated_delta_net_layer.py"
TIMING = "vllm/attention/gated_delta_net_timing.py"
FILE, OP = "ops/gated_delta_net_decode.hip", ops.gated_delta_net_decode

# fmt: off
BUGS = (
    Bug("padding's slot 0 taken for a request's", FILE, "if (slot <= 0 || from <= 0) rows = 0;",
        "if (slot < 0 || from < 0) rows = 0;", Cases(OP, "padded", said="NaNs differ|leaves another")),
    Bug("a slot below 0 taken for a request's", FILE, "if (slot <= 0 || from <= 0) rows = 0;",
        "if (slot == 0 || from == 0) rows = 0;", Cases(OP, "padded-static")),
    Bug("results of padding left as they are", FILE, "for (int row = rows > 0 ? rows : 0; row < end; ++row)",
        "for (int row = rows > 0 ? rows : end; row < end; ++row)", Cases(OP, "padded", said="NaNs differ|error|off")),
    Bug("rows after the last request left as they are", FILE, "request == p.requests - 1 ? p.rows - first : rows",
        "rows", Cases(OP, "more-rows", said="NaNs differ|off")),
    Bug("a draft's state read at the first slot", FILE, "mem::load<int>(slots + (accepted - 1) * p.indices_step)",
        "mem::load<int>(slots)", Cases(OP, "drafts", said="error")),
    Bug("accepted rows beyond the slots read", FILE, "accepted >= 1 && accepted <= p.columns", "accepted >= 1",
        Cases(OP, "drafts-beyond")),
    Bug("a draft's convolution that begins at the first position", FILE,
        "conv_state(slot, part(i)) + (accepted - 1) * p.conv_position_stride", "conv_state(slot, part(i))",
        Cases(OP, "drafts", said="error|leaves another")),
    Bug("only the first slot of drafts written", FILE, "kDrafts ? mem::load<int>(slots + row * p.indices_step) : slot",
        "slot", Cases(OP, "drafts", said="error|NaNs differ")),
    Bug("more rows than slots", FILE, "rows = rows < p.columns ? rows : p.columns;", "",
        Cases(OP, "drafts-over-columns")),
    Bug("z of another row", FILE, "((const f32x2*)mixed[3 + row % 2])", "((const f32x2*)mixed[3])",
        Cases(OP, "drafts", said="LdsRace|written here")),
    Bug("channels of K heads written before all blocks have read them", FILE,
        "is_last_block = wave::uniform(before) == p.value_heads - 1;", "is_last_block = wave::uniform(before) == 0;",
        Cases(OP, "next", said="without synchronization")),
    Bug("gates of a K head's first V head", FILE, "start + key_head * p.gate_step + of_key_head",
        "start + key_head * p.gate_step", Cases(OP, "next", said="error")),
    Bug("convolution without its newest row", FILE, "sum = __builtin_fmaf(newest, weight[i][1].y, sum);", "",
        Cases(OP, "bf16-plain", said="error")),
    Bug("the state's rows of a convolution not advanced", FILE, "kept[i][0] = past[i][1];", "kept[i][0] = past[i][0];",
        Cases(OP, "bf16-plain", said="leaves another conv_state")),
    Bug("q not divided by the root of its size", FILE, "+ kNormEpsilon) * kQueryScale;", "+ kNormEpsilon);",
        Cases(OP, "epsilon", said="error")),
    Bug("k without its length", FILE, "const f32x2 step = {delta * of_k, delta * of_k};",
        "const f32x2 step = {delta, delta};", Cases(OP, "fp32-plain", said="error")),
    Bug("a state that does not decay before the delta", FILE, "beta * (mixed[2][of_v] - decay * of_k * sums.x)",
        "beta * (mixed[2][of_v] - of_k * sums.x)", Cases(OP, "fp32-plain", said="error")),
    Bug("slots in 32 bits", FILE, "i64(slot) * p.state_stride", "i64(u32(slot) * u32(p.state_stride))",
        Call("test_far_apart.test_every_dimension_that_may_be_long", OP, on="gfx950")),
    Bug("a mixed step taken for one of drafts", LAYER, "if metadata.num_decodes: return None", "", SEAM),
    Bug("prefills taken for decode rows", LAYER, "if metadata.num_prefills: return None", "", SEAM),
    Bug("absent requests of a padded step", LAYER, "slots[: metadata.num_actual_tokens, None]", "slots[:, None]", SEAM),
    Bug("states of the convolution by another order", LAYER, "conv if is_dim_first() else conv.transpose(1, 2)",
        "conv.transpose(1, 2) if is_dim_first() else conv", SEAM),
    Bug("a prefill that is not quantized", LAYER, "if core.kind: mla_v_up.quantize(made, out, scale, groups)",
        "if False: pass", SEAM),
    Bug("a timed result whose state is not checked", TIMING, "[values[:tokens], left.state[slots.flatten()].flatten(1), ",
        "[values[:tokens], ", SEAM),
    Bug("steps with drafts timed as without", TIMING, "self.rows = 1 + drafts", "self.rows = 1", SEAM),
    Bug("a gate that is no SiLU", "vllm/attention/gated_delta_net.py", "or norm.activation not in SILU", "", SEAM),
)
