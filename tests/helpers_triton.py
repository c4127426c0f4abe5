"""Compile every Triton kernel of capture and of the drafter's step for a GPU that is not here; say what each one takes.

    python tests/helpers_triton.py 86 first out.json     capability; "first" or "all" of a tuner's configurations, or
                                                         "tune": as a run does, and count what is timed

The path itself runs, on tensors without data: so the kernels, their constants and their alignments are those of a 27B
target, whoever wrote them. Only the launches are left out. A process of its own: fla and transformers ask for the GPU
while they are imported.
"""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
TRITON = ROOT / ".triton"

CARDS = {  # capability: name, bytes of shared memory a block may have, multiprocessors
    86: ("NVIDIA RTX A6000", 101376, 84),
    90: ("NVIDIA H200", 232448, 132),
    120: ("NVIDIA RTX PRO 6000 Blackwell", 101376, 188),
}
BATCH, LENGTH = 8, 2048
TELLING = re.compile(r"\b(?:wgmma|tcgen05|cp\.async\.bulk|cp\.async\.cg|mma\.sync)\b")
"""Instructions that only some cards have, and those that stand in for them elsewhere."""


class Driver:
    """What Triton and fla ask of a driver before a launch."""

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        _, shared, processors = CARDS[capability]
        self.target = GPUTarget("cuda", capability, 32)
        self.properties = {"max_shared_mem": shared, "multiprocessor_count": processors, "max_num_regs": 65536,
                           "warpSize": 32}  # fmt: skip
        self.utils = SimpleNamespace(get_device_properties=lambda device: self.properties)
        self.num_timed = 0

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_benchmarker(self):
        def bench(call, quantiles):
            self.num_timed += 1
            return [1.0] * len(quantiles)

        return bench


def pretend(capability: int) -> Driver:
    """From here on, this process has that GPU."""
    import torch
    from triton.runtime import driver

    driver.set_active(Driver(capability))
    name, shared, processors = CARDS[capability]
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda device=None: name
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name=name, shared_memory_per_block_optin=shared, shared_memory_per_block=49152,
        multi_processor_count=processors, major=capability // 10, minor=capability % 10,
    )  # fmt: skip
    return driver.active


class Recorder:
    """Stands in for launches: compiles, and keeps what came out. every: all configurations of a tuner, else those up to
    the first that fits."""

    def __init__(self, capability: int, every: bool):
        self.limit, self.every, self.path = CARDS[capability][1], every, ""
        self.rows: dict[tuple, dict] = {}  # a kernel is compiled once for all calls that are alike

    def install(self) -> None:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction

        compile_only, recorder = JITFunction.run, self

        def run(kernel, *args, grid, warmup, **kwargs):
            compiled = compile_only(kernel, *args, grid=grid, warmup=True, **kwargs)
            recorder.keep(kernel, compiled, config="", tuned=1)
            return compiled

        def tune(tuner, *args, **kwargs):
            tuner.nargs = dict(zip(tuner.arg_names, args))
            configs = tuner.prune_configs(kwargs)
            for config in configs:
                compiled = compile_only_below(tuner.fn, *args, **kwargs, **config.all_kwargs())
                recorder.keep(tuner.base_fn, compiled, str(config), len(configs))
                if compiled.metadata.shared <= recorder.limit and not recorder.every:
                    return

        def compile_only_below(fn, *args, **kwargs):
            """Through what stands between a tuner and its kernel: heuristics compute constants there."""
            JITFunction.run = compile_only_warm
            try:
                return fn.run(*args, **kwargs)
            finally:
                JITFunction.run = run

        def compile_only_warm(kernel, *args, grid, warmup, **kwargs):
            return compile_only(kernel, *args, grid=grid, warmup=True, **kwargs)

        JITFunction.run, Autotuner.run = run, tune

    def keep(self, kernel, compiled, config: str, tuned: int) -> None:
        row = self.rows.setdefault((kernel.__name__, compiled.hash), {
            "paths": [], "kernel": kernel.__name__, "module": kernel.__module__, "config": config, "tuned": tuned,
            "shared": compiled.metadata.shared, "cubin_bytes": len(compiled.asm["cubin"]),
            "target": re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.M)[1],
            "instructions": sorted(set(TELLING.findall(compiled.asm["ptx"]))),
        })  # fmt: skip
        row["paths"] = sorted({*row["paths"], self.path})


