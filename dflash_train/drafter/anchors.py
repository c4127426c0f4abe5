"""Which positions of a packed row become blocks, and what each block slot reads and predicts.

A position is eligible when it and the next one are supervised in one document. Every document ranks its eligible
positions by a hash of (seed, epoch, sample id, position): a seeded permutation that does not depend on the row, the
rank or the machine. A row takes the first few of each document, shared out so that no document is starved.
"""

import torch
from torch import Tensor

from dflash_train.records import Blocks, DraftBatch
from dflash_train.util.provenance import stable_hash

# splitmix64's constants: a 64-bit mix that torch's wrapping int64 arithmetic computes alike on every device.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed64(value: int) -> int:
    """Unsigned 64-bit integer -> the int64 with the same bits."""
    return (value & (1 << 64) - 1) - ((value & 1 << 63) << 1)


def mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 bit patterns."""
    shift = lambda value, n: (value >> n) & ((1 << (64 - n)) - 1)  # logical, where >> is arithmetic
    x = (x ^ shift(x, 30)) * signed64(MIX_1)
    x = (x ^ shift(x, 27)) * signed64(MIX_2)
    return x ^ shift(x, 31)


def eligible(batch: DraftBatch) -> Tensor:
    """bool[B,T]: the token and the next one are supervised and belong to one document.

    The next token must be supervised, or the block would carry no loss; tail blocks (partly supervised) stay."""
    open_BT = torch.zeros_like(batch.loss_mask)
    same_document = batch.document_ids[:, :-1] == batch.document_ids[:, 1:]
    open_BT[:, :-1] = batch.loss_mask[:, :-1] & batch.loss_mask[:, 1:] & same_document
    return open_BT & (batch.document_ids >= 0)


def allot(counts: list[int], num_anchors: int) -> list[int]:
    """Share num_anchors among documents with counts[d] eligible positions: equal shares, what a small document cannot
    use goes to the others, and the last few (fewer than the open documents) to those with most eligible positions."""
    if sum(counts) <= num_anchors:
        return list(counts)
    quotas, left = [0] * len(counts), num_anchors
    open_documents = [d for d, count in enumerate(counts) if count]
    while open_documents and left >= len(open_documents):
        share = left // len(open_documents)
        for d in open_documents:
            given = min(share, counts[d] - quotas[d])
            quotas[d] += given
            left -= given
        open_documents = [d for d in open_documents if quotas[d] < counts[d]]
    for d in sorted(open_documents, key=lambda d: (-counts[d], d))[:left]:
        quotas[d] += 1
    return quotas


def draw_anchors(
    batch: DraftBatch, *, num_anchors: int, block_size: int, mask_token_id: int, seed: int, epoch: int
) -> Blocks:
    """Draw num_anchors slots per row, sorted, invalid ones last; a row with nothing eligible has only invalid ones.

    Drawn anew each epoch. Which positions a document gives is a prefix of its own permutation, so it depends on
    (seed, epoch, sample id) and, for its length alone, on what else is in the row."""
    open_BT = eligible(batch)
    num_rows, num_tokens = open_BT.shape
    device = open_BT.device
    num_documents = max((len(ids) for ids in batch.sample_ids), default=0)
    if num_documents == 0 or num_tokens == 0:
        empty = torch.zeros(num_rows, num_anchors, dtype=torch.long, device=device)
        return make_blocks(batch, empty, empty.bool(), block_size=block_size, mask_token_id=mask_token_id)

    # One column more than documents: column num_documents collects what is not eligible, with quota 0.
    document_BT = torch.where(open_BT, batch.document_ids, num_documents)
    counts = torch.zeros(num_rows, num_documents + 1, dtype=torch.long, device=device)
    counts.scatter_add_(1, document_BT, torch.ones_like(document_BT))
    pad = lambda row: row + [0] * (num_documents + 1 - len(row))
    quotas = torch.tensor([pad(allot(row[:-1], num_anchors)) for row in counts.tolist()], device=device)
    salt = lambda sample_id: signed64(stable_hash("anchor", seed, epoch, sample_id))
    salts = torch.tensor([pad([salt(name) for name in row]) for row in batch.sample_ids], device=device)

    keys_BT = mix64(salts.gather(1, document_BT) + (batch.position_ids + 1) * signed64(GOLDEN))
    by_key = keys_BT.argsort(dim=1, stable=True)
    order = by_key.gather(1, document_BT.gather(1, by_key).argsort(dim=1, stable=True))  # by document, then by key
    document_sorted = document_BT.gather(1, order)
    first_of_document = (counts.cumsum(1) - counts).gather(1, document_sorted)
    rank = torch.arange(num_tokens, device=device) - first_of_document
    chosen = torch.zeros_like(open_BT).scatter(1, order, rank < quotas.gather(1, document_sorted))

    positions = torch.where(chosen, torch.arange(num_tokens, device=device), num_tokens).sort(dim=1).values
    anchors = torch.full((num_rows, num_anchors), num_tokens, dtype=torch.long, device=device)
    width = min(num_anchors, num_tokens)
    anchors[:, :width] = positions[:, :width]
    valid = anchors < num_tokens
    return make_blocks(batch, anchors, valid, block_size=block_size, mask_token_id=mask_token_id)


def make_blocks(batch: DraftBatch, anchors: Tensor, valid: Tensor, *, block_size: int, mask_token_id: int) -> Blocks:
    """Blocks at given row indices: anchors i64[B,N] (any value where not valid), valid bool[B,N].

    Slot k predicts token(anchor + k), no shift. Labels outside the document are 0 and carry no loss; loss stops for
    good at the first unsupervised slot, since decoding could not get past it."""
    num_tokens = batch.token_ids.shape[1]
    anchors = torch.where(valid, anchors, max(num_tokens - 1, 0))  # keeps rows sorted, and every index legal
    slots = torch.arange(block_size, device=anchors.device)
    index = anchors[..., None] + slots
    safe = index.clamp(max=num_tokens - 1)
    pick = lambda values: values.gather(1, safe.flatten(1)).view(safe.shape)
    document_ids = torch.where(valid, batch.document_ids.gather(1, anchors), -1)
    inside = (index < num_tokens) & (pick(batch.document_ids) == document_ids[..., None]) & valid[..., None]

    supervised = inside & pick(batch.loss_mask)
    loss_mask = torch.zeros_like(inside)
    loss_mask[..., 1:] = supervised[..., 1:].long().cumprod(dim=-1).bool()
    token_ids = torch.full_like(safe, mask_token_id)
    token_ids[..., 0] = torch.where(valid, batch.token_ids.gather(1, anchors), mask_token_id)
    first = torch.where(valid, batch.position_ids.gather(1, anchors), 0)
    return Blocks(
        anchors=anchors,
        valid=valid,
        token_ids=token_ids,
        position_ids=first[..., None] + slots,
        labels=torch.where(inside, pick(batch.token_ids), 0),
        loss_mask=loss_mask,
        document_ids=document_ids,
    )
