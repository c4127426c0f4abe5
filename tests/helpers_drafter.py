"""Tiny random drafters, heads and packed batches for the drafter's tests: norm gains 0.5..2, matrices of std 0.15."""

import torch
from omegaconf import OmegaConf

from dflash_train.cli import CONF_DIR
from dflash_train.config import DrafterConfig
from dflash_train.drafter.dflash import DFlashDrafter
from dflash_train.records import DraftBatch, TargetHead

VOCAB, HIDDEN, MASK_ID = 128, 64, 127
FULL, SLIDING = "full_attention", "sliding_attention"


def load_preset(name: str) -> DrafterConfig:
    """conf/drafter/<name>.yaml over the dataclass's own defaults."""
    raw = OmegaConf.load(CONF_DIR / "drafter" / f"{name}.yaml")
    raw.pop("defaults", None)
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DrafterConfig), raw))


def tiny_config(layer_types=(FULL, FULL), window=None, block_size=4, taps=2, **changes) -> DrafterConfig:
    values = {
        "name": "tiny", "num_layers": len(layer_types), "block_size": block_size, "hidden_size": HIDDEN,
        "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "layer_types": list(layer_types),
        "sliding_window": window, "rope_theta": 1e4, "max_position_embeddings": 512, "mask_token_id": MASK_ID,
        "target_layer_ids": list(range(1, 1 + taps)), "num_target_layers": 8, "target_hidden_size": HIDDEN,
        "vocab_size": VOCAB,
    }  # fmt: skip
    config = DrafterConfig(**(values | changes))
    config.check()
    return config


def tiny_drafter(config: DrafterConfig, seed: int = 0, dtype=torch.float32) -> DFlashDrafter:
    generator = torch.Generator().manual_seed(seed)
    model = DFlashDrafter(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or name.endswith("bias"):
                parameter.normal_(0, 0.15, generator=generator)
            else:
                parameter.uniform_(0.5, 2.0, generator=generator)
    return model.to(dtype)


def tiny_head(seed: int = 1, dtype=torch.float32) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    return TargetHead(make(VOCAB, HIDDEN), 0.3 * make(VOCAB, HIDDEN), torch.ones(HIDDEN, dtype=dtype), 0.0, 1e-6)


def packed_batch(rows: list[list[tuple[int, int, int]]], num_tokens: int, *, taps=2, seed=2, dtype=torch.float32):
    """rows: per row, per document (length, first supervised, end of supervised) in it; what is left is padding."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(rows)
    token_ids = torch.randint(0, VOCAB - 2, (num_rows, num_tokens), generator=generator)
    loss_mask = torch.zeros(num_rows, num_tokens, dtype=torch.bool)
    document_ids = torch.full((num_rows, num_tokens), -1)
    position_ids = torch.zeros(num_rows, num_tokens, dtype=torch.long)
    for b, documents in enumerate(rows):
        at = 0
        for d, (length, first, end) in enumerate(documents):
            document_ids[b, at : at + length] = d
            position_ids[b, at : at + length] = torch.arange(length)
            loss_mask[b, at + first : at + end] = True
            at += length
        assert at <= num_tokens
    return DraftBatch(
        token_ids=token_ids, loss_mask=loss_mask, document_ids=document_ids, position_ids=position_ids,
        hidden=torch.randn(num_rows, num_tokens, taps * HIDDEN, generator=generator).to(dtype),
        last_hidden=torch.randn(num_rows, num_tokens, HIDDEN, generator=generator).to(dtype),
        sample_ids=[[f"row{b}-doc{d}" for d in range(len(documents))] for b, documents in enumerate(rows)],
    )  # fmt: skip
