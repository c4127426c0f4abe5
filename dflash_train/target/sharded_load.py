"""One rank's share of a target's weights: what it holds of each, read from the files piece by piece, or drawn.

Heads are shared out in order, so a rank's query heads keep their key/value heads, and its value heads (Gated DeltaNet)
their key heads. What makes heads or MLP columns is split by output rows, what takes them by input columns; norms and
the embedding are whole on every rank. The library's own classes are built at the sizes of one rank: nothing in them
knows of the others.

Shapes: W ranks; a fused product [q | k | v] is three blocks of rows, each shared out by its own heads.
"""

import copy
import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dflash_train.records import TargetHead
from dflash_train.target.files import NORM_OFFSETS, weight_files
from dflash_train.target.tiny import draw_
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers

FAMILIES = ("qwen3_5_text", "qwen3", "llama")
# Where a decoder's names begin in the files: image-text checkpoints, plain ones, bare decoders.
PREFIXES = ("model.language_model.", "model.", "language_model.model.", "")

FUSED = ("linear_attn.in_proj_qkv", "linear_attn.conv1d")
ROWS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
        "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a", "linear_attn.A_log",
        "linear_attn.dt_bias", *FUSED)  # fmt: skip
COLUMNS = ("self_attn.o_proj", "linear_attn.out_proj", "mlp.down_proj")
WHOLE = ("embed_tokens", "norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm",
         "linear_attn.norm")  # fmt: skip
LARGE_STD = 0.02  # of random matrices; each layer's output is scaled on top, or depth would amplify every rounding


@dataclass(frozen=True)
class Share:
    """Rank `rank` of the `world` ranks that hold one target together."""

    rank: int
    world: int

    def of(self, start: int, count: int) -> slice:
        """This rank's part of `count` rows that begin at `start`."""
        part = count // self.world
        return slice(start + self.rank * part, start + (self.rank + 1) * part)


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that a rank holds: slices along `dim`, in the order in which they are joined."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    dim: int
    slices: tuple[slice, ...]

    def cut(self, whole) -> Tensor:
        """From a tensor, or from a file's slice, which then reads these bytes alone."""
        parts = [whole[part] if self.dim == 0 else whole[:, part] for part in self.slices]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]


class Weights(Protocol):
    """Where a target's weights come from."""

    def read(self, piece: Piece) -> Tensor:
        """The piece as it is stored, on any device and in any dtype."""


# ---------------------------------------------------------------- what a rank holds


def split_counts(text) -> dict[str, int]:
    """Fields of the text config that are shared out, and their values."""
    names = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        names += ["linear_num_key_heads", "linear_num_value_heads"]
    return {name: getattr(text, name) for name in names}


def check_split(text, world: int) -> None:
    """Raise UserError for a family that has no rule here, and for a number of ranks that does not divide its heads."""
    if text.model_type not in FAMILIES:
        raise UserError("extract.gpus_per_worker", got=f"{world}, for a target of type {text.model_type}",
                        want=f"1, or one of {', '.join(FAMILIES)}", fix="extract.gpus_per_worker=1")  # fmt: skip
    bad = [f"{name}={count}" for name, count in split_counts(text).items() if count % world]
    if bad:
        fits = [n for n in range(1, 9) if not any(count % n for count in split_counts(text).values())]
        raise UserError("extract.gpus_per_worker", got=f"{world}, which does not divide {', '.join(bad)}",
                        want=" | ".join(map(str, fits)))  # fmt: skip


