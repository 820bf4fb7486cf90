"""Bugs in the rotation of MLA's queries in W_UK's launch."""

from ..bug import Bug, Tests

# fmt: off
BUGS = (
    Bug("queries of more rows than kernels take left to the product", "vllm/attention/mla_absorb.py",
        "not 0 < rows <= MAX_TOKENS", "not 0 < rows", Tests("test_mla_rotation.py")),
    Bug("queries rotated twice", "vllm/attention/mla_norms.py", "if mla_rotation.rotation_of(front.decoder) is None:", "if True:",
        Tests("test_mla_norms.py")),
    Bug("positions of a padded graph", "vllm/attention/mla_rotation.py", "positions[:tokens], *table",
        "positions, *table", Tests("test_mla_rotation.py")),
)
