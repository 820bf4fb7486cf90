"""Train a small Llama, DeepSeek V3 and Qwen3-Next on text that ships with Python, with bytes as tokens.

A wrong scale changes the perplexity of a trained model on unseen text, but not of a random model. Training takes some minutes per model on
one core, with the same steps every time, or a minute on a GPU. Checkpoints are stored in the user's cache folder, one per quantization
that the seams support.
"""

import json
import os
import pathlib
import re
import sys
import sysconfig
import time
from collections.abc import Callable

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "vllm"))
import checkpoints

sys.path.pop()
from small_models import Model, among_experts

WINDOW = 256
"""Tokens of a sequence, in training and in evaluation."""
HELD_OUT_EVERY = 8  # files
MAX_OF_ENTROPY = 0.6
"""Maximum loss of a trained model, relative to the entropy of single bytes."""

SHARED = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2}
CONFIGS = {"llama": checkpoints.LLAMA | SHARED, "deepseek": checkpoints.DEEPSEEK | SHARED}
CONFIGS["qwen3-next"] = checkpoints.LLAMA | checkpoints.FAMILIES["qwen3_next"] | SHARED | {"model_type": "qwen3_next"}
CONFIGS["qwen3-next"] |= {"layer_types": ["linear_attention", "full_attention"]}
CONFIGS["qwen3-next"] |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
KINDS = {
    "llama": ("bf16", "static", "dynamic", "token", "bounded", "block", "mxfp8"),
    "deepseek": ("bf16", "static", "dynamic", "token", "block", "mxfp8"),
    "qwen3-next": ("bf16", "dynamic", "block"),
}
"""vLLM has no experts for fbgemm's format, "bounded"."""
STEPS = {"llama": 700, "deepseek": 500, "qwen3-next": 400}
SEQUENCES = 4  # per step
RATES = {
    "llama": (3e-3, 3e-3),
    "deepseek": (1e-3, 6e-3),
    "qwen3-next": (2e-3, 4e-3),
}  # for layers; for the embedding and lm_head
BIAS_RATE = 3e-3  # for a router's bias, per step


# Text


def files(held_out: bool) -> list[pathlib.Path]:
    """Return modules of the standard library; every eighth is held out."""
    modules = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path for place, path in enumerate(modules) if (place % HELD_OUT_EVERY == 0) == held_out]


def text(held_out: bool) -> Tensor:
    """Return the bytes of those files."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files(held_out))), dtype=torch.uint8)


def windows(tokens: int, held_out: Tensor | None = None) -> Tensor:
    """Return held-out sequences [tokens / WINDOW, WINDOW], spread evenly over that text, by default this Python's."""
    held_out, count = text(held_out=True) if held_out is None else held_out, tokens // WINDOW
    starts = torch.linspace(0, len(held_out) - WINDOW, count).long()
    return torch.stack([held_out[start : start + WINDOW] for start in starts]).long()


def entropy(tokens: Tensor) -> float:
    """Return the nats per token for independent tokens."""
    share = torch.bincount(tokens.flatten().long(), minlength=256).double() / tokens.numel()
    return -(share * share.clamp(min=1e-30).log()).sum().item()


# Training


def initial(config: dict, like: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return initial weights: norms 1, biases 0, of DeltaNet's convolution and decays `like`, the rest random."""
    weights, one_plus = {}, "layer_types" in config
    deviations = {"model.embed_tokens.weight": 0.5, "lm_head.weight": 0.02}
    for name, weight in like.items():
        if name.endswith(("norm.weight", "bias")):
            is_one = name.endswith("weight") and (not one_plus or ".linear_attn." in name)
            weights[name] = torch.full(weight.shape, float(is_one))
            continue
        if name.endswith(("conv1d.weight", "A_log", "dt_bias")):
            weights[name] = weight.float()
            continue
        ends = name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        )  # summed into the residual once per layer
        deviation = (
            deviations.get(name, weight.shape[1] ** -0.5) / (2 * config["num_hidden_layers"] if ends else 1) ** 0.5
        )
        weights[name] = torch.randn(weight.shape, generator=generator) * deviation
    if "kv_lora_rank" in config:
        look_back(config, weights, torch.randn(config["hidden_size"], generator=generator).sign())
    return weights


