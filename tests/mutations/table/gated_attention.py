"""Bugs in what serves attention layers with an output gate, and norms of 1 + weight."""

from ..bug import Bug, Tests

HERE = Tests("test_gated_attention.py")

# fmt: off
BUGS = (
    Bug("a residual of the graph's input updated in place", "vllm/attention/norm_residuals.py",
        "if not is_part and not split.makes_memory(owner):", "if False:", HERE),
    Bug("head norms of 1 + weight by their weight", "vllm/attention/rope_and_cache.py",
        'one_plus = split.calls_method(inner, "float") and weight.args[1:] == (1.0,)', "one_plus = False", HERE),
    Bug("a norm with two outputs that was slower", "vllm/graph/norm_outputs.py",
        "if not serves or not queries.are_alike", "if not queries.are_alike", HERE),
    Bug("attention's output compared without its gate", "vllm/graph/output_gate.py",
        "x.float() * torch.sigmoid(self.gate(both.float()).reshape(x.shape))", "x.float()", HERE),
)
# fmt: on
