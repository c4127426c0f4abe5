"""One pass over the rows of a mix, before or after they are answered: what a data card counts and shows of them.

Memory does not grow with the number of rows: counters by kind and by length, and a few whole rows to look at.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache

from dflash_train.data.card.parts import Example
from dflash_train.data.chat import history
from dflash_train.records import Sample
from dflash_train.util.io import json_line

LANGUAGE_ROWS = 20_000  # language is told on the first so many rows; the mix's order is a seeded shuffle
LANGUAGE_CHARS = 2_000
MIN_CONFIDENCE = 0.5
EXAMPLES = 12  # of all sources together, but two of each at least
EXAMPLE_MESSAGES = 6
EXAMPLE_CHARS = 600


class RowCounts:
    """Counts of all rows passed to `add`.

    rows: by (split, source, bucket, licence, thinking). prompt_chars: {source: lengths}. languages: by (source,
    language) over the first LANGUAGE_ROWS training rows. Of answered rows, by thinking mode: prompt_tokens,
    answer_tokens, and finish by (source, thinking, finish reason).
    """

    def __init__(self, num_sources: int):
        self.examples_a_source = max(2, EXAMPLES // max(num_sources, 1))
        self.rows: Counter = Counter()
        self.prompt_chars: dict[str, Counter] = defaultdict(Counter)
        self.languages: Counter = Counter()
        self.prompt_tokens: dict[str, Counter] = defaultdict(Counter)
        self.answer_tokens: dict[str, Counter] = defaultdict(Counter)
        self.finish: Counter = Counter()
        self.examples: dict[str, list[tuple[str, Example]]] = defaultdict(list)  # {source: [(bucket, example)]}

    def add(self, rows: Iterable[dict]) -> None:
        """Count canonical rows (Sample.to_json)."""
        for row in rows:
            sample = Sample.from_json(row)
            self.rows[sample.split, sample.source, sample.bucket, sample.license, sample.thinking] += 1
            asked = history(sample)
            self.prompt_chars[sample.source][sum(len(message["content"]) for message in asked)] += 1
            if sample.regen:
                self.prompt_tokens[sample.thinking][sample.regen["n_prompt"]] += 1
                self.answer_tokens[sample.thinking][sample.regen["n_tokens"]] += 1
                self.finish[sample.source, sample.thinking, sample.regen["finish_reason"]] += 1
            if sample.split != "train":
                continue
            if self.languages.total() < LANGUAGE_ROWS:
                self.languages[sample.source, language(asked)] += 1
            if len(self.examples[sample.source]) < self.examples_a_source:
                self.examples[sample.source].append((sample.bucket, example(sample)))

    def by(self, *fields: str, split: str | None = None) -> Counter:
        """Rows by some of split, source, bucket, license, thinking; of one split, or of all."""
        places = [("split", "source", "bucket", "license", "thinking").index(name) for name in fields]
        out: Counter = Counter()
        for key, count in self.rows.items():
            if split in (None, key[0]):
                out[tuple(key[place] for place in places) if len(places) > 1 else key[places[0]]] += count
        return out


# ---------------------------------------------------------------- language


@cache
def _identifier():
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # its model takes a second to load

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def language(messages: list[dict]) -> str:
    """ISO 639 code of what the users wrote; "unsure" where the best guess is not even likely (names, formulas, one
    word)."""
    text = "\n".join(message["content"] for message in messages if message["role"] == "user")[:LANGUAGE_CHARS]
    code, confidence = _identifier().classify(text)
    return code if confidence >= MIN_CONFIDENCE else "unsure"


# ---------------------------------------------------------------- examples


def example(sample: Sample) -> Example:
    """The sample, shortened: its first message and its last ones, the head of each."""
    messages = sample.messages
    if len(messages) > EXAMPLE_MESSAGES:
        left_out = len(messages) - EXAMPLE_MESSAGES
        messages = [messages[0], *messages[1 - EXAMPLE_MESSAGES :]]
    else:
        left_out = 0
    shown = [(message["role"], shortened(_said(message))) for message in messages]
    if left_out:
        shown.insert(1, ("...", f"{left_out} messages are left out"))
    if sample.tools:
        shown.insert(0, ("tools", shortened(", ".join(tool["function"]["name"] for tool in sample.tools))))
    return Example(f"{sample.id} ({sample.license}, thinking {sample.thinking})", shown)


def _said(message: dict) -> str:
    """A message as text: reasoning, content, tool calls."""
    parts = [message.get("reasoning_content", ""), message["content"]]
    parts += [json_line(call["function"]).rstrip("\n") for call in message.get("tool_calls", ())]
    return "\n\n".join(part for part in parts if part)


def shortened(text: str) -> str:
    """The first EXAMPLE_CHARS characters, and how many more there are."""
    rest = len(text) - EXAMPLE_CHARS
    return text if rest <= 0 else f"{text[:EXAMPLE_CHARS]} ... ({rest:,} more characters)"
