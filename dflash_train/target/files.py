"""A target's files before its weights are loaded: where they are, whether this version can run them, who they are."""

import hashlib
import json
import math
import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from safetensors import safe_open

from dflash_train.config import TargetConfig
from dflash_train.target.base import TargetSpec, WeightsStatus
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers
from dflash_train.util.provenance import canonical_json, template_hash

# model_type of the text config -> offset of its RMSNorm gain: 0.0 for x*w, 1.0 for x*(1+w).
NORM_OFFSETS = {"llama": 0.0, "mistral": 0.0, "qwen2": 0.0, "qwen3": 0.0, "qwen3_moe": 0.0,
                "qwen3_5_text": 1.0, "qwen3_5_moe_text": 1.0, "qwen3_next": 1.0}  # fmt: skip
# Those whose linear-attention layers are the Gated DeltaNet that target/qwen3_5.py drives.
GATED_DELTANETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
FILE_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
SAMPLE_BYTES, NUM_SAMPLES = 65536, 16


@dataclass(frozen=True)
class TargetFiles:
    """A target on disk, described without loading its weights: enough to plan, render and compare fingerprints.

    has_weights False: they are drawn, not read, and the folder has none."""

    folder: Path
    hf_config: object
    tokenizer: object
    spec: TargetSpec
    has_weights: bool = True


def prepare(config: TargetConfig) -> TargetFiles:
    """Fetch what is not on disk, refuse what cannot run, and describe it. Loads no weights."""
    hf_config = read_config(config)
    refuse_unsupported(hf_config, config.name)
    check_sizes(config, hf_config)
    folder = fetch_folder(config)
    tokenizer = load_tokenizer(folder, config)
    text = hf_config.get_text_config()
    spec = TargetSpec(
        name=config.name,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        embedding_rows=embedding_row(folder, 0)[1],
        stop_ids=stop_ids(folder, hf_config, tokenizer),
        fingerprint=fingerprint(folder),
    )
    return TargetFiles(folder, hf_config, tokenizer, spec)


def check_sizes(config: TargetConfig, hf_config) -> None:
    """The sizes `plan` was told must be the model's."""
    text = hf_config.get_text_config()
    actual = {"num_layers": text.num_hidden_layers, "hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
    for name, value in actual.items():
        told = vars(config)[name]
        if told is not None and told != value:
            raise UserError(f"target.{name}", got=told, want=f"{value}, as in the model's config",
                            fix=f"target.{name}=null")  # fmt: skip


def is_local(path: str) -> bool:
    """A folder, or something that can only be meant as one."""
    return os.path.isdir(path) or path.startswith((".", "/", "~")) or path.count("/") > 1


def read_config(config: TargetConfig):
    """The Hugging Face config (from the hub: this one file). Raises UserError when it is missing or unknown."""
    if not config.path:
        raise UserError("target.path", got=config.path, want="a folder or a hub id", fix="target.path=Qwen/Qwen3-4B")
    path = os.path.expanduser(config.path)
    if is_local(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise UserError("target.path", got=path, want="a folder with config.json and *.safetensors")
    try:
        return transformers.AutoConfig.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code,
            local_files_only=hub_unreachable(),
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise UserError("target.path", got=f"{config.path}: {str(error).splitlines()[0]}",
                        want="a causal language model", fix=hub_advice(str(error))) from None  # fmt: skip


@cache
def hub_unreachable() -> bool:
    """Whether the hub is off or away, found out in seconds; its own client would retry for most of a minute, aloud."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    if getproxies():
        return False  # only the client knows the way
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=5).close()
    except OSError:
        return True
    return False


def hub_advice(message: str) -> str:
    """What to do about a hub error."""
    if "gated" in message.lower() or "401" in message or "403" in message:
        return "accept the model's licence on its page and export HF_TOKEN=<your token>"
    if "trust_remote_code" in message:
        return "target.trust_remote_code=true runs code from the model's repository; only if you trust it"
    return "check the name and the network, or download it yourself and give target.path=<folder>"


def refuse_unsupported(hf_config, name: str) -> None:
    """Raise UserError, by name, for models this version cannot run exactly."""
    text = hf_config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    refuse = lambda got, want: UserError(f"target {name}", got=got, want=want)
    full = "a model whose layers are full attention, or Gated DeltaNet of " + ", ".join(GATED_DELTANETS)
    known = {"full_attention"} | ({"linear_attention"} if text.model_type in GATED_DELTANETS else set())
    if layer_types - known:
        raise refuse(f"{text.model_type} with {', '.join(sorted(layer_types - known))} layers", full)
    if "full_attention" not in layer_types:
        raise refuse(f"{text.model_type} without a full-attention layer", full)
    if text.model_type not in NORM_OFFSETS:
        raise refuse(f"model type {text.model_type}", " | ".join(NORM_OFFSETS))
    windowed = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    if windowed:
        raise refuse(f"{text.model_type} with sliding_window={text.sliding_window}", full)
    quantized = getattr(hf_config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if quantized:
        method = quantized["quant_method"] if isinstance(quantized, dict) else quantized.quant_method
        raise refuse(f"weights quantized with {method}", "the checkpoint in bfloat16: its rows are what is captured")
    rope_type = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise refuse(f"rope_type={rope_type}: its frequencies change while the text grows",
                     "default | linear | yarn | llama3")  # fmt: skip


def fetch_folder(config: TargetConfig) -> Path:
    """Local folder with every file of the target; hub ids are downloaded into the hub's own cache."""
    path = os.path.expanduser(config.path)
    if is_local(path):
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=FILE_PATTERNS,
                                      local_files_only=hub_unreachable()))  # fmt: skip
    except (OSError, ValueError) as error:
        raise UserError("target.path", got=f"{config.path}: {str(error).splitlines()[0]}",
                        want="a model one can download", fix=hub_advice(str(error))) from None  # fmt: skip