def look_back(config: dict, weights: dict[str, Tensor], constant: Tensor) -> None:
    """Make each head of MLA attend to one of the previous tokens, the first head to the last.

    From random weights learning that takes far longer. A constant part of all tokens becomes queries and keys that only their
    positions rotate.
    """
    heads, nope, rope = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    frequencies = config["rope_theta"] ** -(torch.arange(0, rope, 2) / rope)
    weights["model.embed_tokens.weight"] += 0.5 * constant
    unit = constant / len(constant) * 2**0.5  # gives 1 for a token after the norm
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        weights[f"{prefix}.kv_a_proj_with_mqa.weight"][config["kv_lora_rank"] :: 2] += 1.3 * unit
        weights[f"{prefix}.q_a_proj.weight"][0] = 11 * unit  # 8 after the norm
        queries = weights[f"{prefix}.q_b_proj.weight"].view(heads, nope + rope, -1)
        for head in range(heads):
            angles = frequencies * (head + 1)
            queries[head, nope::2, 0], queries[head, nope + 1 :: 2, 0] = 0.16 * angles.cos(), -0.16 * angles.sin()


MAKE = {"llama": checkpoints.llama_weights, "deepseek": checkpoints.deepseek_weights}


def train(model: str, steps: int, report=lambda step, loss: None) -> dict[str, Tensor]:
    """Return the weights, in bf16, after `steps` steps."""
    config, generator = CONFIGS[model], torch.Generator().manual_seed(0)
    shapes = MAKE.get(model, checkpoints.family_weights)(config)
    device = find_device()
    weights = {name: weight.to(device) for name, weight in initial(config, shapes, generator).items()}
    trained = Model(config, weights)
    parameters = {name: weight.requires_grad_() for name, weight in weights.items() if not name.endswith("bias")}
    outer = {"model.embed_tokens.weight", "lm_head.weight"}
    groups = [
        {"params": [weight for name, weight in parameters.items() if (name in outer) == is_outer], "rate": rate}
        for is_outer, rate in zip((False, True), RATES[model])
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    source = text(held_out=False)
    for step in range(steps):
        for group in optimizer.param_groups:  # linear warm-up over 20 steps, then linear decay
            group["lr"] = group["rate"] * min((step + 1) / 20, (steps - step) / steps)
        starts = torch.randint(len(source) - WINDOW, (SEQUENCES,), generator=generator)
        sequences = torch.stack([source[start : start + WINDOW] for start in starts]).long().to(device)
        with torch.device(device):
            loss = trained.loss(sequences)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        for name, load in trained.loads.items():  # balances experts without a loss, as DeepSeek does
            weights[f"{name}.gate.e_score_correction_bias"] += BIAS_RATE * (load.float().mean() - load).sign()
        report(step, loss.item())
    return {name: weight.detach().to("cpu", shapes[name].dtype) for name, weight in weights.items()}


def find_device() -> str:
    """Return a GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# Evaluation


def log_probabilities(model: str, weights: dict[str, Tensor], sequences: Tensor) -> Tensor:
    """Return the log probability of each token after the first, [sequences, tokens - 1]."""
    device = find_device()
    with torch.no_grad(), torch.device(device):
        here = Model(CONFIGS[model], {name: weight.float().to(device) for name, weight in weights.items()})
        parts = [
            here.logits(part[:, :-1]).log_softmax(-1).gather(2, part[:, 1:, None]).squeeze(2)
            for part in sequences.to(device).split(SEQUENCES)
        ]
    return torch.cat(parts).cpu()


def largest_inputs(model: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the maximum input magnitude of each linear layer, over training text."""
    trained = Model(CONFIGS[model], {name: weight.float() for name, weight in weights.items()})
    trained.largest = {}
    source = text(held_out=False)
    with torch.no_grad():
        for start in torch.linspace(0, len(source) - WINDOW, 32).long():
            trained.logits(source[None, start : start + WINDOW].long())
    return trained.largest


SCALED = ("q_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "down_proj", "in_proj_qkvz", "out_proj")
"""A wrong scale of another linear layer has the effect of one of these: k_proj's of q_proj's, v_proj's of o_proj's and up_proj's of
down_proj's; kv_b_proj's of several. q_a_proj's has none, as a norm follows."""


def scaled_layers(weights: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return the weights with independent scales, by layer. All routed experts of a layer are one."""
    layers: dict[str, list[str]] = {}
    for name in weights:
        layer = re.sub(r"model\.layers\.|self_attn\.|mlp\.|\.weight", "", among_experts(name))
        if layer.endswith(SCALED):
            layers.setdefault(layer, []).append(name)
    return layers


def with_scale_error(weights: dict[str, Tensor], names: list[str], error: float) -> dict[str, Tensor]:
    """Return the weights with an error in the scale of some."""
    return weights | {name: weights[name].float() * (1 + error) for name in names}


def effects_of_scales(model: str, weights: dict[str, Tensor], sequences: Tensor) -> dict[str, Tensor]:
    """Return by layer the linearized change of each token's log probability for a relative scale error of 1."""
    exact, error = log_probabilities(model, weights, sequences), 0.02
    return {
        layer: (log_probabilities(model, with_scale_error(weights, names, error), sequences) - exact) / error
        for layer, names in scaled_layers(weights).items()
    }


# Checkpoints


def cache() -> pathlib.Path:
    """Return the checkpoint folder."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "vllm-rocm-ops" / "trained"


def held_out(folder: pathlib.Path) -> Tensor:
    """Return the held-out text of a folder's checkpoints."""
    return cached(folder / "held-out.safetensors", lambda: {"text": text(held_out=True)})["text"]


def trained_weights(model: str, folder: pathlib.Path, say=print) -> dict[str, Tensor]:
    """Return a trained model's cached weights."""
    return cached(folder / f"{model}.safetensors", lambda: train_until_good(model, say))


def cached(path: pathlib.Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a file, which is created if missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(make(), path)
    return load_file(path)


def train_until_good(model: str, say) -> dict[str, Tensor]:
    """Return the weights of a model with a sufficient loss. Raises RuntimeError."""
    threads, start = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(1)
    try:
        weights = train(model, STEPS[model], lambda step, loss: step % 50 or say(f"{model}: {step}, loss {loss:.3f}"))
    finally:
        torch.set_num_threads(threads)
    loss = -log_probabilities(model, weights, windows(8192)).mean().item()
    most = MAX_OF_ENTROPY * entropy(text(held_out=True))
    say(f"{model}: held-out loss {loss:.3f}, at most {most:.3f}; {time.process_time() - start:.0f} s CPU time")
    if loss > most:
        raise RuntimeError(f"{model} must have a loss of at most {most:.3f} on held-out text, got {loss:.3f}")
    return weights


def quantized(weights: dict[str, Tensor], kind: str, largest: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's quantized tensors, with static scales for these largest inputs."""
    if kind not in ("static", "dynamic", "block"):
        return checkpoints.quantize(weights, kind)
    tensors = dict(weights)
    for name in [name for name in weights if "_proj" in name and not re.search(checkpoints.GATES, name)]:
        weight, layer = weights[name].float(), name.removesuffix(".weight")
        if kind == "block":
            tensors[name], tensors[f"{name}_scale_inv"] = checkpoints.quantize_blocks(weight)
            continue
        tensors[f"{name}_scale"] = scale = weight.abs().amax() / checkpoints.LIMIT
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        if kind == "static":
            tensors[f"{layer}.input_scale"] = largest[among_experts(layer)] / checkpoints.LIMIT
    return tensors


QUANTIZATION = checkpoints.QUANTIZATION | {
    "dynamic": checkpoints.QUANTIZATION["static"] | {"activation_scheme": "dynamic"},
    "bounded": checkpoints.QUANTIZATION["bounded"] | {"activation_scale_ub": 1200.0},
}


def checkpoint(model: str, kind: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the folder of a quantized checkpoint, written if missing."""
    path = folder / f"{model}-{kind}"
    held_out(folder)
    if not (path / "config.json").exists():
        weights = trained_weights(model, folder)
        largest = largest_inputs(model, weights) if kind == "static" else {}
        write(path, model, kind, quantized(weights, kind, largest))
    return path


def write(path: pathlib.Path, model: str, kind: str, tensors: dict[str, Tensor]) -> None:
    """Write a checkpoint of these tensors, its config.json last."""
    path.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", {"format": "pt"})
    quantization = checkpoints.quantization(QUANTIZATION[kind], CONFIGS[model], tensors)
    config = CONFIGS[model] | ({"quantization_config": quantization} if quantization else {})
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (path / "config.json").write_text(json.dumps(config, indent=1))
