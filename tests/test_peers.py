"""Our exported drafters in the peers' own code: dflash 0.1.0, specforge 0.2.0 and speculators 0.9.0 from `.peers/`.

every tensor loads, with nothing missing or unexpected but embeddings and heads
float32 draft logits agree to 1e-4, where each peer has the semantics that serve (traps.md 24)
"""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from dflash_train import export
from dflash_train.config import DrafterConfig, ExportConfig, ExportRun, TargetConfig
from dflash_train.drafter.anchors import draw_anchors
from dflash_train.drafter.dflash import DraftCache, block_hidden, draft, extend
from dflash_train.drafter.files import save_drafter
from dflash_train.drafter.loss import Objective, draft_loss
from tests.helpers_drafter import (
    FULL,
    HIDDEN,
    MASK_ID,
    SLIDING,
    VOCAB,
    packed_batch,
    tiny_config,
    tiny_drafter,
    tiny_head,
)

PEERS = Path(__file__).resolve().parents[1] / ".peers"
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PEERS.is_dir(), reason="the peers' code is not here: `make peers` fetches it"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class _OpenAIStub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An `openai` of empty classes: two peers import its client for servers that these tests never start."""

    def find_spec(self, name, path=None, target=None):
        if name == "openai" or name.startswith("openai."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        def attribute(name: str) -> type:
            if name.startswith("__"):  # else whoever walks sys.modules finds a class where it expects a path
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = attribute


@pytest.fixture(scope="module")
def peers():
    """.peers behind everything installed, so that only what we lack comes from there."""
    sys.path.append(str(PEERS))
    stub = _OpenAIStub()
    sys.meta_path.append(stub)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    sys.meta_path.remove(stub)
    sys.path.remove(str(PEERS))


def exported(folder, config: DrafterConfig, model, flavour: str) -> Path:
    """Through the export stage itself."""
    source = save_drafter(folder / "trained", model, config, {})
    run = ExportRun(
        stage="export", run_dir=str(folder), work_dir=str(folder),
        target=TargetConfig(name="tiny", kind="hf", path="some/target"), drafter=config,
        export=ExportConfig(format=flavour, checkpoint=str(source), output_dir=str(folder / flavour), dtype="float32"),
    )  # fmt: skip
    export.main(run)
    return folder / flavour


def setup(layers, num_tokens=40, window=6, **changes):
    config = tiny_config(layers, window=window, **changes)
    model, head = tiny_drafter(config), tiny_head()
    batch = packed_batch([[(num_tokens, 5, num_tokens)]], num_tokens)
    blocks = draw_anchors(batch, num_anchors=8, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)
    assert int(blocks.anchors[0, -1]) > 2 * window
    with torch.no_grad():
        logits = head.logits(block_hidden(model, config, head, batch, blocks, "sdpa"))
    assert logits.std() > 1
    return config, model, head, batch, blocks, logits


def close(theirs, ours):
    """1e-4 of a logit, absolutely. Returns the largest difference."""
    difference = float((theirs - ours).detach().abs().max())
    print(f"largest difference {difference:.1e} of logits with std {float(ours.std()):.2f}")
    assert difference < 1e-4, difference
    return difference


def load_clean(cls, folder, **options):
    model, info = cls.from_pretrained(folder, output_loading_info=True, dtype=torch.float32, **options)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval(), set(info["missing_keys"])


LAYOUTS = [
    ((FULL, FULL), {}), ((SLIDING, SLIDING), {}), ((SLIDING, FULL, SLIDING), {}),
    ((SLIDING, FULL), {"is_causal": False}), ((FULL, SLIDING), {"is_causal": True}),
    ((FULL,), {"attention_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize("layers, changes", LAYOUTS)
def test_dflash_gives_our_logits_at_every_anchor(peers, tmp_path, layers, changes):
    """Trap 24: full, sliding and mixed layers with a context far longer than the window, is_causal overrides too."""
    from dflash.model import DFlashDraftModel

    config, model, head, batch, blocks, ours = setup(layers, **changes)
    peer, missing = load_clean(DFlashDraftModel, exported(tmp_path, config, model, "zlab"))
    assert not missing and peer.block_size == 4 and peer.mask_token_id == MASK_ID
    for n, a in enumerate(blocks.anchors[0].tolist()):
        with torch.no_grad():
            hidden = peer(
                position_ids=torch.arange(a + 4)[None], noise_embedding=head.embed(blocks.token_ids[:, n]),
                target_hidden=batch.hidden[:, :a],
            )  # fmt: skip
        close(head.logits(hidden), ours[:, n])


@pytest.mark.parametrize("layers, changes", LAYOUTS)
def test_dflash_cached_drafting_equals_ours_round_by_round(peers, tmp_path, layers, changes):
    """Traps 18, 24: their DynamicCache, cropped after every draft, against our DraftCache over four rounds."""
    from dflash.model import DFlashDraftModel, _crop_to, _make_cache

    config, model, head, batch, _, _ = setup(layers, **changes)
    peer, _ = load_clean(DFlashDraftModel, exported(tmp_path, config, model, "zlab"))
    theirs, ours, seen = _make_cache(peer.config), DraftCache(model, capacity=8), 0
    for start in (17, 18, 22, 25):
        root = int(batch.token_ids[0, start])
        rows = batch.hidden[0, seen:start]
        with torch.no_grad():
            hidden = peer(
                position_ids=torch.arange(seen, start + 4)[None], target_hidden=rows[None], past_key_values=theirs,
                noise_embedding=head.embed(torch.tensor([[root] + [MASK_ID] * 3])), use_cache=True,
            )  # fmt: skip
        _crop_to(theirs, start)
        extend(model, ours, rows, torch.arange(seen, start))
        close(head.logits(hidden[0, 1:]), draft(model, head, ours, root, start, 4))
        seen = start


@pytest.mark.parametrize("layers", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL, SLIDING)])
@pytest.mark.parametrize("loss", ["dflash", "dpace"])
def test_specforge_trains_on_our_logits_loss_and_gradients(peers, tmp_path, layers, loss, monkeypatch):
    """Trap 24: its packed training forward at our anchors, full and causal sliding layers; both objectives, and the
    gradient of every tensor."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    config, model, head, batch, blocks, ours = setup(layers)
    folder = exported(tmp_path, config, model, "sglang")
    peer, missing = load_clean(DFlashDraftModel, folder, attn_implementation="sdpa")
    assert not missing
    lm_head, embed = torch.nn.Linear(HIDDEN, VOCAB, bias=False), torch.nn.Embedding(VOCAB, HIDDEN)
    lm_head.weight.data, embed.weight.data = head.head, head.embedding
    trainer = OnlineDFlashModel(
        peer, lm_head, embed, mask_token_id=MASK_ID, block_size=4, attention_backend="sdpa", loss_decay_gamma=3.0,
        loss_type=loss, objective_chunk_blocks=3,
    )  # fmt: skip
    anchors = (blocks.anchors, blocks.valid)
    monkeypatch.setattr(trainer, "_sample_anchor_positions", lambda *_: anchors)
    mask = batch.loss_mask.float()
    with torch.no_grad():
        _, _, hidden = trainer._forward_draft_blocks(batch.token_ids, batch.hidden, mask)
    close(head.logits(hidden).view(ours.shape), ours)

    _, accuracy, metrics = trainer(batch.token_ids, batch.hidden, mask)
    numerator, denominator = metrics["loss_terms"]
    hidden = block_hidden(model, config, head, batch, blocks, "sdpa")
    terms = draft_loss(hidden, blocks, head, Objective({"dflash": "ce_decay"}.get(loss, loss), 3.0, 0.5, 5))
    assert abs(float(numerator) / float(terms.numerator) - 1) < 1e-5
    assert abs(float(accuracy) - float(terms.correct.sum() / terms.supervised.sum())) < 1e-6
    if loss == "dflash":
        assert abs(float(denominator) - float(terms.denominator)) < 1e-4
    numerator.backward()
    terms.numerator.backward()
    wanted = dict(peer.named_parameters())
    for name, parameter in model.named_parameters():
        scale = float(wanted[name].grad.abs().max())
        assert scale > 0
        torch.testing.assert_close(parameter.grad, wanted[name].grad, atol=2e-4 * scale, rtol=0)