def weight_files(folder: Path) -> list[Path]:
    """*.safetensors sorted by name. Raises UserError when there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError("target.path", got=f"{folder} has no *.safetensors", want="safetensors (pickles are not read)")
    return files


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of all weights once they are loaded in `dtype`, from the files' headers."""
    size = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype]
    total = 0
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as f:
            total += size * sum(math.prod(f.get_slice(name).get_shape()) for name in f.keys())  # noqa: SIM118
    return total


def weights_status(config: TargetConfig) -> WeightsStatus:
    """Are the weights here, or can they be downloaded? Loads and downloads none."""
    try:
        refuse_unsupported(read_config(config), config.name)
        if is_local(os.path.expanduser(config.path)):
            num_bytes = sum(f.stat().st_size for f in weight_files(fetch_folder(config)))
            return WeightsStatus(True, f"{config.path}, {num_bytes / 1e9:.2f} GB", num_bytes=num_bytes)
    except UserError as error:
        return WeightsStatus(False, f"{error.got}", error.fix or f"want: {error.want}")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            config.path, revision=config.revision, allow_patterns=FILE_PATTERNS, local_files_only=True
        )
        num_bytes = sum(f.stat().st_size for f in weight_files(Path(folder)))
        return WeightsStatus(True, f"{config.path}, in the hub's cache", num_bytes=num_bytes)
    except (LocalEntryNotFoundError, OSError, UserError):
        pass
    try:
        info = HfApi().model_info(config.path, revision=config.revision, files_metadata=True, timeout=20)
    except (HfHubHTTPError, OSError) as error:
        return WeightsStatus(False, f"{config.path}: {str(error).splitlines()[0]}", hub_advice(str(error)))
    num_bytes = sum(f.size or 0 for f in info.siblings if f.rfilename.endswith(".safetensors"))
    return WeightsStatus(True, f"{config.path}, {num_bytes / 1e9:.2f} GB to download", "", num_bytes, num_bytes)


def fingerprint(folder: Path) -> str:
    """Hex sha256 that names these very weights without reading all of them: the canonical config.json and, for every
    safetensors file by name, its size, its JSON header and 64 KB at 16 even positions."""
    total = hashlib.sha256()
    hf_config = json.loads((folder / "config.json").read_text("utf-8"))
    for name in ("_name_or_path", "_model_name_or_path", "transformers_version"):
        hf_config.pop(name, None)  # where it came from and who wrote the file is not who it is
    total.update(canonical_json(hf_config).encode("utf-8"))
    for path in weight_files(folder):
        size = path.stat().st_size
        total.update(f"{path.name}|{size}|".encode())
        with open(path, "rb") as f:
            header_bytes = int.from_bytes(f.read(8), "little")
            total.update(f.read(min(header_bytes, size)))
            for i in range(NUM_SAMPLES):
                f.seek(8 + header_bytes + max(0, size - 8 - header_bytes - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                total.update(f.read(SAMPLE_BYTES))
    return total.hexdigest()


def load_tokenizer(folder: Path, config: TargetConfig):
    """The target's tokenizer, with the chat template of `target.chat_template` when that is given."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    if config.chat_template:
        path = Path(os.path.expanduser(config.chat_template))
        if not path.is_file():
            raise UserError("target.chat_template", got=str(path), want="the path of a Jinja file")
        tokenizer.chat_template = path.read_text("utf-8")
    if not tokenizer.chat_template:
        raise UserError("target.chat_template", got=f"{config.name} ships no chat template",
                        want="a model with one, or the path of a Jinja file")  # fmt: skip
    found = template_hash(tokenizer)
    if config.template_hash not in (None, found):
        raise UserError("target.template_hash", got=f"{config.template_hash}, but the chat template here is {found}",
                        want="the template that the data was made with",
                        fix="restore it (target.chat_template=<its file>); or, to start anew with this one, "
                        f"target.template_hash={found}")  # fmt: skip
    return tokenizer


def stop_ids(folder: Path, hf_config, tokenizer) -> tuple[int, ...]:
    """Every id at which an answer ends: the tokenizer's, the config's and the generation config's eos."""
    found = {tokenizer.eos_token_id, *_as_list(hf_config.get_text_config().eos_token_id)}
    path = folder / "generation_config.json"
    if path.is_file():
        found.update(_as_list(json.loads(path.read_text("utf-8")).get("eos_token_id")))
    found.discard(None)
    if not found:
        raise UserError("target.path", got="no eos token in tokenizer, config or generation_config", want="one")
    return tuple(sorted(found))


def _as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def embedding_row(folder: Path, token_id: int):
    """(row [H] or None beyond the last one, number of rows), read without loading the model."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as f:
            names = [name for name in f.keys() if name.endswith("embed_tokens.weight")]  # noqa: SIM118
            if names:
                table = f.get_slice(names[0])
                rows = table.get_shape()[0]
                return (table[token_id] if 0 <= token_id < rows else None), rows
    raise UserError("target.path", got=f"no embed_tokens.weight in {folder}", want="a causal language model's weights")
