"""Groups target and drafter: the two models."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from dflash_train.config.checks import require, require_choice


@dataclass
class TargetShape:
    """Beside TargetConfig's own sizes, what a decoder layer consists of. Only `plan` reads it; null = unknown.

    Layers that are not Gated DeltaNet (linear) are full attention; every layer ends in an MLP, or in experts.
    """

    intermediate_size: int | None = None  # of the dense MLP; 0 where all are experts
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool | None = None  # the head is the embedding
    output_gate: bool = False  # full attention: q_proj also makes a gate
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    num_linear_layers: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    conv_kernel: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0


@dataclass
class TargetConfig:
    """The frozen model. The sizes serve `plan` before anything is downloaded; a loaded model must agree with them."""

    name: str = MISSING
    kind: str = MISSING
    path: str | None = None  # local folder or hub id
    revision: str | None = None
    dtype: str = "bfloat16"  # bfloat16 | float32
    mask_token_id: int | None = None  # a real embedding row that never occurs in text
    chat_template: str | None = None  # path of a Jinja file; null = the tokenizer's own
    template_hash: str | None = None  # what the template must be, as manifests say it; null = any
    trust_remote_code: bool = False
    kernels: str = "auto"  # of capture: fused | library (Hugging Face's own layers) | auto = fused where it can be
    canary: bool = True  # check, whenever it is loaded, that it computes what it should (target/canary.py)
    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_parameters: int | None = None
    max_context: int | None = None
    shape: TargetShape = field(default_factory=TargetShape)
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        require_choice(self.dtype, ("bfloat16", "float32"), "target.dtype")
        require_choice(self.kernels, ("auto", "fused", "library"), "target.kernels")


@dataclass
class DrafterConfig:
    """Shape and semantics of a drafter. null = follow the target (`resolve_drafter`)."""

    name: str = MISSING
    kind: str = "dflash"
    num_layers: int = 5
    block_size: int = 16
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    layer_types: list[str] | None = None  # full_attention | sliding_attention per layer; null = all full
    sliding_window: int | None = None
    is_causal: bool | None = None  # null = per layer: full bidirectional, sliding causal
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    max_position_embeddings: int | None = None
    initializer_range: float = 0.02
    # Facts of the target it is for:
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    vocab_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        require(self.block_size >= 2, "drafter.block_size", got=self.block_size, want=">= 2 (slot 0 is the anchor)")
        require(self.num_layers >= 1, "drafter.num_layers", got=self.num_layers, want=">= 1")
        types = self.layer_types or ["full_attention"] * self.num_layers
        require(len(types) == self.num_layers, "drafter.layer_types", got=f"{len(types)} entries",
                want=f"{self.num_layers}, one per layer")  # fmt: skip
        for kind in types:
            require_choice(kind, ("full_attention", "sliding_attention"), "drafter.layer_types")
        if "sliding_attention" in types:
            require(bool(self.sliding_window), "drafter.sliding_window", got=self.sliding_window,
                    want="a window, since layer_types has sliding_attention")  # fmt: skip
        if self.num_heads and self.num_kv_heads:
            require(self.num_heads % self.num_kv_heads == 0, "drafter.num_heads", got=self.num_heads,
                    want=f"a multiple of drafter.num_kv_heads={self.num_kv_heads}")  # fmt: skip
