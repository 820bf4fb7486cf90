"""Random routers that spread tokens over experts: `LLM(worker_extension_cls="random_experts.Extension")`, on both sides.

vLLM's dummy weights send all tokens of a model to the same experts, as the bias of a router is larger than its products. Where this
module is imported they have no bias and weights of N(0, 1), each router its own. A token then goes to experts by what it is,
through the kernels that route in service: VLLM_MOE_ROUTING_SIMULATION_STRATEGY replaces these, with slower ones on
one side (vLLM 0.33: 12 us a layer on the H200). Tokens that are sampled at temperature 1 are all different.
"""

from __future__ import annotations

import functools
import re
import sys

import torch
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

ROUTER = re.compile(r"(^|\.)(gate|router)\.weight$")
BIAS = "e_score_correction_bias"

if "vllm_rocm_ops" in sys.modules:  # the side with the ops
    from vllm_rocm_ops.vllm.worker import Extension
else:

    class Extension:
        """Nothing more for a worker."""


@torch.no_grad()
def spread(model: torch.nn.Module) -> None:
    """Gives the model such routers, the same in all ranks."""
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith(BIAS):
            parameter.zero_()
        elif ROUTER.search(name):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.copy_(values)


@functools.wraps(DummyModelLoader.load_weights)
def load_weights(self, model, model_config, _load=DummyModelLoader.load_weights):
    _load(self, model, model_config)
    spread(model)


DummyModelLoader.load_weights = load_weights
