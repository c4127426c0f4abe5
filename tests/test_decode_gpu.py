"""The decode loop on a GPU: same answers as the CPU in float32, whatever drafts and however it is accepted."""

import pytest
import torch
from helpers_decode import PROMPT_IDS, tiny_drafter

from dflash_train.decode.autoregressive import Proposer as Autoregressive
from dflash_train.decode.base import DraftSettings
from dflash_train.decode.ddtree import Proposer as DDTree
from dflash_train.decode.dflash import Proposer as DFlash
from dflash_train.decode.generate import generate
from dflash_train.decode.shuffle import ShuffledFeatures
from dflash_train.decode.verify import Sampling, Verifier

pytestmark = pytest.mark.gpu
NUM_TOKENS = 40


def parts(device):
    from dflash_train.target.tiny import make_tiny_target

    target = make_tiny_target(device=device)
    return target, tiny_drafter(target).to(target.device), target.head()


def test_greedy_answers_on_the_gpu_equal_the_cpus_token_for_token():
    on_cpu, _, _ = parts("cpu")
    expected = generate(on_cpu, Autoregressive(), Verifier(Sampling()), PROMPT_IDS, NUM_TOKENS).token_ids
    target, drafter, head = parts("cuda")
    proposers = [Autoregressive(), DFlash(drafter, head, DraftSettings()),
                 DDTree(drafter, head, DraftSettings(budget=64)),
                 ShuffledFeatures(DFlash(drafter, head, DraftSettings()), seed=1)]  # fmt: skip
    for proposer in proposers:
        answer = generate(target, proposer, Verifier(Sampling()), PROMPT_IDS, NUM_TOKENS)
        assert answer.token_ids == expected and len(answer.margins) == NUM_TOKENS and answer.decode_s > 0


@pytest.mark.parametrize("accept", ["sample", "rejection"])
def test_sampled_answers_repeat_on_the_gpu(accept):
    target, drafter, head = parts("cuda")
    sampling = Sampling(1.0, 0.9, 20)
    proposer = DFlash(drafter, head, DraftSettings(accept=accept, sampling=sampling))
    run = lambda: generate(target, proposer, Verifier(sampling, accept, seed=3), PROMPT_IDS, NUM_TOKENS).token_ids
    assert run() == run()
    if accept == "sample":
        tree = DDTree(drafter, head, DraftSettings(budget=32))
        assert len(generate(target, tree, Verifier(sampling, seed=3), PROMPT_IDS, NUM_TOKENS).token_ids) == NUM_TOKENS


def test_a_tree_built_on_the_gpu_is_the_one_built_on_the_cpu():
    from dflash_train.decode.tree import build_ddtree

    logits = (torch.randn(15, 5000) * 3).bfloat16().float()  # bfloat16 values tie often
    a, b = build_ddtree(1, logits, 128), build_ddtree(1, logits.cuda(), 128)
    assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.parents, b.parents)
