"""What all tests share: no tuned tables but the shipped ones."""

import os

os.environ["VLLM_ROCM_OPS_TABLES"] = os.devnull
