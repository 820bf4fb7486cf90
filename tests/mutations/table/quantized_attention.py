"""Bugs in the seam quantized_attention."""

from ..bug import Bug, Tests

# fmt: off
BUGS = (
    Bug("no scales in the profile run", "vllm/attention/mla_v_up.py", "groups.fill_(1.0)", "pass",
        Tests("test_mla_v_up.py")),
    Bug("scales of attention that are powers of two", "vllm/attention/quantized_attention.py", " or traits.ue8m0 or",
        " or", Tests("test_quantized_attention.py")),
)
