"""Run bf16 and fp16 experts by `fused_experts` where it is faster, see base.py."""

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.moe import base as experts

PLUGIN_EXPERTS: list[type] = []
"""The plugin's classes, in the order in which they are asked."""


def probe() -> None:
    """Raise `Unavailable` unless vLLM's selection of unquantized experts and their base class are as expected."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    experts.probe(unquantized, "select_unquantized_moe_backend", "moe_config")
    for backend in ("TRITON", "AITER"):
        seam.require(backend in unquantized.UnquantizedMoeBackend.__members__, f"UnquantizedMoeBackend.{backend}")


def install() -> None:
    """Have vLLM ask the plugin's experts first."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    backends = unquantized.UnquantizedMoeBackend
    for name, backend in (("", backends.TRITON), ("Aiter", backends.AITER)):
        made = experts.modular(f"RocmOps{name}UnquantizedExperts", ((None, None),), unquantized, backend)
        PLUGIN_EXPERTS.insert(0, made)
    select = unquantized.select_unquantized_moe_backend

    def select_unquantized_moe_backend(moe_config):
        return experts.select(PLUGIN_EXPERTS, lambda: select(moe_config), moe_config)

    seam.replace_function(select.__name__, select, select_unquantized_moe_backend)


SEAM = seam.Seam(
    name="unquantized_experts",
    replaces="select_unquantized_moe_backend of fused_moe/oracle/unquantized.py",
    probe=probe,
    install=install,
    ops=("fused_experts",),
)
