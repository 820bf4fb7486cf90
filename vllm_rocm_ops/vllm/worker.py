"""Report the plugin's statistics and seams from vLLM's workers.

Use: `LLM(worker_extension_cls="vllm_rocm_ops.vllm.worker.Extension")`.
"""

import dataclasses

import vllm_rocm_ops
from vllm_rocm_ops.vllm import coverage, seam
from vllm_rocm_ops.vllm.selection import kernel_selection, report


class Extension:
    """Add methods for `llm.collective_rpc(name)`, which returns one answer per worker."""

    def vllm_rocm_ops_stats(self) -> dict[str, dict[str, int]]:
        """Return the worker's `vllm_rocm_ops.stats()`."""
        return vllm_rocm_ops.stats()

    def vllm_rocm_ops_fallbacks(self) -> dict[str, dict[str, int]]:
        """Return the calls of each op that fell back to vLLM's code in the worker, by reason."""
        return vllm_rocm_ops.fallbacks()

    def vllm_rocm_ops_reset_stats(self) -> None:
        vllm_rocm_ops.reset_stats()

    def vllm_rocm_ops_choices(self) -> list[dict]:
        """Return the kernel choice for each layer shape of the worker.

        Returns:
            One dict per shape: `shape`, `state` ("unmeasured", "measured" or "off"), `why`, and `ours`, the token
                counts served by the plugin's kernel.
        """
        return [
            {
                "shape": str(choice.key),
                "state": choice.state,
                "why": choice.why,
                "ours": [m for m, serves in enumerate(choice.plugin_by_tokens) if serves],
            }
            for choice in kernel_selection.all_choices()
        ]

    def vllm_rocm_ops_timings(self) -> list[str]:
        """Return the lines of `doctor`'s table of start-up timing for the worker's machine, none without results."""
        return report.table(kernel_selection.record_here())

    def vllm_rocm_ops_reach(self) -> dict[str, dict]:
        """Return, by layer kind, how many of the worker's layers the seams cover, and the rest by class."""
        return {kind: dataclasses.asdict(reach) for kind, reach in coverage.reached(self).items()}

    def vllm_rocm_ops_seams(self) -> list[dict]:
        return [dataclasses.asdict(entry) for entry in seam.status()]
