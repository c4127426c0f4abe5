"""Stand-ins for decode tests: a target that is a function of the text, and proposers whose drafts are known."""

import itertools
import random
from types import SimpleNamespace

import torch

from dflash_train.decode.tree import chain_tree
from dflash_train.records import Features, FeatureSpec, Generation, Tree


class TableTarget:
    """A 'model' whose logits are a seeded function of the whole text so far (or of its last `order` tokens).

    Its feature row for position p is [p, token(p)], so a test sees exactly which rows a proposer was given.
    """

    def __init__(self, vocab_size=16, seed=0, stop_ids=(), order=None, scale=2.0):
        self.vocab_size, self.seed, self.order, self.scale = vocab_size, seed, order, scale
        self.spec = SimpleNamespace(stop_ids=tuple(stop_ids), vocab_size=vocab_size)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.num_forwards = 0
        self._known = {}

    def logits(self, text) -> torch.Tensor:
        key = tuple(text) if self.order is None else tuple(text[-self.order :])
        if key not in self._known:
            rng = random.Random(f"{self.seed}|{key}")
            self._known[key] = torch.tensor([rng.gauss(0, self.scale) for _ in range(self.vocab_size)])
        return self._known[key]

    def greedy(self, text, count) -> list[int]:
        text = list(text)
        for _ in range(count):
            text.append(int(self.logits(text).argmax()))
        return text[-count:] if count else []

    def session(self, capacity, features: FeatureSpec):
        return TableSession(self, capacity)


class TableSession:
    def __init__(self, target: TableTarget, capacity: int):
        self.target, self.capacity, self.text, self.tree = target, capacity, [], None

    @property
    def length(self) -> int:
        return len(self.text)

    def prefill(self, token_ids):
        self.text = token_ids.tolist()
        rows = [[p, t] for p, t in enumerate(self.text)]
        return self.target.logits(self.text), Features(hidden=torch.tensor(rows, dtype=torch.float32))

    def forward(self, tree: Tree):
        assert self.length + len(tree) <= self.capacity, "the cache is too small"
        self.target.num_forwards += 1
        self.tree = tree
        tokens, paths = tree.token_ids.tolist(), []
        for token, parent in zip(tokens, tree.parents.tolist()):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        logits = torch.stack([self.target.logits(self.text + path) for path in paths])
        rows = [[self.length + d, t] for d, t in zip(tree.depths.tolist(), tokens)]
        return logits, Features(hidden=torch.tensor(rows, dtype=torch.float32))

    def commit(self, path):
        parents = self.tree.parents.tolist()
        assert path[0] == 0 and all(parents[b] == a for a, b in itertools.pairwise(path)), "not a path from the root"
        self.text += self.tree.token_ids[torch.tensor(path)].tolist()


class Recording:
    """Base of the test proposers: keeps the text and checks that every committed row is the next one of the text."""

    name, features, max_nodes = "test", FeatureSpec(), 600

    def __init__(self):
        self.text = []

    def start(self, token_ids, features):
        self.text = []
        self.commit(token_ids, features)

    def commit(self, token_ids, features):
        expected = [[len(self.text) + i, t] for i, t in enumerate(token_ids.tolist())]
        assert features.hidden.tolist() == expected, "rows of other tokens or positions were committed"
        self.text += token_ids.tolist()

    def propose(self, root, position):
        assert position == len(self.text), "the root sits behind the committed rows"
        return self.draft(root, [*self.text, root])


class Knowing(Recording):
    """Drafts a chain of `num_drafts`: the first right(round) are the target's greedy tokens, the next one is wrong."""

    def __init__(self, target, num_drafts, right=None):
        super().__init__()
        self.target, self.num_drafts, self.right, self.round = target, num_drafts, right, 0

    def draft(self, root, text):
        tokens = self.target.greedy(text, self.num_drafts)
        right = self.num_drafts if self.right is None else self.right(self.round)
        self.round += 1
        if right < self.num_drafts:
            tokens[right] = (tokens[right] + 1) % self.target.vocab_size
        return chain_tree(root, tokens)


