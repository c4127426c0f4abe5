"""13-word n-grams against evaluation texts, wrappers that do not count, short texts, CJK; equal to a plain search."""

import random

from dflash_train.data.mixing.decontaminate import (
    MAX_ITEMS,
    MIN_CONTAINED_WORDS,
    NUM_CJK_CHARS,
    NUM_WORDS,
    Decontaminator,
    words_of,
)

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"


def test_thirteen_words_in_a_row_are_a_hit_and_twelve_are_not():
    found = Decontaminator({"t": [(LONG,)]})
    words = LONG.split()
    assert found.hit("prefix " + " ".join(words[1:14]) + " suffix") == "t"
    assert found.hit("prefix " + " ".join(words[1:13]) + " suffix") is None
    assert found.hit("PREFIX: " + ", ".join(words[:13]).upper() + "!") == "t"


def test_a_wrapper_of_more_than_two_items_does_not_count():
    wrapper = "please reason step by step and put your final answer within a box at the end thanks"
    items = [(f"{wrapper} item {' '.join(f'w{i}x{j}' for j in range(15))}",) for i in range(3)]
    found = Decontaminator({"t": items})
    assert found.num_wrappers > 0
    assert found.hit(wrapper + " something of my own") is None
    assert found.hit(" ".join(f"w1x{j}" for j in range(15))) == "t"
    assert Decontaminator({"t": items[:MAX_ITEMS]}).hit(wrapper + " something of my own") == "t"


def numbered(word: str, count: int = 20) -> str:
    return " ".join(f"{word}{i}" for i in range(count))


def test_a_text_that_sets_repeat_counts_once_and_for_the_first():
    item, other = numbered("same"), numbered("other")
    found = Decontaminator({"a": [(item,), (item, other)], "b": [(item,)], "c": [(f"{item.upper()}!",)]})
    assert found.num_wrappers == 0 and found.hit(item) == "a" and found.hit(other) == "a"
    apart = Decontaminator({"a": [(f"{item} {numbered(f'tail{i}x')}",) for i in range(3)]})
    assert apart.num_wrappers > 0 and apart.hit(item) is None  # what different texts share is a wrapper still


def test_a_turn_that_held_out_rows_repeat_is_a_wrapper():
    turn = numbered("always")
    rows = [(turn, numbered(f"row{i}x")) for i in range(3)]
    found = Decontaminator({"heldout": rows}, long_only=("heldout",))
    assert found.hit(turn) is None and found.hit(numbered("row1x")) == "heldout"


def test_items_that_a_row_could_hold_unnoticed_are_counted():
    nested = [(numbered("w", count),) for count in (20, 21, 22)]  # all of the first is in three items
    items = [*nested, (), ("",), (numbered("own"),), ("x = 1",)]
    found = Decontaminator({"t": items})
    assert found.hit(nested[0][0]) is None and found.hit(nested[1][0]) == "t"
    assert found.unchecked(items) == 3 and found.unchecked(items[1:]) == 2 and found.unchecked(items[5:]) == 0


def test_one_items_repetition_of_its_own_text_is_no_wrapper():
    assert Decontaminator({"t": [(LONG, f"def f():\n    '''{LONG}'''", LONG)]}).hit(LONG) == "t"


def test_short_texts_count_contained_from_eight_words_on_and_only_whole_below():
    eight = "how many sheep are left in the field"
    found = Decontaminator({"a": [(eight,)], "b": [("return x + y",)]})
    assert len(eight.split()) == MIN_CONTAINED_WORDS
    assert found.hit(f"Tell me {eight} now?") == "a"
    assert found.hit("    return x+y\n") == "b"
    assert found.hit("def add(x, y): return x + y") is None


def test_cjk_is_compared_by_characters():
    text = "".join(chr(0x4E00 + i * 7) for i in range(60))
    found = Decontaminator({"zh": [(text,)]})
    assert found.hit("前" + text[5 : 5 + NUM_CJK_CHARS] + "後") == "zh"
    assert found.hit("前" + text[5 : 4 + NUM_CJK_CHARS] + "後") is None
    assert found.hit(", ".join(text[:NUM_CJK_CHARS])) == "zh"


def test_equals_a_plain_search_over_all_windows():
    rng = random.Random(0)
    word = lambda: rng.choice("abcd")
    items = [(" ".join(word() for _ in range(rng.randint(1, 30))),) for _ in range(30)]
    found = Decontaminator({"t": items})
    grams, whole = {}, set()
    for (text,) in items:
        words = words_of(text)[0]
        if len(words) < MIN_CONTAINED_WORDS:
            whole.add(tuple(words))
            continue
        size = min(len(words), NUM_WORDS)
        for gram in {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}:
            grams[gram] = grams.get(gram, 0) + 1
    grams = {gram for gram, count in grams.items() if count <= MAX_ITEMS}
    hits = 0
    for _ in range(400):
        source = rng.choice(items)[0].split()
        start = rng.randrange(len(source))
        text = (
            [word() for _ in range(rng.randint(0, 6))]
            + source[start : start + rng.randint(1, 20)]
            + [word() for _ in range(3)]
        )
        text = text if rng.random() < 0.8 else source
        plain = tuple(text) in whole or any(tuple(text[i : i + len(g)]) == g for g in grams for i in range(len(text)))
        assert (found.hit(" ".join(text)) is not None) == plain
        hits += plain
    assert 40 < hits < 360


def test_a_function_of_the_same_name_and_docstring_is_a_hit_however_short_both_are():
    item = 'def add(x, y):\n    """Add two numbers x and y.\n\n    >>> add(2, 3)\n    5\n    """\n'
    found = Decontaminator({"code": [(item.replace(">>>", "e.g."), "return x + y")]})
    same = 'Write the body.\n```python\ndef add(a: int, b: int) -> int:\n    """{}"""\n```'
    doc = "Add two numbers x and y. e.g. add(2, 3) 5"
    assert found.hit(same.format(doc)) == "code"
    assert found.hit(same.format(doc).replace("add(a", "plus(a")) is None
    assert found.hit(same.format("Adds numbers.")) is None
    assert Decontaminator({"code": [("return x + y",)]}).hit(same.format("")) is None


def test_tasks_that_count_by_full_grams_alone_ignore_short_turns():
    short = "please write this again in a more formal tone"
    assert Decontaminator({"heldout": [(short, "Go on.")]}).hit(short) == "heldout"
    found = Decontaminator({"heldout": [(short, "Go on.", LONG)]}, long_only=("heldout",))
    assert found.hit(short) is None and found.hit("Go on.") is None
    assert found.hit(f"and so {LONG}") == "heldout"


def test_the_task_of_the_earliest_gram_is_named_and_no_text_hits_nothing():
    one, two = (" ".join(f"{w}{i}" for i in range(13)) for w in "ab")
    found = Decontaminator({"one": [(one,)], "two": [(two,)]})
    assert found.hit(f"{two} {one}") == "two" and found.hit(f"{one} {two}") == "one"
    assert found.hit("") is None and Decontaminator({}).hit(LONG) is None
