"""Test models with experts in INT4 or MXFP4 in vLLM's engine: tokens, what the seam takes, and that it can be switched off."""

import checkpoints
import pytest
from engines import FOUR_BIT_EXPERTS, STEPS, counted, identity


@pytest.fixture(scope="module")
def answers(engines) -> dict[str, dict]:
    """Return vLLM's answers with the plugin, and for the plain models without it."""
    answers = engines.run({identity(flavour): engines.job(flavour) for flavour in FOUR_BIT_EXPERTS})
    plain = [(model, f"{kind}_plain") for model, kind in FOUR_BIT_EXPERTS]
    return answers | engines.run({identity(one): engines.job(one) for one in plain}, VLLM_PLUGINS="none")


@pytest.mark.parametrize("flavour", FOUR_BIT_EXPERTS, ids=identity)
def test_tokens_are_those_of_the_plain_model(answers, flavour):
    """The plain model has the same experts in bf16, which hold their values times their scales."""
    found, plain = answers[identity(flavour)], answers[f"{identity(flavour)}_plain"]
    assert plain["stats"] == {} and found["tokens"] == plain["tokens"]
    config = checkpoints.LLAMA | checkpoints.FAMILIES[flavour[0]]
    routed = sum(checkpoints.has_experts(config, layer) for layer in range(config["num_hidden_layers"]))
    assert counted(found["stats"])["fused_experts"] == routed * STEPS
    assert found["reach"]["layers of experts"] == {"taken": routed, "missed": {}}
