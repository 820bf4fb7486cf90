"""Bugs in the seam quantized_attention."""

from ..bug import Bug, Tests

# fmt: off
BUGS = (
    Bug("no quantization by groups after vLLM's attention", "vllm/attention/quantized_attention.py",
        "supports = groups is None and (", "supports = (", Tests("test_quantized_attention.py")),
    Bug("one win enough for W_UV's quantization", "vllm/attention/mla_v_up.py",
        "all(choice.plugin_serves(rows) for choice in self.choices)", "any(choice.plugin_serves(rows) for choice in self.choices)",
        Tests("test_mla_v_up.py")),
    Bug("no scales in the profile run", "vllm/attention/mla_v_up.py", "groups.fill_(1.0)", "pass",
        Tests("test_mla_v_up.py")),
    Bug("scales of attention that are powers of two", "vllm/attention/quantized_attention.py", " or traits.ue8m0 or",
        " or", Tests("test_quantized_attention.py")),
)
