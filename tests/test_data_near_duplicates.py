"""Near duplicates: what shares a band is compared by its true Jaccard similarity, and nothing else is dropped."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.data.mixing import near_duplicates
from dflash_train.data.mixing.near_duplicates import (
    LONGEST_BAND,
    MIN_RECALL,
    NearIndex,
    band_groups,
    band_size,
    jaccard,
    recall,
    shingles,
    signature,
)

WORDS = [f"w{i}" for i in range(500)]


def text(rng: random.Random, count: int = 120) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def changed(rng: random.Random, words: str, count: int) -> str:
    out = words.split()
    for place in rng.sample(range(len(out)), count):
        out[place] = f"new{rng.random()}"
    return " ".join(out)


def index(texts: list[str], owners: list[str] | None = None, threshold: float = 0.8) -> NearIndex:
    signatures = np.array([signature(t) for t in texts])
    return NearIndex(signatures, owners or [str(i) for i in range(len(texts))], texts.__getitem__, threshold)


def test_jaccard_is_that_of_five_word_runs():
    assert shingles("a b c d e f") == {"a b c d e", "b c d e f"} and shingles("a b") == {"a b"}
    assert jaccard("a b c d e f", "a b c d e g") == 1 / 3 and jaccard("a b", "a b") == 1


def test_a_signature_is_the_same_for_the_same_shingles_and_estimates_their_jaccard():
    rng = random.Random(1)
    errors = []
    for _ in range(60):
        first = text(rng)
        second = changed(rng, first, 3)
        errors.append((signature(first) == signature(second)).mean() - jaccard(first, second))
    assert abs(np.mean(errors)) < 0.02 and np.std(errors) < 0.06
    assert (signature("b c d e f a b c d e f") == signature("b c d e f a b c d e f a")).mean() > 0.5


def test_signatures_do_not_change_between_versions_and_machines():
    """What shares a band depends on them, so a mix is only the same where they are."""
    known = [3571084926, 3536515436, 3669887724, 3698762334]
    assert signature("one two three four five six").tolist()[:4] == known


@pytest.mark.parametrize(("threshold", "most_changes"), [(0.8, 8), (0.5, 20), (0.65, 14), (0.95, 3)])
def test_pairs_above_the_threshold_are_found_and_pairs_below_stay(threshold, most_changes):
    """Recall and precision on 600 pairs around the threshold, against true similarities."""
    rng = random.Random(2)
    texts = []
    for _ in range(600):
        first = text(rng)
        texts += [first, changed(rng, first, rng.randint(0, most_changes))]
    found = index(texts, threshold=threshold)
    wanted = missed = 0
    for number, one in enumerate(texts):
        other = found.find(number)
        if other is not None:
            assert jaccard(one, texts[other]) >= threshold
        if number % 2:
            wanted += (near := jaccard(one, texts[number - 1]) >= threshold)
            missed += near and other != number - 1
        found.keep(number)
    assert 150 < wanted < 450 and missed <= 0.02 * wanted


def test_bands_are_as_long_as_finds_the_pairs_of_every_threshold_that_a_recipe_may_name():
    for percent in range(50, 101):
        size = band_size(percent / 100)
        assert recall(percent / 100, size) >= MIN_RECALL
        assert size == LONGEST_BAND or recall(percent / 100, size + 1) < MIN_RECALL
    assert [band_size(x) for x in (0.5, 0.6, 0.7, 0.75, 0.8, 1.0)] == [3, 4, 5, 6, 6, 6]


def test_only_kept_rows_count_and_turns_of_one_conversation_are_not_compared():
    rng = random.Random(3)
    first = text(rng)
    texts = [first, first, first]
    found = index(texts, ["a", "a", "b"])
    assert found.find(1) is None
    found.keep(0)
    assert found.find(1) is None and found.find(2) == 0


def test_many_rows_of_one_family_below_the_threshold_all_stay(monkeypatch):
    """A shared half makes bands collide often; what is read again stays a small part of all pairs."""
    rng = random.Random(4)
    shared = text(rng, 80)
    texts = [f"{shared} {text(rng, 25)}" for _ in range(150)]
    compared = []
    monkeypatch.setattr(near_duplicates, "jaccard", lambda a, b: compared.append(1) or jaccard(a, b))
    found = index(texts)
    for number in range(len(texts)):
        assert found.find(number) is None
        found.keep(number)
    assert len(compared) < 0.1 * 150 * 149 / 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_rows_have_a_common_group_exactly_where_they_share_a_band(choices):
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 2**32, (4, 128), dtype=np.uint32)
    signatures = pool[choices].copy()
    signatures[::2, :64] = rng.integers(0, 2**32, (len(signatures[::2]), 64), dtype=np.uint32)
    groups = band_groups(signatures, 6)
    assert groups.shape == (len(choices), 21)
    bands = [[tuple(row[b * 6 : b * 6 + 6]) for b in range(21)] for row in signatures.tolist()]
    for i in range(len(choices)):
        for band in range(21):
            same = {j for j in range(len(choices)) if bands[j][band] == bands[i][band]}
            mates = {j for j in range(len(choices)) if groups[j, band] == groups[i, band]}
            assert (groups[i, band] == -1) == (same == {i}) and (same == {i} or mates == same)
