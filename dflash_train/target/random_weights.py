"""A model of any size with random weights, drawn on the device: for measurements, nothing to download.

The family is Qwen3.5's (Gated DeltaNet with full attention every fourth layer); sizes are the config's own, those that
`plan` reads. Rates, bytes and rounding are those of a real model of that size, its text is noise. The weights are those
of sharded_load.RandomWeights, so a target that is split over GPUs (start_group, random_seed) is the same model.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from dflash_train.config import HardwareConfig, TargetConfig
from dflash_train.target import fused
from dflash_train.target.base import TargetSpec, WeightsStatus
from dflash_train.target.files import TargetFiles, load_tokenizer
from dflash_train.target.hf import HFTarget
from dflash_train.target.sharded_load import LARGE_STD, Piece, RandomWeights, Share, load_share
from dflash_train.target.tiny import SPECIALS, tiny_tokenizer
from dflash_train.util.device import pick_device
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers
from dflash_train.util.io import atomic_folder, cache_dir
from dflash_train.util.provenance import digest


@dataclass
class Options:
    """std: of the matrices."""

    seed: int = 0
    std: float = LARGE_STD


def weights(config: TargetConfig) -> WeightsStatus:
    """Always: they are made, not read."""
    return WeightsStatus(True, "random weights, drawn on the device")


def prepare(config: TargetConfig) -> TargetFiles:
    """Config and the tiny target's tokenizer in a folder of the cache. There are no weights in it."""
    text, options = text_config(config), Options(**config.options)
    identity = digest([text.to_diff_dict(), asdict(options), config.dtype])
    folder = cache_dir("targets", f"random-{identity}")
    if not folder.is_dir():
        with atomic_folder(folder) as temporary:
            text.save_pretrained(temporary)
            tiny_tokenizer().save_pretrained(temporary)
    return describe(text, folder, load_tokenizer(folder, config), config.name, identity)


def describe(text, folder: Path, tokenizer, name: str, fingerprint: str) -> TargetFiles:
    """What a target of this text config is to those who plan and render."""
    spec = TargetSpec(name, text.num_hidden_layers, text.hidden_size, text.vocab_size, text.vocab_size,
                      (text.eos_token_id,), fingerprint)  # fmt: skip
    return TargetFiles(folder, text, tokenizer, spec, has_weights=False)


def load(config: TargetConfig, hardware: HardwareConfig) -> HFTarget:
    """Draw the weights. Raises UserError for sizes that are not there."""
    device = pick_device(hardware.device, hardware.num_threads)
    return draw(prepare(config), Options(**config.options), getattr(torch, config.dtype), device, config.kernels)


@torch.no_grad()
def draw(files: TargetFiles, options: Options, dtype: torch.dtype, device: torch.device, kernels: str) -> HFTarget:
    """The target of these files, one parameter after the other: no copy of the model is ever beside it."""
    text = files.hf_config
    source = RandomWeights(text, options.seed, dtype, device, options.std)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(text, dtype=dtype, attn_implementation="sdpa")
    decoder = load_share(text, source, Share(0, 1), dtype, device)
    setattr(model, model.base_model_prefix, decoder)  # set_decoder would put it one level too deep
    model.config = decoder.config  # the layers' own: what is set on one must be seen by the other
    head = decoder.embed_tokens.weight
    if not text.tie_word_embeddings:
        whole = Piece("lm_head.weight", tuple(head.shape), 0, (slice(None),))
        head = nn.Parameter(source.read(whole), requires_grad=False)
    model.get_output_embeddings().weight = head
    return HFTarget(files, model.eval(), device, fused.choose(kernels, model, device))


def text_config(config: TargetConfig):
    """The transformers config of a target's sizes. Raises UserError naming those that are missing."""
    shape = config.shape
    sizes = {
        "target.num_layers": config.num_layers, "target.hidden_size": config.hidden_size,
        "target.vocab_size": config.vocab_size, "target.max_context": config.max_context,
        "target.shape.intermediate_size": shape.intermediate_size, "target.shape.num_heads": shape.num_heads,
        "target.shape.num_kv_heads": shape.num_kv_heads, "target.shape.head_dim": shape.head_dim,
        "target.shape.linear_key_heads": shape.linear_key_heads, "target.shape.conv_kernel": shape.conv_kernel,
    }  # fmt: skip
    missing = [name for name, value in sizes.items() if not value]
    if missing:
        raise UserError(", ".join(missing), got="no size", want="the sizes of the model to draw",
                        fix="target=random_27b, which has all of them")  # fmt: skip
    text = transformers.Qwen3_5TextConfig(
        hidden_size=config.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=config.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        linear_num_key_heads=shape.linear_key_heads, linear_num_value_heads=shape.linear_value_heads,
        linear_key_head_dim=shape.linear_key_dim, linear_value_head_dim=shape.linear_value_dim,
        linear_conv_kernel_dim=shape.conv_kernel, vocab_size=config.vocab_size, rms_norm_eps=1e-6,
        tie_word_embeddings=bool(shape.tied), max_position_embeddings=config.max_context,
        eos_token_id=SPECIALS.index("<|im_end|>"), pad_token_id=SPECIALS.index("<|endoftext|>"),
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    linear = text.layer_types.count("linear_attention")
    if linear != shape.num_linear_layers:
        raise UserError("target.shape.num_linear_layers", got=shape.num_linear_layers,
                        want=f"{linear}: of {config.num_layers} layers every fourth is full attention")  # fmt: skip
    return text
