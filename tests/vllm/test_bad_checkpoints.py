"""Test that wrong checkpoints are errors when vLLM loads them, before any token, and that the error says what is wrong."""

import json
import pathlib
import re

import checkpoints
import processes
import pytest
import torch
from engines import Engines, identity
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise

from vllm_rocm_ops.vllm.guards import checked_scales

HERE = pathlib.Path(__file__).parent
LAYER = "model.layers.1.mlp.down_proj"
NAN, INFINITE = float("nan"), float("inf")


def changed(name: str, change):
    def edit(tensors: dict) -> None:
        tensors[name] = change(tensors[name])

    return edit


def without(name: str):
    def edit(tensors: dict) -> None:
        del tensors[name]

    return edit


def element(value: float):
    def change(scale: torch.Tensor) -> torch.Tensor:
        scale = scale.clone()
        scale.view(-1)[0] = value
        return scale

    return change


SCALE, INVERSE, INPUT = f"{LAYER}.weight_scale", f"{LAYER}.weight_scale_inv", f"{LAYER}.input_scale"
WANTED = r"must be in the checkpoint, finite and positive, got {} in {} of"
NOT_NAN = f"{SCALE} must be in the checkpoint and not NaN"
SHAPE = "(?i)size|shape|Assertion|element"
MERGED = "model.layers.0.self_attn.k_proj.weight_scale"
OF_E5M2 = changed(f"{LAYER}.weight", lambda w: w.to(torch.float8_e5m2)), f"{LAYER}.weight must be e4m3"
NONE = (lambda tensors: None), "loads"


def bad_element(name: str, value: float, shown: str | None = None) -> tuple:
    """Return the edit that makes a scale's first element bad, and the error's text."""
    return changed(name, element(value)), f"{name if shown is None else shown} {WANTED.format(value, 1)}"


BAD = {
    # what: the quantization, the edit of its tensors, the error's text
    "no scale, per tensor": ("static", without(SCALE), f"{SCALE} {WANTED.format('nothing', 1)}"),
    "no scale, per channel": ("token", without(SCALE), f"{SCALE} {WANTED.format('nothing', 256)}"),
    "no scale in a merged layer": ("token", without(MERGED), f"qkv_proj.weight_scale {WANTED.format('nothing', 128)}"),
    "no scale, per block": ("block", without(INVERSE), f"{INVERSE} {WANTED.format('nothing', 8)}"),
    "no scale, MX-FP8": ("mxfp8", without(SCALE), f"{NOT_NAN}, got nothing in 4096"),
    "no input scale": ("static", without(INPUT), f"{INPUT} {WANTED.format('nothing', 1)}"),
    "NaN": ("token", *bad_element(SCALE, NAN)),
    "NaN in a block": ("block", *bad_element(INVERSE, NAN)),
    "infinite": ("static", *bad_element(SCALE, INFINITE)),
    "negative": ("token", *bad_element(SCALE, -1.0)),
    "zero": ("static", *bad_element(SCALE, 0.0)),
    "zero for a row": ("token", *bad_element(SCALE, 0.0)),
    "zero for a block": ("block", *bad_element(INVERSE, 0.0)),
    "zero for inputs": ("static", *bad_element(INPUT, 0.0)),
    "NaN, MX-FP8": ("mxfp8", changed(SCALE, lambda s: s.clone().fill_(255)), NOT_NAN),
    "a wrong shape, MX-FP8": ("mxfp8", changed(SCALE, lambda s: s[:, :-1]), SHAPE),
    "a wrong shape, per channel": ("token", changed(SCALE, lambda s: s[:-1]), SHAPE),
    "a wrong shape, per block": ("block", changed(INVERSE, lambda s: s[:, :-1]), SHAPE),
    "a wrong shape, per tensor": ("static", changed(SCALE, lambda s: torch.ones(3)), SHAPE),
    **{f"e5m2, {kind}": (kind, *OF_E5M2) for kind in ("block", "static", "token", "mxfp8")},
    **{f"none, {kind}": (kind, *NONE) for kind in ("block", "static", "token", "mxfp8")},
}
EXPERT = "model.layers.1.mlp.experts.3.down_proj"
E5M2_EXPERT = changed(f"{EXPERT}.weight", lambda w: w.to(torch.float8_e5m2)), f"{EXPERT}.weight must be e4m3"
BAD_EXPERTS = {
    "NaN for an expert": bad_element(f"{EXPERT}.weight_scale_inv", NAN, "w2_weight_scale_inv"),
    "zero for an expert": bad_element(f"{EXPERT}.weight_scale_inv", 0.0, "w2_weight_scale_inv"),
    "e5m2 for an expert": E5M2_EXPERT,
    "none of experts": NONE,
}
LOAD = """
import json
from vllm.engine.arg_utils import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_default_torch_dtype

registry._run_in_subprocess = lambda look: look()
load_general_plugins()
found = {{}}
for name, folder in {folders!r}.items():
    config = EngineArgs(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
                        max_model_len=256).create_engine_config()
    with set_current_vllm_config(config):
        if not found:
            store = "file://" + {answers!r} + ".store"
            parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)  # the groups are a model's
        try:
            with set_default_torch_dtype(config.model_config.dtype):
                model = initialize_model(vllm_config=config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
            found[name] = "loads"
        except Exception as error:
            found[name] = type(error).__name__ + ": " + str(error)
with open({answers!r}, "w") as file:
    json.dump(found, file)
"""


