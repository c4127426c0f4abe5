"""Which device this process computes on, decided once and said in one line when it is not the wished one."""

import os
import platform
import warnings

import torch

from dflash_train.util.errors import UserError


def cuda_problem() -> str | None:
    """None where torch can compute on a GPU, else one line that says why not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        if torch.version.cuda is None:
            return "this torch is a CPU build"
        reason = str(caught[0].message).splitlines()[0] if caught else "no GPU found"
        return f"torch {torch.__version__} cannot use a GPU here: {reason}"
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except (RuntimeError, AssertionError) as error:
        return f"the GPU's driver cannot run torch {torch.__version__}: {str(error).splitlines()[0]}"
    return None


def pick_device(device: str, num_threads: int | None = None) -> torch.device:
    """'auto' | 'cpu' | 'cuda' -> device of this process; LOCAL_RANK picks the GPU.

    Raises UserError for a 'cuda' that cannot be used.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    if device == "cpu":
        return torch.device("cpu")
    problem = cuda_problem()
    if problem is None:
        # cuDNN's attention plans every new shape anew; while decoding, every round is a new shape. A tiny model decoded
        # 18 tokens/s in bfloat16, where cuDNN is chosen, and 250 in float32, where it is not.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device == "cuda":
        raise UserError("hardware.device", got=f"cuda, but {problem}", want="a usable GPU", fix="hardware=cpu")
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """'NVIDIA H200', or 'CPU x86_64, 2 of 8 threads': what a measurement was made on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions to multiply bfloat16 matrices. Without them torch is several times slower in
    bfloat16 than in float32 (66 x 576 x 1536 on one AVX2-only EPYC core: 6 against 39 GFLOP/s)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
