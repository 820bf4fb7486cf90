"""Bugs in the launch that multiplies by a router's weight and routes."""

from vllm_rocm_ops import ops

from ..bug import WRONG, Bug, Cases, Tests

# fmt: off
BUGS = (
    Bug("weights and ids of another call's logits", "vllm/graph/moe_side_channel.py",
        "if is_same(logits, given) and routing[-1]", "if routing[-1]", Tests("test_routing_gate.py")),
    Bug("a gate's choice that experts do not look for", "vllm/moe/routing_experts.py",
        """    if (chosen := moe_side_channel.routed(router_logits, routing)) is not None:
        return chosen
""", "", Tests("test_routing_gate.py")),
    Bug("padding that goes to experts", "vllm/moe/routing_gate.py", "if self.of_layer.masks else None", "if False else None",
        Tests("test_routing_gate.py")),
    Bug("float gate: a weight's last bits dropped", "gemm/skinny/float_weights.h",
        "rest = mma::multiply_tile<Bf16>(rest, of.part[2], tokens);", "", Cases(ops.router_gemm_topk, "fp32-m1", said=WRONG)),
    Bug("float gate: a part of the wrong pair", "gemm/skinny/float_weights.h", "const u32x4 vec = weights.vec[row][pair / 2];",
        "const u32x4 vec = weights.vec[row][0];", Cases(ops.router_gemm_topk, "fp32-m8", on="gfx950", said=WRONG)),
    Bug("float gate: infinity times a part that is zero", "gemm/skinny/float_weights.h",
        "__builtin_fabsf(upper[i]) < __builtin_inff() ?", "true ?",
        Cases(ops.router_gemm_topk, "fp32-not-finite", on="gfx950", said=WRONG)),
    Bug("float gate: each vector loaded twice", "gemm/skinny/wave_split_k.h", "step * p.b_step + v * 16", "step * p.b_step",
        Cases(ops.router_gemm_topk, "fp32-qwen-m3", said=WRONG)),
    Bug("groups of tokens share partial sums", "ops/router_gemm_topk.hip", "p.partials += group * p.group_partials;", "",
        Cases(ops.router_gemm_topk, "fp32-m17", said="error|without synchronization|NaNs differ")),
    Bug("groups of tokens without counters", "ops/router_gemm_topk.py", "Counters(config.groups)", "Counters(1)",
        Tests("test_router_gemm_topk.py")),
    Bug("the last group routes tokens that there are not", "ops/router_gemm_topk.hip", "p.m = left < tokens ? left : tokens;",
        "p.m = tokens;", Cases(ops.router_gemm_topk, "fp32-m9", said=".")),
    Bug("the second group's padding is the first's", "ops/router_gemm_topk.hip", "if (r.padding) r.padding += first;", "",
        Cases(ops.router_gemm_topk, "fp32-padding", on="gfx950", said="output 2")),
    Bug("a group reads the first one's tokens", "ops/router_gemm_topk.hip", "p.a += i64(first) * p.a_stride;", "",
        Cases(ops.router_gemm_topk, "fp32-m17", said=WRONG)),
    Bug("vLLM's router with other logits' choice", "vllm/moe/vllm_routing.py", "if chosen is not None:\n            return chosen",
        "if True:\n            return chosen", Tests("test_model_gates.py")),
    Bug("vLLM's router by a table of ids", "vllm/moe/vllm_routing.py", '"_hash_indices_table", ', "",
        Tests("test_model_gates.py")),
    Bug("a gate whose logits the model changes", "vllm/moe/gate_calls.py", "if len(uses) != 2 or len(made) != 1",
        "if len(made) != 1", Tests("test_model_gates.py")),
    Bug("tokens in another dtype of the model's code", "vllm/moe/gate_calls.py",
        'in (("to", ["torch.float32"]), ("float", []))', "is not None", Tests("test_model_gates.py")),
    Bug("a gate in a graph whose choice is frozen", "vllm/moe/routing_gate.py",
        "            if not self.rocm_ops_in_model:", "            if True:", Tests("test_model_gates.py")),
    Bug("float32 tokens of a converting model reach the op", "vllm/moe/routing_gate.py", "given = x.to(torch.bfloat16)", "given = x",
        Tests("test_model_gates.py")),
    Bug("an old compiled graph of gates is loaded", "vllm/moe/routing_gate.py",
        "compiled_ops.choices.others = (*dict.fromkeys((*compiled_ops.choices.others, IN_GRAPHS)),)", "pass",
        Tests("test_model_gates.py")),
    Bug("a router without groups pads experts", "vllm/moe/routing_gate.py",
        "return not self.routed_experts.num_expert_group and", "return self.method[0] == 'softmax' and",
        Tests("test_model_gates.py")),
)
