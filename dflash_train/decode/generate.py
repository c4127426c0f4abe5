"""The one generate loop: whatever drafts, it is drafted, verified, committed and counted here."""

import torch
from torch import Tensor

from dflash_train.decode.base import Proposer
from dflash_train.decode.tree import limit_depth
from dflash_train.decode.verify import Verifier
from dflash_train.records import Generation
from dflash_train.target.base import TargetModel
from dflash_train.util.errors import UserError
from dflash_train.util.timing import now_s


@torch.inference_mode()
def generate(target: TargetModel, proposer: Proposer, verifier: Verifier, prompt_ids: list[int],
             max_new_tokens: int) -> Generation:  # fmt: skip
    """Decode one prompt (at most max_new_tokens, ended by one of target.spec.stop_ids) and record how it went.

    What counts as a round is the same for every proposer:
    - the prefill's token belongs to no round;
    - a round that reaches a stop token counts up to and including it, and nothing after it is emitted;
    - a round that max_new_tokens cuts emits what fits and is left out of round_lengths and of every time.
    Nodes too deep to fit are not verified, save one level that tells a cut round from one that just fits; so the limit
    never changes a counted round.
    """
    if not prompt_ids:
        raise UserError("prompt", got="no tokens", want="at least one token")
    device, stop_ids = target.device, set(target.spec.stop_ids)
    session = target.session(len(prompt_ids) + max_new_tokens + proposer.max_nodes, proposer.features)
    prompt = torch.tensor(prompt_ids)
    margins = _Margins(verifier.sampling.greedy)

    started = now_s(device)
    last_logits, features = session.prefill(prompt)
    tokens = verifier.choose(last_logits.unsqueeze(0))
    proposer.start(prompt, features)
    prefill_s = now_s(device) - started
    margins.add(last_logits.unsqueeze(0))

    round_lengths, draft_lengths, round_times = [], [], []
    stopped = tokens[0] in stop_ids
    while not stopped and len(tokens) < max_new_tokens:
        room = max_new_tokens - len(tokens)
        start = now_s(device)
        proposal = proposer.propose(tokens[-1], session.length)
        tree = limit_depth(proposal, room)
        proposed = now_s(device)
        logits, features = session.forward(tree)
        verdict = verifier.verify(tree, logits)
        verified = now_s(device)
        path = torch.tensor(verdict.path)
        path_ids = tree.token_ids[path]
        session.commit(verdict.path)
        proposer.commit(path_ids, features.select(path.to(device)))
        committed = now_s(device)

        new_tokens = [*path_ids[1:].tolist(), verdict.bonus]
        margins.add(logits[path.to(logits.device)])
        end = next((i for i, token in enumerate(new_tokens) if token in stop_ids), None)
        if end is not None:
            new_tokens = new_tokens[: end + 1]
        tokens += new_tokens[:room]
        if len(new_tokens) <= room:
            stopped = end is not None
            round_lengths.append(len(new_tokens))
            draft_lengths.append(int(proposal.depths.max()))
            round_times.append((proposed - start, verified - proposed, committed - verified))

    propose_s, verify_s, commit_s = (sum(column) for column in zip(*round_times)) if round_times else (0.0, 0.0, 0.0)
    return Generation(
        prompt_ids=list(prompt_ids),
        token_ids=tokens,
        round_lengths=round_lengths,
        draft_lengths=draft_lengths,
        stopped_by="stop" if stopped else "length",
        prefill_s=prefill_s,
        decode_s=propose_s + verify_s + commit_s,
        propose_s=propose_s,
        verify_s=verify_s,
        commit_s=commit_s,
        margins=margins.collect(len(tokens)),
    )


class _Margins:
    """Top-1 minus top-2 logit of every emitted token, outside the timed parts and copied off the device once."""

    def __init__(self, wanted: bool):
        self._rows: list[Tensor] | None = [] if wanted else None

    def add(self, logits: Tensor) -> None:
        """logits [n, V] of the n rows that the next n tokens came from."""
        if self._rows is not None:
            best = logits.topk(2, dim=-1).values
            self._rows.append(best[:, 0] - best[:, 1])

    def collect(self, num_tokens: int) -> list[float]:
        return torch.cat(self._rows)[:num_tokens].tolist() if self._rows else []
