"""The mask token: which row of the target's embedding a drafter may use for the slots it has to fill."""

from dflash_train.target.files import TargetFiles, embedding_row
from dflash_train.util.errors import UserError

FIELD = "target.mask_token_id"


def check_mask_token(mask_token_id: int | None, files: TargetFiles) -> int:
    """The id, when it is a real, non-zero embedding row that never occurs in text. Reads that row, not the model.

    Raises UserError naming candidates for null, pad/eos/bos, text tokens, rows beyond the embedding and zero rows.
    """
    tokenizer, num_rows = files.tokenizer, files.spec.embedding_rows
    candidates = mask_candidates(files)
    want = f"an embedding row that never occurs in text; candidates: {', '.join(candidates) or 'none found'}"
    fix = f"{FIELD}={candidates[0].split()[0]}" if candidates else None
    refuse = lambda got: UserError(FIELD, got=got, want=want, fix=fix)
    if mask_token_id is None:
        raise refuse("null")
    if mask_token_id in files.spec.stop_ids:
        raise refuse(f"{mask_token_id}, the eos token")
    named = {"pad": tokenizer.pad_token_id, "bos": tokenizer.bos_token_id, "unk": tokenizer.unk_token_id}
    for name, token_id in named.items():
        if mask_token_id == token_id:
            raise refuse(f"{mask_token_id}, the {name} token")
    if not 0 <= mask_token_id < num_rows:
        raise refuse(f"{mask_token_id}, but the embedding has {num_rows} rows")
    token = tokenizer.added_tokens_decoder.get(mask_token_id)
    if mask_token_id < len(tokenizer) and (token is None or not token.special):
        raise refuse(f"{mask_token_id}, the text token {tokenizer.convert_ids_to_tokens(mask_token_id)!r}")
    if files.has_weights and float(embedding_row(files.folder, mask_token_id)[0].float().norm()) == 0.0:
        raise refuse(f"{mask_token_id}, whose embedding row is all zeros")
    return mask_token_id


def mask_candidates(files: TargetFiles, limit: int = 4) -> list[str]:
    """'16 <empty_output>', ...: special tokens that the chat template never writes, then rows behind the vocabulary."""
    tokenizer, num_rows = files.tokenizer, files.spec.embedding_rows
    used = {*files.spec.stop_ids, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    template = str(tokenizer.chat_template)
    found = [
        f"{token_id} {token.content}"
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
        if token.special and token_id not in used and token_id < num_rows and token.content not in template
    ]
    return (found + [f"{i} (no token)" for i in range(len(tokenizer), num_rows)])[:limit]
