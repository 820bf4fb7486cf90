"""Bugs in the launch that multiplies by a router's weight and routes."""

from vllm_rocm_ops import ops

from ..bug import WRONG, Bug, Cases, Tests

# fmt: off
BUGS = (
    Bug("a gate's choice that experts do not look for", "vllm/moe/routing_experts.py",
        """    if (routed := moe_side_channel.routed(router_logits, routing)) is not None:
        return routed
""", "", Tests("test_routing_gate.py")),
    Bug("float gate: a weight's last bits dropped", "gemm/skinny/float_weights.h",
        "rest = mma::multiply_tile<Bf16>(rest, of.part[2], tokens);", "", Cases(ops.router_gemm_topk, "fp32-m1", said=WRONG)),
    Bug("groups of tokens without counters", "ops/router_gemm_topk.py", "Counters(config.groups)", "Counters(1)",
        Tests("test_router_gemm_topk.py")),
    Bug("the second group's padding is the first's", "ops/router_gemm_topk.hip", "if (r.padding) r.padding += first;", "",
        Cases(ops.router_gemm_topk, "fp32-padding", on="gfx950", said="output 2")),
    Bug("vLLM's router with other logits' choice", "vllm/moe/vllm_routing.py", "if chosen is not None:\n            return chosen",
        "if True:\n            return chosen", Tests("test_model_gates.py")),
    Bug("a gate whose logits the model changes", "vllm/moe/gate_calls.py", "if len(uses) != 2 or len(made) != 1",
        "if len(made) != 1", Tests("test_model_gates.py")),
    Bug("float32 tokens of a converting model reach the op", "vllm/moe/routing_gate.py", "given = x.to(torch.bfloat16)", "given = x",
        Tests("test_model_gates.py")),
)