def train_drafter() -> None:
    """Every kernel of the drafter's step (drafter/kernels_triton.py), with the backward: heads of 128, SwiGLU, and a
    chunk of logits without and with a teacher's."""
    import torch

    from dflash_train.drafter.kernels_triton import FUSED

    half = lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    rope = (torch.zeros(1, 1, LENGTH, 128, dtype=torch.bfloat16, device="meta"),) * 2
    FUSED.norm_rope(half(1, LENGTH, 32, 128), half(128), 1e-6, rope).sum().backward()
    FUSED.swiglu(half(1, LENGTH, 17408), half(1, LENGTH, 17408)).sum().backward()
    logits, rows = half(240, 248_320).detach(), torch.zeros(240, device="meta")
    for teacher in (None, torch.empty_like(logits)):
        terms = FUSED.row_terms(logits, rows.long(), teacher)
        FUSED.slope_(logits, rows.long(), rows, terms, teacher)


def passes() -> dict:
    """name -> a pass at a 27B's widths: target/fused.py's over both kinds of layers, the library's recurrent layer, the
    only one with kernels of its own, and the drafter's training step."""
    import torch

    from dflash_train.target.fused import FusedCapture
    from dflash_train.target.fused_kernels import fla_kernels
    from dflash_train.util.hf import transformers

    config = transformers.Qwen3_5TextConfig(
        hidden_size=5120, intermediate_size=17408, num_attention_heads=24, num_key_value_heads=4, head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, vocab_size=1024, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"], dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        token_ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        hidden = torch.zeros(BATCH, LENGTH, config.hidden_size, dtype=torch.bfloat16)
    decoder = model.eval().requires_grad_(False).get_decoder()
    return {
        "fused": lambda: FusedCapture(decoder, fla_kernels())(token_ids, (0,), last_hidden=True),
        "library": torch.inference_mode()(lambda: decoder.layers[0].linear_attn(hidden)),
        "drafter": train_drafter,
    }


def picks_what_fits() -> str:
    """What Triton's own tuner takes when its first configuration asks for more shared memory than the card has."""
    import triton
    from triton.runtime.errors import OutOfResources

    class Kernel:  # as a compiled one refuses to be loaded
        def __init__(self, fn):
            self.fn, self.arg_names = fn, []

        def run(self, *, size, **_):
            if size == "large":
                raise OutOfResources(131072, 101376, "shared memory")

    def kernel():
        """Never compiled."""

    def bench(call, quantiles):
        call()
        return [1.0] * len(quantiles)

    configs = [triton.Config({"size": size}) for size in ("large", "small")]
    tuner = triton.autotune(configs=configs, key=[], do_bench=bench)(Kernel(kernel))
    tuner.run(grid=(1,), warmup=False)
    return tuner.best_config.kwargs["size"]


def tune(driver: Driver) -> int:
    """The fused pass with the tuners as they are; how many configurations were timed (in truth none was run)."""
    from triton.runtime.jit import JITFunction

    compile_only = JITFunction.run
    JITFunction.run = lambda kernel, *args, grid, warmup, **more: compile_only(
        kernel, *args, grid=grid, warmup=True, **more
    )
    passes()["fused"]()
    return driver.num_timed


def main(capability: int, how: str, out: Path) -> None:
    sys.path[:0] = [str(ROOT)]
    if TRITON.is_dir():
        sys.path.append(str(TRITON))
    import triton

    driver = pretend(capability)
    result = {"triton": triton.__version__, "picked": picks_what_fits()}
    if how == "tune":
        result["num_timed"] = tune(driver)
    else:
        recorder = Recorder(capability, how == "all")
        recorder.install()
        for recorder.path, run in passes().items():
            run()
        result["rows"] = list(recorder.rows.values())
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
