"""Twins for targets with recurrent layers, trees of every shape, and checkpoints as large models ship them.

The naive twin decodes one path token by token through the library's own forward and its own cache; the brute twin is a
fresh forward of the whole text. Neither knows what a tree is.
"""

import copy
import inspect
import random
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
from helpers_target import FIRST_TEXT_ID, path_to, tiny

from dflash_train.records import FeatureSpec, Tree
from dflash_train.target import tiny as tiny_module
from dflash_train.target.hf import HFTarget
from dflash_train.util.hf import transformers

HYBRIDS = tiny_module.HYBRIDS
DENSE = "qwen3_5"
NO_FEATURES = FeatureSpec()
NUM_WORDS = 40  # trees and contexts draw their tokens from FIRST_TEXT_ID .. FIRST_TEXT_ID + NUM_WORDS - 1


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """The measure of every bound here: root mean square of the difference over that of what is wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest `relative` over the parts of a state, which must be the same parts."""
    assert got.keys() == want.keys()
    return max(relative(got[name], want[name]) for name in want)


# ---------------------------------------------------------------- the target in float64


@contextmanager
def everything_in_float64():
    """The library casts to float32 by name in norms, gates and states, whatever the model's dtype. Here that name
    means float64, so that a float64 model is one throughout."""
    before = torch.float32, torch.float, torch.Tensor.float
    torch.float32, torch.float, torch.Tensor.float = torch.float64, torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = before


@cache
def tiny_float64(arch: str) -> HFTarget:
    """The weights of `tiny(arch)` in float64; use it inside `everything_in_float64`."""
    single = tiny(arch)
    model = copy.deepcopy(single.model).double()
    if arch in tiny_module.MIXTURES:
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    return HFTarget(single.files, model, single.device)


@cache
def without_stop(target: HFTarget) -> HFTarget:
    """The same target, whose answers end at no token."""
    endless = copy.copy(target)
    endless.spec = replace(target.spec, stop_ids=())
    return endless


# ---------------------------------------------------------------- the twins


def cache_argument(model) -> str:
    """transformers 5.24 renamed the keyword of every forward."""
    return "cache" if "cache" in inspect.signature(model.get_decoder().forward).parameters else "past_key_values"


def new_cache(model):
    return transformers.DynamicCache(config=model.config.get_text_config())


@torch.no_grad()
def step(model, token_ids: torch.Tensor, cache) -> torch.Tensor:
    """The library's cached forward of i64[B, T] -> logits [B, T, V]; the cache moves on."""
    return model(input_ids=token_ids, use_cache=True, **{cache_argument(model): cache}).logits


def decode_paths(target, context: torch.Tensor, paths: list[list[int]]):
    """The naive twin: one prefill of the context, a copy of its cache per path, then each path's tokens one at a time
    -> (logits [B, T, V], cache). Paths of unequal length are filled up on the right, which no earlier column can see.
    """
    longest = max(map(len, paths))
    rows = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
    cache = new_cache(target.model)
    step(target.model, context[None], cache)
    cache.reorder_cache(torch.zeros(len(paths), dtype=torch.long))
    columns = [step(target.model, rows[:, i : i + 1], cache) for i in range(longest)]
    return torch.cat(columns, dim=1), cache


def decode_state(target, token_ids: torch.Tensor, num_prefilled: int) -> dict[str, torch.Tensor]:
    """What the library's cache holds after these tokens: the KV of each full layer, conv columns and recurrent state of
    each GDN layer."""
    cache = new_cache(target.model)
    step(target.model, token_ids[None, :num_prefilled], cache)
    for i in range(num_prefilled, len(token_ids)):
        step(target.model, token_ids[None, i : i + 1], cache)
    state = {}
    for i, kind in enumerate(target.text_config.layer_types):
        layer = cache.layers[i]
        if kind == "linear_attention":
            columns = target.layers[i].linear_attn.conv_kernel_size - 1  # the oldest one it keeps is never read again
            state[f"conv {i}"] = layer.conv_states[0][0, :, -columns:]
            state[f"recurrent {i}"] = layer.recurrent_states[0][0]
        else:
            state[f"keys {i}"], state[f"values {i}"] = layer.keys[0], layer.values[0]
    return state


def session_state(session) -> dict[str, torch.Tensor]:
    """The same of our session, committed rows only."""
    state, target = {}, session.target
    for layer_id, layer in zip(target.delta_layers, session.delta_layers, strict=True):
        state[f"conv {layer_id}"], state[f"recurrent {layer_id}"] = layer.rows.T, layer.state
    for layer_id, (device, slot) in session.cache.slots.items():
        state[f"keys {layer_id}"] = session.cache.keys[device][slot, :, : session.length]
        state[f"values {layer_id}"] = session.cache.values[device][slot, :, : session.length]
    return state


def started(target, context: torch.Tensor, capacity: int = 400, features: FeatureSpec = NO_FEATURES):
    """A session of our own with the context committed."""
    session = target.session(capacity, features)
    session.prefill(context)
    return session


def leaves(drafted: Tree) -> list[int]:
    """Nodes that are no other node's parent: their paths cover the tree."""
    inner = set(drafted.parents.tolist())
    return [node for node in range(len(drafted)) if node not in inner]


