"""Random weights that spread tokens over experts: `LLM(worker_extension_cls="random_experts.Extension")`, on both sides.

vLLM's dummy weights send all tokens of a model to the same experts: a router's bias is larger than its products. Where this module is
imported, routers have no bias, and logits of about N(0, 1) that depend on the token: embeddings are N(0, 1), norms' weights 1,
a router's N(0, 1 / hidden size). Tokens that are sampled at temperature 1 are all different. So the kernels run that route in service:
VLLM_MOE_ROUTING_SIMULATION_STRATEGY replaces these, on one side by slower ones (vLLM 0.33 on the H200: 12 us a layer).
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
    """Gives the model such weights; a router's are the same in all ranks."""
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            parameter.zero_()
        elif name.endswith("norm.weight"):
            parameter.fill_(1)
        elif name.endswith("embed_tokens.weight"):
            parameter.normal_()
        elif ROUTER.search(name):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.copy_(values / parameter.shape[1] ** 0.5)


@functools.wraps(DummyModelLoader.load_weights)
def load_weights(self, model, model_config, _load=DummyModelLoader.load_weights):
    _load(self, model, model_config)
    spread(model)


DummyModelLoader.load_weights = load_weights
