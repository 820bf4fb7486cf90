"""Statistics and seams of vLLM's workers: `LLM(worker_extension_cls="vllm_rocm_ops.vllm.worker.Extension")`."""

import dataclasses

import vllm_rocm_ops
from vllm_rocm_ops.vllm import reach, seam
from vllm_rocm_ops.vllm.selection import kernel_selection


class Extension:
    """Methods for `llm.collective_rpc(name)`, which returns one answer per worker."""

    def vllm_rocm_ops_stats(self) -> dict[str, dict[str, int]]:
        """`vllm_rocm_ops.stats()` of the worker."""
        return vllm_rocm_ops.stats()

    def vllm_rocm_ops_fallbacks(self) -> dict[str, dict[str, int]]:
        """How often each op fell back to vLLM's code in the worker, and why."""
        return vllm_rocm_ops.fallbacks()

    def vllm_rocm_ops_reset_stats(self) -> None:
        """`vllm_rocm_ops.reset_stats()` in the worker."""
        vllm_rocm_ops.reset_stats()

    def vllm_rocm_ops_choices(self) -> list[dict]:
        """Which kernels serve each shape of a layer in the worker: "unmeasured", "measured" or "off", and the numbers of tokens
        that are ours."""
        return [
            {
                "shape": one.key,
                "state": one.state,
                "why": one.why,
                "ours": [m for m, ours in enumerate(one.ours) if ours],
            }
            for one in kernel_selection.choices()
        ]

    def vllm_rocm_ops_reach(self) -> dict[str, dict]:
        """Return what the seams have taken of the worker's models, by kind of layer: how many layers, and what no seam took, by class."""
        return {kind: dataclasses.asdict(one) for kind, one in reach.found(self).items()}

    def vllm_rocm_ops_seams(self) -> list[dict]:
        """The seams' status in the worker."""
        return [dataclasses.asdict(entry) for entry in seam.status()]
