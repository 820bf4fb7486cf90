"""Bugs in the launch that multiplies by a router's weight and routes."""

from ..bug import Bug, Tests

# fmt: off
BUGS = (
    Bug("weights and ids of another call's logits", "vllm/graph/moe_side_channel.py",
        "if is_same(logits, given) and routing[-1]", "if routing[-1]", Tests("test_routing_gate.py")),
    Bug("a gate's choice that experts do not look for", "vllm/moe/routing_experts.py",
        """    if (chosen := moe_side_channel.routed(router_logits, routing)) is not None:
        return chosen
""", "", Tests("test_routing_gate.py")),
    Bug("padding that goes to experts", "vllm/moe/routing_gate.py", "if masked else None", "if False else None",
        Tests("test_routing_gate.py")),
)