class RandomTrees(Recording):
    """Offers seeded random trees that mix likely and unlikely tokens."""

    def __init__(self, target, max_nodes=12, seed=0):
        super().__init__()
        self.target, self.size, self.rng = target, max_nodes, random.Random(seed)

    def draft(self, root, text):
        return random_tree(self.rng, root, self.rng.randint(1, self.size), self.target.vocab_size)


def random_tree(rng: random.Random, root: int, num_nodes: int, vocab_size: int) -> Tree:
    """A well-formed tree: random parents, distinct tokens among siblings."""
    tokens, parents, depths = [root], [-1], [0]
    used = [set()]
    while len(tokens) < num_nodes:
        parent = rng.randrange(len(tokens))
        free = [t for t in range(vocab_size) if t not in used[parent]]
        if not free:
            continue
        token = rng.choice(free)
        used[parent].add(token)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        used.append(set())
    return Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths))


def generation(round_lengths, *, token_ids=None, prompt_ids=(1,), draft_lengths=None, margins=None, decode_s=1.0,
               propose_s=0.25, verify_s=0.5, commit_s=0.25):  # fmt: skip
    """A Generation with the given rounds, for metric tests."""
    token_ids = list(range(1 + sum(round_lengths))) if token_ids is None else token_ids
    draft_lengths = [max(round_lengths, default=1) - 1] * len(round_lengths) if draft_lengths is None else draft_lengths
    margins = [1.0] * len(token_ids) if margins is None else margins
    return Generation(list(prompt_ids), token_ids, list(round_lengths), draft_lengths, "length", 0.1, decode_s,
                      propose_s, verify_s, commit_s, margins)  # fmt: skip


# ---------------------------------------------------------------- a real drafter for the tiny target

PROMPT_IDS = [1, 50, 61, 43, 77, 2, 90, 33, 58, 64, 71, 45]


def tiny_drafter(target, *, block_size=6, layer_types=None, sliding_window=None, intermediate_size=None, seed=0):
    """A random two-layer drafter for a tiny target: random norm gains, weight std 0.15, reads layers 0 and 1."""
    from dflash_train.config import DrafterConfig
    from dflash_train.drafter.dflash import DFlashDrafter, resolve_drafter

    config = DrafterConfig(name="tiny", num_layers=2, block_size=block_size, layer_types=layer_types,
                           sliding_window=sliding_window, intermediate_size=intermediate_size)  # fmt: skip
    config = resolve_drafter(config, target.text_config.to_dict(), [0, 1], 127)
    model, generator = DFlashDrafter(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 2.0, generator=generator)
            else:
                parameter.normal_(0.0, 0.15, generator=generator)
    return model


def overfit(target, model, token_ids, num_steps=60):
    """Train the drafter on one sequence, every position past the prompt an anchor, until it knows it by heart."""
    from dflash_train.drafter.anchors import make_blocks
    from dflash_train.drafter.dflash import block_hidden
    from dflash_train.drafter.loss import Objective, draft_loss
    from dflash_train.records import DraftBatch

    ids, count = torch.tensor([token_ids]), len(token_ids)
    hidden = target.capture(ids, tuple(model.config.target_layer_ids)).hidden.clone()  # out of inference mode
    batch = DraftBatch(ids, torch.ones(1, count, dtype=torch.bool), torch.zeros(1, count, dtype=torch.long),
                       torch.arange(count)[None], hidden, None, [["one"]])  # fmt: skip
    anchors = torch.arange(len(PROMPT_IDS), count - 1)[None]
    blocks = make_blocks(batch, anchors, anchors >= 0, block_size=model.config.block_size,
                         mask_token_id=model.config.mask_token_id)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(num_steps):
        hidden_states = block_hidden(model, model.config, target.head(), batch, blocks, "sdpa")
        terms = draft_loss(hidden_states, blocks, target.head(), Objective(), batch)
        optimizer.zero_grad()
        (terms.numerator / terms.denominator).backward()
        optimizer.step()
    return model