def load(folder: pathlib.Path, folders: dict[str, pathlib.Path]) -> dict[str, str]:
    """Return vLLM's error for each checkpoint, all in one process."""
    answers = folder / "answers.json"
    code = LOAD.format(folders={name: str(path) for name, path in folders.items()}, answers=str(answers))
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1"}
    processes.run(code, HERE.parents[1], HERE.parent, HERE, imported=True, TORCHDYNAMO_DISABLE="1", **environment)
    return json.loads(answers.read_text())


def edited(folder: pathlib.Path, model: str, kind: str, edit) -> pathlib.Path:
    """Write a checkpoint with tensors that were changed."""
    checkpoints.build(folder, model, kind)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    folder, edits = tmp_path_factory.mktemp("bad"), {name: ("llama", *of[:2]) for name, of in BAD.items()}
    edits |= {name: ("deepseek", "block", edit) for name, (edit, _) in BAD_EXPERTS.items()}
    folders = {name: edited(folder / str(place), *edits[name]) for place, name in enumerate(edits)}
    return load(folder, folders)


@pytest.mark.slow
@pytest.mark.parametrize("what", [*BAD, *BAD_EXPERTS])
def test_vllm_or_ours_refuses_it(said, what):
    """Weights of experts are checked, too."""
    *_, wanted = (BAD | BAD_EXPERTS)[what]
    assert re.search(wanted, said[what]), said[what]


# Weights that a model in use gets

TENSORS, PATH, IN_PLACE, KERNEL = "as tensors", "as a path", "in place", "in kernel format"
NEW = "Layers that were loaded before it have the new weights"
UPDATES = {
    # the model: what, how, the edit of its tensors, the error's text
    ("llama", "block"): (
        ("NaN", TENSORS, changed(INVERSE, element(NAN)), f"{INVERSE} {WANTED.format('nan', 1)} 8 elements. {NEW}"),
        ("none, by path", PATH, *BAD["no scale, per block"][1:]),
        ("zero", TENSORS, *bad_element(INVERSE, 0.0)),
        ("e5m2", PATH, *OF_E5M2),
        ("right in place", IN_PLACE, lambda tensors: None, "AttributeError"),
    ),
    ("llama", "token"): (
        ("none in a merged layer", TENSORS, *BAD["no scale in a merged layer"][1:]),
        ("negative", TENSORS, *bad_element(SCALE, -1.0)),
    ),
    ("llama", "static"): (
        ("none", TENSORS, *BAD["no scale, per tensor"][1:]),
        ("none of inputs", TENSORS, *BAD["no input scale"][1:]),
        ("infinite", PATH, *bad_element(SCALE, INFINITE)),
    ),
    ("llama", "mxfp8"): (
        ("NaN", TENSORS, *BAD["NaN, MX-FP8"][1:]),
        ("none", TENSORS, without(SCALE), f"{NOT_NAN}, got nothing"),
    ),
    ("deepseek", "block"): tuple((what, TENSORS, *of) for what, of in BAD_EXPERTS.items() if "e5m2" not in what),
}
"""Each update is followed by a right one, after which answers are as before."""


