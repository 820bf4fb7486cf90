"""Bugs in the rotation of MLA's queries in W_UK's launch."""

from ..bug import Bug, Tests

# fmt: off
BUGS = (
    Bug("queries rotated twice", "vllm/attention/mla_norms.py", "if mla_rotation.rotation_of(pre_attention.decoder) is None:", "if True:",
        Tests("test_mla_norms.py")),
    Bug("positions of a padded graph", "vllm/attention/mla_rotation.py", "positions[:tokens], *table",
        "positions, *table", Tests("test_mla_rotation.py")),
)
