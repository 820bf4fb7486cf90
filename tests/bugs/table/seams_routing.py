"""Bugs in the seam of gates that route in the launch of their GEMM."""

from ..bug import Bug, Tests

HANDED = "vllm/graph/moe_side_channel.py"
GATE, EXPERTS = "vllm/moe/routing_gate.py", "vllm/moe/routing_experts.py"
CAUGHT = Tests("test_routing_gate.py")

BUGS = (
    Bug(
        "weights and ids of another call's logits",
        HANDED,
        "if is_same(logits, given) and how[-1]",
        "if how[-1]",
        CAUGHT,
    ),
    Bug(
        "weights and ids found twice",
        HANDED,
        "    (given, its_how, *made), current.routed = current.routed, None\n",
        "    given, its_how, *made = current.routed\n",
        CAUGHT,
    ),
    Bug(
        "a choice by another bias",
        HANDED,
        "and how[-1] is its_how[-1] and how == its_how",
        "and how[:-1] == its_how[:-1]",
        CAUGHT,
    ),
    Bug(
        "a choice by other groups",
        HANDED,
        "how[-1] is its_how[-1] and how == its_how",
        "how[-1] is its_how[-1]",
        CAUGHT,
    ),
    Bug(
        "a gate's choice that experts do not look for",
        EXPERTS,
        "    if (found := moe_side_channel.routed(router_logits, how)) is not None:\n        return found\n",
        "",
        CAUGHT,
    ),
    Bug(
        "one of a gate's two choices is enough",
        GATE,
        "if all(one.plugin_serves(x.shape[0])",
        "if any(one.plugin_serves(x.shape[0])",
        CAUGHT,
    ),
    Bug(
        "a gate that never routes keeps the plugin's class",
        GATE,
        "                restore_baseline(self)\n",
        "",
        CAUGHT,
    ),
    Bug(
        "padding masked where vLLM's router with groups does not",
        GATE,
        "masked = is_plain and self.experts.baseline is not None",
        "masked = self.experts.baseline is not None",
        CAUGHT,
    ),
    Bug(
        "padding that goes to experts",
        GATE,
        "if masked else None",
        "if False else None",
        CAUGHT,
    ),
    Bug(
        "a gate's bias ignored",
        GATE,
        "        and bias is None\n",
        "",
        CAUGHT,
    ),
    Bug(
        "logits of another dtype than the model wants",
        GATE,
        'getattr(gate, "out_dtype", None) in (None, weight.dtype)',
        "True",
        CAUGHT,
    ),
    Bug(
        "a gate with an adapter or a forward of its own",
        GATE,
        "type(gate) not in gate_classes()",
        "not isinstance(gate, gate_classes())",
        CAUGHT,
    ),
    Bug(
        "gates of layers whose tokens move between ranks",
        GATE,
        "quantized_input.moves_tokens(config) or getattr(",
        "getattr(",
        CAUGHT,
    ),
    Bug(
        "gates of layers that vLLM routes",
        GATE,
        'found if hasattr(found, "method") else None',
        "found",
        CAUGHT,
    ),
    Bug(
        "unchecked weights and ids",
        GATE,
        "torch.where(follows[:, None], logits, torch.nan)",
        "logits",
        CAUGHT,
    ),
    Bug(
        "weights that need not fit the ids",
        GATE,
        "follows = torch.isclose(weights, made, rtol=1e-2, atol=1e-6).all(1)",
        "follows = weights[:, 0] > 0",
        CAUGHT,
    ),
    Bug(
        "any choice of experts whose weights fit",
        GATE,
        "        follows &= torch.isclose(*sums, rtol=1e-4, atol=1e-6)\n",
        "",
        CAUGHT,
    ),
    Bug(
        "routers with different groups timed as one",
        GATE,
        "{of_groups}{' bias'",
        "{' bias'",
        CAUGHT,
    ),
    Bug(
        "the factor of weights left out with one group",
        "vllm/moe/routing_experts.py",
        "(num_expert_group == 1 and scale == 1.0)",
        "num_expert_group == 1",
        Tests("test_experts.py"),
    ),
)
