"""Bugs in Gated DeltaNet's decode step."""

from vllm_rocm_ops import ops

from ..bug import Bug, Call, Cases, Tests

SEAM, CORE = Tests("test_gated_delta_net_seam.py"), "vllm/attention/gated_delta_net_core.py"
COMPARISON = "vllm/attention/gated_delta_net_comparison.py"
FILE, OP = "ops/gated_delta_net_decode.hip", ops.gated_delta_net_decode

# fmt: off
BUGS = (
    Bug("a slot below 0 taken for a request's", FILE, "if (slot <= 0 || from <= 0) rows = 0;",
        "if (slot == 0 || from == 0) rows = 0;", Cases(OP, "padded-static")),
    Bug("accepted rows beyond the slots read", FILE, "accepted >= 1 && accepted <= p.columns", "accepted >= 1",
        Cases(OP, "drafts-beyond")),
    Bug("b projected for a", FILE, "weights + p.a_start * p.ba_weight_stride", "weights", Cases(OP, "tokens", said="error")),
    Bug("tokens taken for b and a in other steps", CORE, "return self.layer.in_proj_ba(gates)[0] if self.projects else gates",
        "return gates", SEAM),
    Bug("q not divided by the root of its size", FILE, "+ kNormEpsilon) * kQueryScale;", "+ kNormEpsilon);",
        Cases(OP, "epsilon", said="error")),
    Bug("a state that does not decay before the delta", FILE, "beta * (mixed[2][of_v] - decay * of_k * sums.x)",
        "beta * (mixed[2][of_v] - of_k * sums.x)", Cases(OP, "fp32-plain", said="error")),
    Bug("slots in 32 bits", FILE, "i64(slot) * p.state_stride", "i64(u32(slot) * u32(p.state_stride))",
        Call("test_far_apart.test_every_dimension_that_may_be_long", OP, on="gfx950")),
    Bug("states of the convolution by another order", CORE, "conv if is_dim_first() else conv.transpose(1, 2)",
        "conv.transpose(1, 2) if is_dim_first() else conv", SEAM),
    Bug("a state after two accepted drafts read for one after three", CORE, "accepted, metadata.spec_query_start_loc",
        "accepted.clamp(max=2), metadata.spec_query_start_loc", SEAM),
    Bug("steps with drafts timed as without", COMPARISON, "self.rows = 1 + drafts", "self.rows = 1", SEAM),
    Bug("a gate that is no SiLU", "vllm/attention/gated_delta_net.py", "or norm.activation not in SILU", "", SEAM),
)
