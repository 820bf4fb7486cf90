"""Ask vLLM for the launches of a model's decode step: it builds the model without memory, on a simulated GPU, with the seams on.

`python -m vllm_rocm_ops.vllm.meta.model gfx942` answers requests, one JSON object per line: `config`, a Hugging Face
configuration, `tp` and `ep`. The answer has `vllm`, its version, and `blocks`: pairs of a count and the launches of a decoder layer
that is repeated so often, in the order of a step, each [layer, op or null, parameters, dtype, what runs without an op]. Or it has
`error`.

vLLM's constructors decide the class, sizes, quantization and kernel of each layer, and its `forward`, run once on tensors without values,
the order and who reads what. Layers that would compute are stopped there: linear layers, norms, activations, experts, attention,
collectives. A layer that no op serves, or whose kernel a seam did not take, is a launch without an op.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path

CPU_S = 200  # of an answer
GROUPS = "_TP", "_DP", "_EP"
EXTENSIONS = "_C", "_moe_C", "_rocm_C", "_C_cache_ops", "_C_custom_ar"
"""Namespaces of vLLM's compiled ops. None runs here, but its files look some up."""


# The environment


class Missing:
    """An op that this build of vLLM lacks."""

    def __init__(self, name: str):
        self.name, self.default = name, self

    def __call__(self, *arguments, **keywords):
        raise RuntimeError(f"{self.name} has no values to compute on")


def prepare(arch: str) -> None:
    """Make this process one with a simulated GPU, install the seams, and import what building a model needs."""
    from vllm_rocm_ops.vllm.meta import simulated

    absent = *(f"vllm.{name}" for name in simulated.COMPILED), "flash_attn"
    sys.meta_path.insert(0, simulated.Pretended(*absent))
    import torch
    from vllm import envs

    simulated.amd(arch, envs.VLLM_ROCM_USE_AITER)
    from torch._ops import _OpNamespace

    torch.set_num_threads(1)
    known = _OpNamespace.__getattr__

    def lookup(self, name):
        try:
            return known(self, name)
        except AttributeError:
            if self.name not in EXTENSIONS or name.startswith("__"):
                raise
            return Missing(f"{self.name}::{name}")

    import vllm.config
    from vllm.triton_utils import tl

    from vllm_rocm_ops.vllm import register, seam

    seam.needs_code = False
    register()
    if not seam.active():
        raise RuntimeError(next((entry.reason for entry in seam.status()), "no seam is on"))
    _OpNamespace.__getattr__ = lookup
    for name in ("bfloat16", "float16", "float32", "int32", "int64", "float8e4nv", "float8e4b8", "uint8", "int8"):
        if not hasattr(tl, name):
            setattr(tl, name, name)
    sys.meta_path.insert(0, simulated.Pretended("cuda"))
    torch.cuda.current_device = lambda: 0
    torch.accelerator.empty_cache = lambda: None

    from vllm.platforms import current_platform

    type(current_platform).current_device = classmethod(lambda cls: torch.device("meta"))

    import vllm.model_executor.model_loader.utils
    import vllm.model_executor.models.llama  # noqa: F401
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models import registry

    get_quantization_config("fp8")  # imports all, which takes longer than an answer
    if importlib.util.find_spec("torchvision") is None:  # Transformers knows by now; vLLM's vision models import it
        sys.meta_path.insert(0, simulated.Pretended("torchvision"))
    registry._run_in_subprocess = lambda inspect: inspect()  # another process has no simulated GPU


def groups(config, tp: int, dp: int) -> None:
    """Make vLLM's groups of ranks, of one rank that says it is one of several. Its collectives launch nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    made = dist.new_group
    dist.new_group = lambda ranks=None, *_, **__: made(ranks, backend="fake")
    address = {"distributed_init_method": "tcp://127.0.0.1:1", "backend": "fake"}
    with set_current_vllm_config(config, check_compile=False):
        parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, **address)
        parallel_state.initialize_model_parallel(1, backend="fake")
    for name, size in zip(GROUPS, (tp, dp, tp * dp)):
        group = getattr(parallel_state, name, None)
        if group is not None:
            group.world_size, group.ranks = size, list(range(size))


def configuration(folder: str, tp: int, dp: int, is_expert_parallel: bool):
    """Return vLLM's configuration of a model."""
    from vllm.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    given = {"tokenizer": folder, "skip_tokenizer_init": True, "enforce_eager": True}
    if "allow_deprecated_quantization" in inspect.signature(ModelConfig).parameters:
        given["allow_deprecated_quantization"] = True
    model = ModelConfig(model=folder, **given)
    result = VllmConfig(
        model_config=model,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=16),
        load_config=LoadConfig(load_format="dummy"),
    )
    groups(result, tp, dp)
    parallel = result.parallel_config
    parallel.tensor_parallel_size, parallel.data_parallel_size = tp, dp
    parallel.world_size, parallel.enable_expert_parallel = tp, is_expert_parallel
    model.verify_with_parallel_config(parallel)
    return result


# Requests


def answer(request: dict) -> dict:
    """Return the launches of a model's step, or why vLLM cannot build it."""
    from vllm import __version__

    config, tp = request["config"], request["tp"]
    ep = tp if request["ep"] == 0 else request["ep"]
    if ep is not None and (ep < tp or ep % tp):
        return {"error": f"ep must be a multiple of tp={tp}, got {ep}"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            config.pop("auto_map", None)  # vLLM's own classes
            (Path(folder) / "config.json").write_text(json.dumps(config))
            return {"vllm": __version__, "blocks": built(folder, tp, 1 if ep is None else ep // tp, ep is not None)}
    except Exception as error:  # noqa: BLE001  a constructor may raise anything
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines()] or [""]
        of_pydantic = [
            line.partition(" [type=")[0] for line in lines if " [type=" in line
        ]  # without its heading and link
        what = f"{type(error).__name__}: {(of_pydantic or [' '.join(lines[:4])])[0]}"
        return {"error": f"vLLM {__version__} cannot build it: {what}"}


def built(folder: str, tp: int, dp: int, is_expert_parallel: bool) -> list:
    """Return the blocks of an answer."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe import expert_map_manager
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from vllm_rocm_ops.vllm.meta import launches, step

    expert_map_manager.ExpertMapManager.get_compressed_map_string = lambda self: ""  # for a log, from values
    for module in list(sys.modules.values()):
        if "aux_stream" in getattr(module, "__dict__", {}) and module.__name__.startswith("vllm."):
            module.aux_stream = lambda: None
    config = configuration(folder, tp, dp, is_expert_parallel)
    across = torch.full((dp,), step.TOKENS, dtype=torch.int32) if dp > 1 else None
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        model = initialize_model(vllm_config=config)
        with (
            set_current_vllm_config(config, check_compile=False),
            set_forward_context(None, config, num_tokens=step.TOKENS, num_tokens_across_dp=across),
            torch.no_grad(),
        ):
            return launches.blocks_of(model, config)


def main() -> None:
    """Answer requests until there are no more, each in a fork: vLLM keeps one configuration per process."""
    gc.disable()  # in a fork a collection writes to every page of what was imported, which takes longer than an answer
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            out.write(json.dumps(answer(json.loads(line))) + "\n")
            out.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            out.write(json.dumps({"error": f"vLLM ended with status {status}"}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
