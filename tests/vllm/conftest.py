"""Fixtures for the tests inside vLLM."""

import plain
import pytest
import torch
from engines import Engines, prompts

import vllm_rocm_ops
from vllm_rocm_ops.vllm import register
from vllm_rocm_ops.vllm.selection import kernel_selection


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    """Enter a vLLM configuration, in which layers are made, with no measurements."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path / "tables"))
    kernel_selection.invalidate()
    register()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu")), check_compile=False):
        vllm_rocm_ops.reset_stats()
        yield


@pytest.fixture
def unmeasured(tmp_path, monkeypatch):
    """Begin a process on an MI300X without measurements."""
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    monkeypatch.setattr(kernel_selection, "machine", lambda: {"arch": "gfx942", "gpu": "MI300X", "code": "1"})
    kernel_selection.invalidate()
    yield
    kernel_selection.invalidate()


@pytest.fixture(scope="module")
def schemas():
    """Define the ops that vLLM's passes name and its CPU build lacks."""
    import passes

    library = passes.define_schemas()
    yield
    passes.invalidate_schemas(library)


@pytest.fixture(scope="session")
def engines(tmp_path_factory) -> Engines:
    """Yield the engines, with one folder of checkpoints and caches for all tests."""
    return Engines(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def expected(engines):
    """Return a function for plain.py's logits after each token that an engine generated, given the tokens before it."""
    models = {}

    def logits(flavour: tuple[str, str], tokens: list[list[int]]) -> list[torch.Tensor]:
        if flavour not in models:
            quantized = flavour[0], flavour[1].replace("online", "token")
            models[flavour] = plain.Model(engines.checkpoint(quantized))
        sequences = zip(prompts(flavour), tokens)
        return [models[flavour].logits(p + t[:-1], len(p))[len(p) - 1 :].log_softmax(-1) for p, t in sequences]

    return logits
