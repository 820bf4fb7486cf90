"""Load random weights that spread tokens over experts: `LLM(worker_extension_cls="random_experts.Extension")`, on both sides.

vLLM's dummy weights send all tokens of a model to the same experts, as a router's bias exceeds its products. When this module is imported,
routers have no bias and token-dependent logits of about N(0, 1): embeddings are N(0, 1), norm weights 1, a router's N(0, 1 / hidden
size). MXFP4 weights, which vLLM leaves 0, are random bytes with scales of 2^-7 to 2^-4. Tokens sampled at temperature 1 all differ. Serving has the same routing kernels: VLLM_MOE_ROUTING_SIMULATION_STRATEGY would
replace them, on one side by slower ones (vLLM 0.33 on the H200: 12 us per layer).
"""

from __future__ import annotations

import functools
import re

import torch
from engine_start import Extension  # noqa: F401  which vLLM finds here
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

ROUTER = re.compile(r"(^|\.)(gate|router)\.weight$")


@torch.no_grad()
def spread(model: torch.nn.Module) -> None:
    """Set these weights; a router's are equal on all ranks."""
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            parameter.zero_()
        elif name.endswith("norm.weight"):
            parameter.fill_(1)
        elif name.endswith(("embed_tokens.weight", "model.embedding.weight")):
            parameter.normal_()
        elif parameter.dtype == torch.uint8:
            parameter.random_(120, 124) if name.endswith("scale") else parameter.random_(0, 256)
        elif ROUTER.search(name):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.copy_(values / parameter.shape[1] ** 0.5)


@functools.wraps(DummyModelLoader.load_weights)
def load_weights(self, model, model_config, _load=DummyModelLoader.load_weights):
    """Load vLLM's dummy weights and spread them."""
    _load(self, model, model_config)
    spread(model)


DummyModelLoader.load_weights = load_weights