def node_logits(drafted: Tree, of_paths) -> torch.Tensor:
    """[M, V] from `of_paths(token lists) -> [B, >= T, V]`, called once with every root-to-leaf path."""
    paths = [path_to(leaf, drafted.parents) for leaf in leaves(drafted)]
    rows = of_paths([drafted.token_ids[path].tolist() for path in paths])
    out = torch.empty(len(drafted), rows.shape[-1], dtype=rows.dtype)
    for row, path in zip(rows, paths, strict=True):
        out[path] = row[: len(path)]
    return out


def naive_logits(target, context: torch.Tensor, drafted: Tree) -> torch.Tensor:
    """Every node's logits, its path decoded token by token."""
    return node_logits(drafted, lambda paths: decode_paths(target, context, paths)[0])


@torch.no_grad()
def brute_logits(target, context: torch.Tensor, drafted: Tree) -> torch.Tensor:
    """Every node's logits from one fresh forward of context + path, paths right-padded into a batch."""

    def of_paths(paths):
        longest = max(map(len, paths))
        rows = torch.tensor([[*context.tolist(), *path, *[0] * (longest - len(path))] for path in paths])
        return target.model(input_ids=rows, use_cache=False).logits[:, len(context) :]

    return node_logits(drafted, of_paths)


@cache
def plain_answer(target, context: tuple[int, ...], num_tokens: int) -> list[int]:
    """Greedy tokens, decoded one by one through the library."""
    cache = new_cache(target.model)
    logits, tokens = step(target.model, torch.tensor([context]), cache), []
    for _ in range(num_tokens):
        tokens.append(int(logits[0, -1].argmax()))
        logits = step(target.model, torch.tensor([[tokens[-1]]]), cache)
    return tokens


# ---------------------------------------------------------------- trees

SHAPES = ("chain", "star", "uniform", "deep")


def tree_parents(shape: str, num_nodes: int, rng: random.Random) -> list[int]:
    """chain; star (all under the root); uniform (any earlier node); deep (nearly a chain)."""
    below = {
        "chain": lambda i: i - 1,
        "star": lambda i: 0,
        "uniform": lambda i: rng.randrange(i),
        "deep": lambda i: max(0, i - 1 - (rng.random() < 0.2) * rng.randrange(1, 5)),
    }[shape]
    return [-1, *(below(i) for i in range(1, num_nodes))]


def drafted_tree(root: int, answer: list[int], parents: list[int], hit_rate: float, rng: random.Random) -> Tree:
    """Tokens for these parents: siblings differ; below a node on the answer's own path (the root is on it), the first
    child is the answer's next token at this rate. A star may need more words than there are: every text id will do."""
    tokens, depths, on_answer, used = [root], [0], [True], [set()]
    for parent in parents[1:]:
        depth = depths[parent] + 1
        right = answer[depth - 1] if on_answer[parent] and depth <= len(answer) else None
        token = right if right is not None and right not in used[parent] and rng.random() < hit_rate else None
        while token is None or token in used[parent]:
            num_words = NUM_WORDS if len(used[parent]) < NUM_WORDS // 2 else 90
            token = FIRST_TEXT_ID + rng.randrange(num_words)
        used[parent].add(token)
        tokens.append(token)
        depths.append(depth)
        on_answer.append(token == right)
        used.append(set())
    return Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths))


def random_case(target, seed: int, max_nodes: int, max_context: int, hit_rate: float = 0.8):
    """(context, tree) of the seed: shapes in turn; with a hit rate the tree holds parts of the target's own answer."""
    rng = random.Random(seed)
    shape, num_nodes = SHAPES[seed % len(SHAPES)], round(max_nodes ** rng.random())  # small ones are as frequent
    words = random.Random(seed % 16)  # a few contexts, since each one's answer has to be decoded
    words = [FIRST_TEXT_ID + words.randrange(NUM_WORDS) for _ in range(1 + words.randint(1, max_context))]
    answer = plain_answer(target, tuple(words), 6) if hit_rate else []
    return torch.tensor(words[:-1]), drafted_tree(words[-1], answer, tree_parents(shape, num_nodes, rng), hit_rate, rng)


def walk(drafted: Tree, logits: torch.Tensor) -> tuple[list[int], int]:
    """The greedy accept rule once more, by search: (path, bonus)."""
    path = [0]
    while True:
        wanted = int(logits[path[-1]].argmax())
        found = [
            i
            for i in range(len(drafted))
            if int(drafted.parents[i]) == path[-1] and int(drafted.token_ids[i]) == wanted
        ]
        if not found:
            return path, wanted
        path += found


# ---------------------------------------------------------------- checkpoints as they ship


def save_composite(folder, arch: str = DENSE, max_shard_size: str = "50GB"):
    """The weights of `tiny(arch)` as the text part of an image-text checkpoint: composite config, a tiny vision part,
    names `model.language_model.*`, in shards of at most this size."""
    family = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[arch]
    text = tiny(arch).model
    vision = getattr(transformers, f"{family}VisionConfig")(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=64,
        num_position_embeddings=16,
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(
        text_config=text.config.to_dict(), vision_config=vision.to_dict(), tie_word_embeddings=True,
        image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_module.tiny_tokenizer().save_pretrained(folder)
    return folder