def of_kernels(path: pathlib.Path) -> str:
    """Write a NaN as a scale in the format that kernels use, and return its file."""
    path.mkdir()
    save_file({INVERSE: torch.tensor(NAN)}, path / "model.safetensors")
    return str(path / "model.safetensors")


@pytest.fixture(scope="module")
def updated(tmp_path_factory) -> dict[tuple[str, str], dict]:
    engines = Engines(tmp_path_factory.mktemp("updated"))
    jobs, models = {}, UPDATES
    for model, kind in models:
        right = str(engines.checkpoint((model, kind)) / "model.safetensors")
        then = []
        for place, (_, how, edit, _) in enumerate(UPDATES[model, kind]):
            folder = edited(engines.folder / f"{model}-{kind}-{place}", model, kind, edit)
            then += [[how, str(folder / "model.safetensors")], [TENSORS, right]]
        if kind == "block" and model == "llama":
            then += [[KERNEL, of_kernels(engines.folder / "kernel")], [TENSORS, right]]
        jobs[identity((model, kind))] = engines.job((model, kind), then=then)
    return engines.run(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("flavour", UPDATES, ids=identity)
def test_a_refused_weight_update_leaves_the_model_unchanged(updated, flavour):
    """No update leaves traces: after a right one, the answers are as before."""
    answer = updated[identity(flavour)]
    bad, right = answer["then"][::2], answer["then"][1::2]
    for (what, *_, wanted), said in zip(UPDATES[flavour], bad):
        if wanted == "loads":
            assert said == answer["tokens"], what
        else:
            assert re.search(wanted, str(said)), f"{what}: {said}"
    for said in bad[len(UPDATES[flavour]) :]:
        assert re.search(rf"{INVERSE} must be finite and positive, got nan in 8 of 8 elements", str(said)), said
    assert all(tokens == answer["tokens"] for tokens in right)


@pytest.fixture
def reloaded(monkeypatch):
    """Return a model of one FP8 layer in use, and a function that loads some of its weights again."""

    class Method(QuantizeMethodBase):
        create_weights = apply = None

        def process_weights_after_loading(self, layer):
            pass

    for name in ("materialize_layer", "_layerwise_process"):
        own = getattr(layerwise, name)  # an earlier test may have installed the seam
        monkeypatch.setattr(layerwise, name, getattr(own, "__wrapped__", own))
    checked_scales.check_layers(layerwise)
    model = layer(torch.ones(3, 4), weight_scale=torch.full((1,), 2.0))
    model["it"].quant_method, model["it"].prefix = Method(), "it"
    layerwise.record_metadata_for_reloading(model)

    def reload(**weights: torch.Tensor) -> None:
        layerwise.initialize_layerwise_reload(model)
        for name, value in weights.items():
            weight = getattr(model["it"], name)
            weight.weight_loader(weight, value)
        layerwise.finalize_layerwise_reload(model, None)

    return model, reload


def test_a_layer_in_use_is_checked_before_it_is_replaced(reloaded):
    model, reload = reloaded
    weight = torch.full((3, 4), 5.0).to(torch.float8_e4m3fn)
    for value, got in ((None, "nothing"), (NAN, "nan"), (0.0, "0.0")):
        with pytest.raises(
            ValueError, match=f"it.weight_scale must be .* positive, got {got} in 1 of 1 elements. {NEW}"
        ):
            reload(weight=weight, **({} if value is None else {"weight_scale": torch.tensor([value])}))
        assert model["it"].weight.float().unique() == 1 and model["it"].weight_scale == 2
    reload(weight=weight, weight_scale=torch.tensor([7.0]))
    assert model["it"].weight.float().unique() == 5 and model["it"].weight_scale == 7
    reload()
    assert model["it"].weight.float().unique() == 5, "what gets no weights keeps its own"


def test_a_model_in_use_has_no_bad_scales():
    checked_scales.check_in_use(layer(torch.zeros(3, 4), weight_scale=torch.zeros(3, 1)))
    good = layer(torch.ones(4, 3), weight_scale=torch.tensor([[0.0], [1.0], [2.0]]))  # one of a transposed weight
    checked_scales.check_in_use(good)
    for bad in (NAN, INFINITE, -1.0, 0.0, checked_scales.NOT_LOADED):
        good["it"].weight_scale.data.fill_(bad)
        with pytest.raises(
            ValueError, match=r"it.weight_scale must be finite and positive, got \S+ in 3 of 3 elements"
        ):
            checked_scales.check_in_use(good)
    with pytest.raises(ValueError, match=r"it.weight_scale must not be NaN"):
        checked_scales.check_in_use(layer(torch.ones(3, 32), weight_scale=torch.full((3, 1), 255).to(torch.uint8)))


# What may look bad, and is not


def layer(weight: torch.Tensor, **scales: torch.Tensor) -> torch.nn.Module:
    """Return a model of one layer, with an e4m3 weight."""
    module = torch.nn.Linear(1, 1, bias=False)
    for name, value in {"weight": weight.to(torch.float8_e4m3fn), **scales}.items():
        setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
    return torch.nn.ModuleDict({"it": module})


def test_a_scale_of_zero_is_fine_where_the_weight_is_zero():
    """An expert that was never trained, or a block of padding, has such a scale."""
    weight, scale = torch.ones(200, 300), torch.ones(2, 3)
    weight[128:, 256:], scale[1, 2] = 0, 0
    checked_scales.check(layer(weight, weight_scale_inv=scale))
    weight[199, 299] = -1
    with pytest.raises(ValueError, match=r"it.weight_scale_inv must be .* positive, got 0.0 in 1 of 6 elements"):
        checked_scales.check(layer(weight, weight_scale_inv=scale))


def test_a_merged_layer_of_a_checkpoint_has_one_scale_per_tensor():
    left = torch.tensor([0.5, checked_scales.NOT_LOADED, checked_scales.NOT_LOADED])
    model = layer(torch.ones(3, 4), weight_scale=left, input_scale=left.clone())
    checked_scales.invalidate_scales(model)
    checked_scales.check(model)
    for bad in (left.flip(0), torch.full((3,), checked_scales.NOT_LOADED)):
        with pytest.raises(ValueError, match="it.weight_scale must be in the checkpoint"):
            checked_scales.check(layer(torch.ones(3, 4), weight_scale=bad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_experts_that_only_pad_have_no_scales(dtype, caplog):
    """They keep vLLM's scales. If no expert has one, the checkpoint lacks them."""
    scale = torch.ones(3, 2, 1).to(dtype)
    model = layer(torch.ones(3, 4, 8), weight_scale=scale)
    before = checked_scales.invalidate_scales(model)
    model["it"].weight_scale.data[:2] = 2
    checked_scales.keep_padding(model, before)
    checked_scales.check(model)
    assert model["it"].weight_scale.flatten().tolist() == [2, 2, 2, 2, 1, 1]
    assert "2 of 6 elements of it.weight_scale are not in the checkpoint" in caplog.text
    before = checked_scales.invalidate_scales(model)
    checked_scales.keep_padding(model, before)
    with pytest.raises(ValueError, match="it.weight_scale must be in the checkpoint"):
        checked_scales.check(model)


def test_inputs_of_some_experts_may_never_have_been_seen():
    """The calibration of their scales may not have seen them. vLLM takes the largest."""
    checked_scales.check(layer(torch.ones(3, 4, 8), input_scale=torch.tensor([0.0, 0.5, 0.0])))
    with pytest.raises(ValueError, match="it.input_scale must be .* positive, got 0.0"):
        checked_scales.check(layer(torch.ones(3, 4, 8), input_scale=torch.zeros(3)))


def test_other_layers_are_left_alone():
    """These are layers without an e4m3 weight, such as int8 ones, and weights on no device yet."""
    scale = torch.full((3, 1), float("nan"))
    model = layer(torch.ones(3, 4), weight_scale=scale)
    model["it"].weight = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.int8), requires_grad=False)
    checked_scales.check(model)
    checked_scales.check(layer(torch.ones(3, 4), weight_scale=scale).to("meta"))
