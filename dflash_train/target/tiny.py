"""A random model with a character tokenizer, made in a second: for tests, and to try every stage without a download.

Weights have std 0.15 and norm gains are drawn from 0.5..2, since fresh norms and std-0.02 weights hide mistakes.
Hybrids have three Gated DeltaNet layers and a full-attention one, and two value heads to a key head.
"""

import math
import string
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dflash_train.config import HardwareConfig, TargetConfig
from dflash_train.target import hf
from dflash_train.target.base import WeightsStatus
from dflash_train.target.files import TargetFiles
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers
from dflash_train.util.io import atomic_folder, cache_dir
from dflash_train.util.provenance import digest

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
MASK_TOKEN, MASK_TOKEN_ID = "<|mask|>", 127
CONFIGS = {
    "qwen3": "Qwen3Config",
    "llama": "LlamaConfig",
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
    "qwen3_next": "Qwen3NextConfig",
}
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
MIXTURES = ("qwen3_5_moe", "qwen3_next")
CHARACTERS = [*sorted(set(string.printable) - set("\t\r\x0b\x0c"))]
NEVER_SAID = {0, 1, *range(len(SPECIALS) + len(CHARACTERS), MASK_TOKEN_ID + 1)}  # all specials but <|im_end|>

# ChatML as Qwen3 writes it, with its two habits: earlier reasoning is dropped, and thinking "off" adds an empty block.
CHAT_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}
{{- '# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\nresult: ' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- if loop.last %}{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ' ' }}{{ call.function.arguments | tojson }}{{ '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}
""".strip()


@dataclass
class Options:
    """Shape of the random model."""

    arch: str = "qwen3"  # a key of CONFIGS
    num_layers: int | None = None  # null: 4 for hybrids, 3 for the others
    hidden: int = 64
    heads: int = 4
    kv: int = 2
    head_dim: int = 16
    vocab: int = 128
    seed: int = 0
    tied: bool = True


def tiny_tokenizer():
    """One token a character: ids 0..6 specials and markers, 7.. characters, unused up to 126, 127 the mask."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = SPECIALS + CHARACTERS
    tokens += [f"<|unused{i}|>" for i in range(len(tokens), MASK_TOKEN_ID)] + [MASK_TOKEN]
    assert len(tokens) == MASK_TOKEN_ID + 1
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unused126|>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    plain = {"<think>", "</think>", "<tool_call>", "</tool_call>"}  # as in Qwen3: added, not special
    for token in tokens:
        if len(token) > 1:
            add = backend.add_tokens if token in plain else backend.add_special_tokens
            add([AddedToken(token, special=token not in plain, normalized=False)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(options: Options):
    """The transformers config of these options. Raises UserError for an unknown arch."""
    if options.arch not in CONFIGS:
        raise UserError("target.options.arch", got=options.arch, want=" | ".join(CONFIGS))
    hybrid = options.arch in HYBRIDS
    sizes = {}
    if hybrid:
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                  "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}  # fmt: skip
    if options.arch in MIXTURES:
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": options.hidden // 2,
                  "shared_expert_intermediate_size": options.hidden // 2}  # fmt: skip
    if options.arch != "qwen3_5_moe":
        sizes["intermediate_size"] = 2 * options.hidden
    return getattr(transformers, CONFIGS[options.arch])(
        num_hidden_layers=options.num_layers or (4 if hybrid else 3), hidden_size=options.hidden,
        num_attention_heads=options.heads, num_key_value_heads=options.kv, head_dim=options.head_dim,
        vocab_size=options.vocab, max_position_embeddings=4096, tie_word_embeddings=options.tied,
        bos_token_id=None, eos_token_id=SPECIALS.index("<|im_end|>"), pad_token_id=SPECIALS.index("<|endoftext|>"),
        **sizes,
    )  # fmt: skip


def tiny_model(options: Options):
    """Seeded random weights in float32."""
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(options), dtype=torch.float32)
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            draw_(name, parameter, options.arch in HYBRIDS, generator)
        # Else a third of what a random model says would be control tokens: their rows are real, and seldom chosen.
        rows = [i for i in range(options.vocab) if i in NEVER_SAID or i > MASK_TOKEN_ID]
        for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            table[rows] *= 0.1
    return model


def draw_(name: str, parameter: torch.Tensor, hybrid: bool, generator: torch.Generator, std: float = 0.15) -> None:
    """Fill one parameter by the law of its kind; `std` is that of the matrices."""
    if name.endswith("A_log"):
        # The range a fresh Gated DeltaNet has, but evenly in log: else nearly every head forgets within a token.
        parameter.uniform_(math.log(0.01), math.log(16), generator=generator)
    elif name.endswith("dt_bias"):
        parameter.fill_(1.0)
    elif name.endswith("conv1d.weight"):
        parameter.normal_(0.0, 0.5, generator=generator)  # four taps a channel: smaller ones would fade the layer out
    elif parameter.dim() == 1 and "norm" in name:
        # Hybrids multiply by 1 + w, save for the gated norm inside a Gated DeltaNet, which multiplies by w.
        offset = 1.0 if hybrid and not name.endswith("linear_attn.norm.weight") else 0.0
        parameter.uniform_(0.5 - offset, 2.0 - offset, generator=generator)
    else:
        parameter.normal_(0.0, std, generator=generator)


def save_tiny(folder: str | Path, options: Options | None = None) -> Path:
    """Write model and tokenizer as an ordinary Hugging Face folder (`target=hf target.path=<folder>` loads it too)."""
    with atomic_folder(folder) as temporary:
        tiny_model(options or Options()).save_pretrained(temporary)
        tiny_tokenizer().save_pretrained(temporary)
    return Path(folder)


def tiny_folder(options: Options) -> Path:
    """The folder of these options in the cache, written on first use. The name covers all the tokenizer's text, too."""
    name = digest([asdict(options), CHAT_TEMPLATE, SPECIALS, CHARACTERS, "3"])
    folder = cache_dir("targets", f"tiny-{name}")
    return folder if folder.is_dir() else save_tiny(folder, options)


def local_config(config: TargetConfig) -> TargetConfig:
    """The same target as a folder of kind hf."""
    folder = tiny_folder(Options(**config.options))
    return TargetConfig(**{**vars(config), "kind": "hf", "path": str(folder), "options": {}})


def weights(config: TargetConfig) -> WeightsStatus:
    return WeightsStatus(True, "random weights, made on the spot")


def prepare(config: TargetConfig) -> TargetFiles:
    return hf.prepare(local_config(config))


def load(config: TargetConfig, hardware: HardwareConfig) -> "hf.HFTarget":
    return hf.load(local_config(config), hardware)


def make_tiny_target(arch: str = "qwen3", dtype: torch.dtype = torch.float32, device: str = "cpu",
                     **options) -> "hf.HFTarget":  # fmt: skip
    """A tiny target for tests; options as in `Options`."""
    config = TargetConfig(name="tiny", kind="tiny", dtype=str(dtype).removeprefix("torch."),
                          mask_token_id=MASK_TOKEN_ID, options={"arch": arch, **options})  # fmt: skip
    return load(config, HardwareConfig(device=device))
