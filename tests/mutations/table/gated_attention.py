"""Bugs in what serves attention layers with an output gate, and norms of 1 + weight."""

from ..bug import Bug, Tests

HERE = Tests("test_gated_attention.py")

# fmt: off
BUGS = (
    Bug("a residual of the graph's input updated in place", "vllm/attention/norm_residuals.py",
        "if not is_part and not split.makes_memory(owner):", "if False:", HERE),
    Bug("a residual read later updated in place", "vllm/attention/norm_residuals.py",
        'all(user <= reader or split.calls_method(user, "size") for alias in aliases for user in alias.users)', "True", HERE),
    Bug("head norms of 1 + weight by their weight", "vllm/attention/rope_and_cache.py",
        'one_plus = split.calls_method(inner, "float") and weight.args[1:] == (1.0,)', "one_plus = False", HERE),
    Bug("a gate copied before attention", "vllm/attention/rope_and_cache.py", "move_gates(place)", "pass", HERE),
    Bug("vLLM's own kernel beside the op", "vllm/attention/rope_pre_attention.py",
        "setattr(part.layer, OWN_KERNEL, not serves)", "pass", HERE),
    Bug("a norm compared without the 1", "vllm/graph/compiled_ops.py",
        'given |= {"one_plus_weight": self.one_plus}', "pass", HERE),
    Bug("rotation by sections lowered to one position", "vllm/graph/markers.py",
        "of = sizes + sections * (positions.dim() == 2)", "of = sizes", HERE),
    Bug("a norm with two outputs that was slower", "vllm/graph/norm_outputs.py",
        "if not serves or not queries.are_alike", "if not queries.are_alike", HERE),
    Bug("attention's output compared without its gate", "vllm/graph/output_gate.py",
        "x.float() * torch.sigmoid(self.gate(both.float()).reshape(x.shape))", "x.float()", HERE),
    Bug("a gate that something else reads", "vllm/graph/queries.py", "if not is_sigmoid or len(by.users) != 1 or",
        "if not is_sigmoid or", HERE),
)
# fmt: on
