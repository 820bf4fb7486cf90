"""Make vLLM's CPU engine measure kernels, with a fake clock, and references as the plugin's kernels."""

import time

from clocks import FakeClock
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Native
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.stats import counter
from vllm_rocm_ops.vllm import worker_startup
from vllm_rocm_ops.vllm.graph import compiled_ops
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.selection import kernel_timing


class Clock(FakeClock):
    """A clock by which the plugin wins for few tokens, and for norms and activations if `rows_win`.

    Each pair takes `seconds`.
    """

    def __init__(self, rows_win: bool, seconds: float):
        self.rows_win, self.seconds = rows_win, seconds

    def times(self, calls, sets, replays):
        time.sleep(self.seconds)
        [kernels] = calls["plugin"].args
        if isinstance(kernels, compiled_ops.QuantComparison):
            return {"plugin": [1.0 if self.rows_win else 3.0], "baseline": [2.0]}
        few = len(sets[0][0]) <= 8
        return {"plugin": [1.0 if few else 3.0], "baseline": [2.0]}


def profile_first() -> None:
    """Make the engine run a profile run, as on a GPU, before it determines its memory."""
    available = CPUWorker.determine_available_memory

    def after_a_profile_run(self):
        self.model_runner.profile_run()
        return available(self)

    CPUWorker.determine_available_memory = after_a_profile_run


def install(factor: float = 1.0, rows_win: bool = True, seconds: float = 0.0) -> None:
    """Install the clock and the kernels, before a model is loaded.

    scaled_mm is wrong by a factor of a scale.
    """
    multiply = Native.apply_scaled_mm

    def counted(self, **arguments):
        counter("vllm", "its kernel").calls += 1
        return multiply(self, **arguments)

    def plugin(a, b, scale_a, scale_b, *others):
        counter("scaled_mm", "plugin").calls += 1
        return ops.scaled_mm.reference(a, b, scale_a, scale_b * factor, *others)

    def rows(op):
        return lambda *arguments: op.reference(*arguments, *op._defaults[len(arguments) :])

    for name in ("rms_norm_dynamic_per_token_quant", "silu_and_mul_per_token_quant"):
        getattr(ops, name).run_kernels = rows(getattr(ops, name))
    linear_base.vllm_kernel_for = lambda *_: Native
    Native.apply_scaled_mm, ops.scaled_mm.run_kernels = counted, plugin
    worker_startup.clock = lambda: Clock(rows_win, seconds)
    kernel_timing.limit_s = lambda: 1000.0  # references and compilers of a CPU take their time
    profile_first()