@pytest.mark.parametrize("layers, changes", [((FULL, FULL), {}), ((SLIDING, FULL), {"window": 15})])
def test_speculators_loads_our_export_and_gives_our_logits(peers, tmp_path, layers, changes, monkeypatch):
    """Trap 24: its own loader on our nested config; packed documents on full layers, and sliding ones where the context
    is shorter than the window (its window shows k+1 more keys)."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core

    config = tiny_config(layers, **changes)
    model, head = tiny_drafter(config), tiny_head()
    batch = packed_batch([[(11, 2, 11), (9, 2, 9)]], 26)
    blocks = draw_anchors(batch, num_anchors=6, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)
    assert blocks.valid.all() and set(blocks.document_ids[0].tolist()) == {0, 1}
    with torch.no_grad():
        ours = head.logits(block_hidden(model, config, head, batch, blocks, "sdpa"))

    folder = exported(tmp_path, config, model, "speculators")
    read = DFlashSpeculatorConfig.from_pretrained(folder)
    assert read.block_size == 4 and read.mask_token_id == MASK_ID and read.draft_vocab_size == VOCAB
    assert read.aux_hidden_state_layer_ids == [i + 1 for i in config.target_layer_ids]
    assert read.speculators_config.proposal_methods[0].speculative_tokens == 3
    assert read.speculators_config.verifier.name_or_path == "some/target"
    assert read.transformer_layer_config.layer_types == list(layers) and not read.sliding_window_non_causal
    read.transformer_layer_config._attn_implementation = "eager"
    peer, missing = load_clean(DFlashDraftModel, folder, config=read)
    heads = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert missing <= heads
    assert {name for name, _ in peer.named_parameters()} - heads == {name for name, _ in model.named_parameters()}
    peer.embed_tokens.weight.data, peer.lm_head.weight.data = head.embedding, head.head
    peer.verifier_lm_head.weight.data = head.head
    monkeypatch.setattr(core, "select_anchors", lambda *_: (blocks.anchors[0], blocks.valid[0]))
    with torch.no_grad():
        _, logits, _, _, _ = peer._backbone_forward(
            batch.hidden, batch.token_ids, batch.loss_mask.float(), batch.last_hidden, batch.document_ids,
            batch.position_ids, max_anchors=6,
        )  # fmt: skip
    close(logits.view(ours.shape), ours)
