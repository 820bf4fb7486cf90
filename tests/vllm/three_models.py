"""Run three tiny models in the CPU engine of the installed vLLM, by the installed package: `python three_models.py`, without pytest.

bare_root.sh runs it on a copy of tests/ alone, so that no module of the checkout takes a wheel's place.
"""

import os
import pathlib
import tempfile

os.environ |= {"VLLM_ROCM_OPS_ON_CPU": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

import engines

import vllm_rocm_ops

MODELS = ("llama", "static"), ("llama", "token"), ("qwen3_moe", "mixed")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = engines.Engines(pathlib.Path(folder))
        answers = made.run({engines.identity(one): made.job(one) for one in MODELS})
    print(vllm_rocm_ops.__file__)
    for one in MODELS:
        answer = answers[engines.identity(one)]
        counts = engines.counted(answer["stats"])
        missed = {kind: layers["missed"] for kind, layers in answer["reach"].items() if layers["missed"]}
        print(*one, counts, f"vLLM's own: {missed}" if missed else "")
        op = "scaled_mm" if one[0] == "llama" else "fused_experts"
        if not counts.get(op) or [len(tokens) for tokens in answer["tokens"]] != [engines.STEPS] * len(
            answer["tokens"]
        ):
            raise SystemExit(f"{one} did not run {op}")
