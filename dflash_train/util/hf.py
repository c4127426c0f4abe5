"""The one place that imports transformers; everybody else writes `from dflash_train.util.hf import transformers`.

Without a GPU, transformers would bind flash-linear-attention's Triton kernels at import and crash on the first forward
of models that use them, so `fla` is hidden before the import. Its logging is quieted once, here.
"""

import os
import sys
import warnings

import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # an old driver warns here; util.device says it in one line
    # Not cuda_problem(): that one opens a context on the GPU, which a mere import must not.
    if "transformers" not in sys.modules and not torch.cuda.is_available():
        sys.modules["fla"] = None

import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

__all__ = ["transformers"]