def local_config(text, world: int):
    """A copy of the text config with the sizes of one rank."""
    local = copy.deepcopy(text)
    local.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name, count in split_counts(text).items():
        setattr(local, name, count // world)
    return local


def piece_of(name: str, shape: tuple[int, ...], text, share: Share) -> Piece:
    """What rank `share` holds of the decoder's parameter `name`. Raises UserError for one that has no rule."""
    kind = re.sub(r"^layers\.\d+\.", "", name).removesuffix(".weight")
    if kind in WHOLE:
        return Piece(name, shape, 0, (slice(0, shape[0]),))
    if kind in COLUMNS:
        return Piece(name, shape, 1, (share.of(0, shape[1]),))
    if kind not in ROWS:
        raise UserError("extract.gpus_per_worker", got=f"{share.world}, and the target has a parameter {name}",
                        want="parameters that are known to split", fix="extract.gpus_per_worker=1")  # fmt: skip
    blocks = [shape[0]]
    if kind in FUSED:
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        blocks = [keys, keys, text.linear_num_value_heads * text.linear_value_head_dim]
    assert sum(blocks) == shape[0], f"{name}: {shape[0]} rows, {blocks} by the config"
    starts = itertools.accumulate(blocks[:-1], initial=0)
    return Piece(name, shape, 0, tuple(share.of(start, block) for start, block in zip(starts, blocks)))


# ---------------------------------------------------------------- loading


def meta_decoder(text, dtype: torch.dtype) -> nn.Module:
    """The decoder of a text config, without head and without storage."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(text, dtype=dtype, attn_implementation="sdpa")
    return model.get_decoder()


@torch.no_grad()
def load_share(text, weights: Weights, share: Share, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The decoder of this rank on its device; no other rank's heads are ever in this process.

    Raises UserError naming a parameter that is missing, of another shape, or left without a value.
    """
    check_split(text, share.world)
    shapes = {name: tuple(whole.shape) for name, whole in meta_decoder(text, dtype).named_parameters()}
    decoder = meta_decoder(local_config(text, share.world), dtype)
    for name, parameter in list(decoder.named_parameters()):
        piece = piece_of(name, shapes[name], text, share)
        value = weights.read(piece).to(device, dtype)
        assert value.shape == parameter.shape, f"{name}: {value.shape} was read, {parameter.shape} is held"
        owner, _, leaf = name.rpartition(".")
        setattr(decoder.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    # Its frequencies follow from the config alone and stay float32, whatever the model's dtype.
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)
    empty = [name for name, value in (*decoder.named_parameters(), *decoder.named_buffers()) if value.is_meta]
    if empty:
        raise UserError("loading a target by shares", got=f"no value for {', '.join(empty[:4])}",
                        want="every parameter and buffer", fix="extract.gpus_per_worker=1")  # fmt: skip
    return decoder.eval()


class FileWeights:
    """The safetensors files of a folder, of which only the asked-for slices are read."""

    def __init__(self, folder: Path):
        self.folder, self.files = folder, {}
        for path in weight_files(folder):
            file = safe_open(path, framework="pt")
            self.files |= dict.fromkeys(file.keys(), file)
        found = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in self.files]
        if not found:
            raise self._missing("embed_tokens.weight")
        self.prefix = found[0]

    def read(self, piece: Piece) -> Tensor:
        name = self.prefix + piece.name
        if name not in self.files:
            raise self._missing(name)
        stored = self.files[name].get_slice(name)
        if tuple(stored.get_shape()) != piece.shape:
            raise UserError(f"weights in {self.folder}", got=f"{name} of shape {stored.get_shape()}",
                            want=f"{list(piece.shape)}, as its config says")  # fmt: skip
        return piece.cut(stored)

    def whole(self, name: str) -> Tensor:
        """One tensor by its full name."""
        if name not in self.files:
            raise self._missing(name)
        return self.files[name].get_tensor(name)

    def head(self, text, dtype: torch.dtype) -> TargetHead:
        """Embedding, head and final norm on the CPU; neither is split, and capture needs no head."""
        embedding = self.whole(f"{self.prefix}embed_tokens.weight").to(dtype)
        heads = [name for name in self.files if name.endswith("lm_head.weight")]
        tied = text.tie_word_embeddings
        head = embedding if tied else self.whole(heads[0] if heads else "lm_head.weight").to(dtype)
        norm = self.whole(f"{self.prefix}norm.weight").to(dtype)
        return TargetHead(embedding, head, norm, NORM_OFFSETS[text.model_type], text.rms_norm_eps)

    def _missing(self, name: str) -> UserError:
        return UserError(f"weights in {self.folder}", got=f"no {name}", want="every weight of the model")


class RandomWeights:
    """A seeded random model of any size, for measurements: every parameter is drawn whole on the device, one at a
    time, and cut, so that the ranks of any world hold parts of the same model.

    Norm gains are 0.5..2 and gates remember (tiny.draw_); embeddings have std 1 and each of the N layers adds
    1/sqrt(2N) of that: else 64 random layers amplify one rounding until bfloat16 agrees with nothing.
    """

    def __init__(self, text, seed: int, dtype: torch.dtype, device: torch.device, std: float = LARGE_STD):
        self.text, self.seed, self.dtype, self.device, self.std = text, seed, dtype, device, std
        self.hybrid = NORM_OFFSETS[text.model_type] == 1.0

    def read(self, piece: Piece) -> Tensor:
        whole = torch.empty(piece.shape, dtype=self.dtype, device=self.device)
        name_seed = hashlib.sha256(f"{self.seed} {piece.name}".encode()).digest()[:7]
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(name_seed, "little"))
        draw_(piece.name, whole, self.hybrid, generator, self.std)
        if piece.name == "embed_tokens.weight":
            whole.mul_(1 / self.std)
        elif piece.name.removesuffix(".weight").endswith(COLUMNS):
            whole.normal_(0.0, (2 * self.text.num_hidden_layers * whole.shape[1]) ** -0.5, generator=generator)
        return piece.cut(whole).clone()
