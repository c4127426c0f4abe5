"""From manifests and row counts to the sections of a data card: what was read, what became of it, what the rows are.

`mix` is the manifest of the mix; `answers` that of its answers, or None before there are any.
"""

from collections import Counter
from itertools import chain

from dflash_train.data.card.origins import makers, provenance
from dflash_train.data.card.parts import LENGTH_COLUMNS, Bars, Card, Section, Table, histograms, length_facts, share
from dflash_train.data.card.rows import MIN_CONFIDENCE, RowCounts

TOP_LANGUAGES = 12


def build_card(mix: dict, answers: dict | None, counts: RowCounts) -> Card:
    """The card of a mix, or of its answers."""
    written = counts.by("split")
    figures = [
        (f"{written['train']:,}", "training rows"),
        (f"{written['heldout']:,}", "held-out rows"),
        (
            f"{sum(source['read'] for source in mix['sources'].values()):,}",
            f"rows read from {len(mix['sources'])} sources",
        ),
        (f"{mix['dropped'].get('duplicate', 0):,}", "exact duplicates dropped"),
        (f"{mix['dropped'].get('near_duplicate', 0):,}", "near duplicates dropped"),
        (f"{sum(mix['contamination'].values()):,}", "contaminated rows dropped"),
    ]
    sections = [funnel(mix, answers, counts), composition(counts), languages(counts), lengths(counts)]
    subtitle = "Prompts, before the target answers them"
    if answers:
        subtitle = f"Prompts and the answers that {answers['identity']['target']} gave"
        figures += [(f"{answers['answer_tokens']:,}", "answer tokens")]
        sections.append(answered(answers, counts))
    sections += [drops(mix), duplicates(mix), contamination(mix), makers(mix), provenance(mix, answers)]
    sections.append(
        Section("Rows to look at", ["The first training rows of each source, shortened."], examples(counts))
    )
    return Card(f"Data card: {mix['recipe']}", subtitle, figures, sections)


# ---------------------------------------------------------------- what became of the rows


def funnel(mix: dict, answers: dict | None, counts: RowCounts) -> Section:
    """read -> kept -> taken, and -> answered where there are answers."""
    answered_rows = counts.by("source")
    by_source = {name: _steps(entry) for name, entry in mix["sources"].items()}
    if answers:
        by_source = {name: {**steps, "answered": answered_rows[name]} for name, steps in by_source.items()}
    total: Counter = sum((Counter(steps) for steps in by_source.values()), Counter())
    steps = [step for step in next(iter(by_source.values())) if total[step] or step not in OPTIONAL_STEPS]
    wanted = {name: "all" if entry["wanted"] is None else entry["wanted"] for name, entry in mix["sources"].items()}
    rows = [[name, wanted[name], *[found[step] for step in steps]] for name, found in by_source.items()]
    rows.append(["all sources", None, *[total[step] for step in steps]])
    left = [
        ("read", total["read"]),
        ("looked at", total["read"] - total["not chosen"] - total["not needed"]),
        ("kept", total["kept"]),
        ("taken and held out", total["taken"] + total["held out"]),
    ]
    if answers:
        left.append(("answered", total["answered"]))
    return Section("From source to mix", _funnel_notes(mix, steps), [
        Bars("Rows left after each step", left), Table("", ["source", "asked for", *steps], rows)
    ])  # fmt: skip


OPTIONAL_STEPS = ("not chosen", "not needed", "reserve")


def _steps(entry: dict) -> dict[str, int]:
    """A source's rows, step by step."""
    return {
        "read": entry["read"],
        "not chosen": sum(entry["skipped"].values()),
        "not needed": entry["not_needed"],
        "dropped": sum(entry["dropped"].values()) + sum(entry["filtered"].values()),
        "kept": entry["kept"],
        "taken": entry["written"]["train"],
        "reserve": entry["written"].get("reserve", 0),
        "held out": entry["written"]["heldout"],
    }


def _funnel_notes(mix: dict, steps: list[str]) -> list[str]:
    says = {
        "not chosen": "Not chosen: left out by the source's own rule.",
        "not needed": "Not needed: too far back in hash order to be looked at.",
        "dropped": "Dropped: cannot be used, or filtered.",
        "reserve": "Reserve: takes the place of rows that get no answer.",
        "answered": "Answered: training and held-out rows whose answer is kept.",
    }
    notes = [" ".join(sentence for step, sentence in says.items() if step in steps)]
    if mix["limit"]:
        notes.append(f"limit={mix['limit']}: only the head of the final order is written.")
    return notes


def drops(mix: dict) -> Section:
    """Reasons by source."""
    by_source = {name: Counter(entry["dropped"]) + Counter(entry["filtered"]) for name, entry in mix["sources"].items()}
    reasons = _matrix("Rows dropped", "reason", mix["dropped"], by_source)
    repaired = {name: entry["repaired"] for name, entry in mix["sources"].items()}
    repairs = _matrix("Rows repaired and kept", "repair", set(chain(*repaired.values())), repaired)
    skipped = {name: entry["skipped"] for name, entry in mix["sources"].items()}
    skips = _matrix("Rows not chosen", "rule", set(chain(*skipped.values())), skipped)
    lost = {name: entry["lost"] for name, entry in mix["sources"].items()}
    losses = _matrix("Passed over in damaged files", "reason, unit", set(chain(*lost.values())), lost)
    parts = [table for table in (reasons, losses, skips, repairs) if table.rows]
    return Section("What was dropped, and why", [] if parts else ["Nothing."], parts)


def _matrix(title: str, corner: str, keys, by_source: dict[str, dict[str, int]]) -> Table:
    """Keys down, the sources that have any across, and their sum."""
    names = [name for name, counts in sorted(by_source.items()) if sum(counts.values())]
    cells = [[key, *[by_source[name].get(key, 0) or None for name in names]] for key in sorted(keys)]
    return Table(title, [corner, "all", *names], [[row[0], sum(filter(None, row[1:])), *row[1:]] for row in cells])


def duplicates(mix: dict) -> Section:
    """Whose rows were dropped because whose were kept, exact and near ones."""
    near = mix["config"]["data"]["near_duplicates"]
    tables = [
        _pairs("The same texts, but for case and white space", mix["duplicates"]),
        _pairs(
            f"Nearly the same text (Jaccard of 5-word shingles at least {near['threshold']})", mix["near_duplicates"]
        ),
    ]
    notes = [
        "One line a source whose rows were dropped; the columns say whose row was kept. A held-out row stays, else "
        "that of the earliest source in the recipe, and of one source the first in hash order."
    ]
    looked = ", ".join(near["buckets"])
    notes.append(f"Near duplicates are looked for in: {looked}." if looked else "Near duplicates are not looked for.")
    return Section("Duplicates", notes, [table for table in tables if table.rows])


def _pairs(title: str, pairs: dict[str, dict[str, int]]) -> Table:
    keepers = sorted(set(chain(*pairs.values())))
    rows = [[name, sum(kept.values()), *[kept.get(k) for k in keepers]] for name, kept in pairs.items()]
    return Table(title, ["dropped from", "all", *[f"kept in {k}" for k in keepers]], rows)


def contamination(mix: dict) -> Section:
    """Rows that held an evaluation item."""
    if not mix["contamination"]:
        return Section("Contamination", ["The recipe names no evaluation set to check against (data.decontaminate)."])
    by_source = {name: entry["contaminated"] for name, entry in mix["sources"].items()}
    tasks = {**mix["contamination"], **dict.fromkeys(chain(*by_source.values()))}
    rows = [[task, found["items"], found["unchecked"]] for task, found in sorted(mix["evaluation_items"].items())]
    notes = [
        "Prompts that held an item of an evaluation set. None of them is in it.",
        f"Word runs of more than two items are prompt wrappers and count for none ({mix['evaluation_wrappers']:,} of "
        "them). Not looked for: items that say too little, or no more than a wrapper.",
    ]
    return Section("Contamination", notes, [
        _matrix("Rows that held one", "evaluation set", tasks, by_source),
        Table("Items of the evaluation sets", ["evaluation set", "items", "not looked for"], rows),
    ])  # fmt: skip


# ---------------------------------------------------------------- what the rows are


def composition(counts: RowCounts) -> Section:
    """Written rows by source, bucket, licence and thinking mode."""
    by_source = counts.by("source", split="train")
    total = by_source.total()
    bars = Bars("Training rows by source", by_source.most_common())
    tables = []
    for field in ("bucket", "license"):
        train, held = counts.by(field, split="train"), counts.by(field, split="heldout")
        title = {"bucket": "bucket", "license": "licence"}[field]
        rows = [[str(name), count, share(count, total), held[name]] for name, count in train.most_common()]
        tables.append(Table(f"By {title}", [title, "training", "share", "held out"], rows))
    modes = counts.by("bucket", "thinking", split="train")
    rows = []
    for bucket in sorted({bucket for bucket, _ in modes}):
        on, off = modes[bucket, "on"], modes[bucket, "off"]
        rows.append([bucket, on, off, share(on, on + off)])
    on, off = (counts.by("thinking", split="train")[mode] for mode in ("on", "off"))
    rows.append(["all", on, off, share(on, on + off)])
    tables.append(Table("Thinking, training rows", ["bucket", "on", "off", "share on"], rows))
    return Section("What is in it", [], [bars, *tables])


def languages(counts: RowCounts) -> Section:
    """The language of the users' turns, on the head of the shuffled training rows."""
    total, by_language = counts.languages.total(), Counter()
    for (_, language), count in counts.languages.items():
        by_language[language] += count
    top = [name for name, _ in by_language.most_common(TOP_LANGUAGES)]
    rows = [[name, by_language[name], share(by_language[name], total)] for name in top]
    if rest := total - sum(by_language[name] for name in top):
        rows.append([f"{len(by_language) - len(top)} others", rest, share(rest, total)])
    everything = total == counts.by("split")["train"]
    whole = "every training row" if everything else f"the first {total:,} training rows of the shuffled mix"
    notes = [
        f"Told by py3langid from the users' turns of {whole}. Unsure: the best guess has less than "
        f"{100 * MIN_CONFIDENCE:.0f} %, as it is for single words, names and formulas; zxx: no language. Short "
        "prompts are often told wrongly."
    ]
    return Section("Languages", notes, [Table("", ["ISO 639", "rows", "share"], rows)])


def lengths(counts: RowCounts) -> Section:
    """Characters of the prompts, all and by source."""
    whole: Counter = sum(counts.prompt_chars.values(), Counter())
    rows = [[name, *length_facts(lengths)] for name, lengths in sorted(counts.prompt_chars.items())]
    by_source = Table("Characters of a prompt, by source", ["source", *LENGTH_COLUMNS], rows)
    return Section(
        "Length of the prompts", [], [*histograms({"All messages of a prompt": whole}, "characters"), by_source]
    )


def answered(answers: dict, counts: RowCounts) -> Section:
    """Tokens by thinking mode, how answers ended, and which were not kept."""
    modes = [mode for mode in ("on", "off") if counts.answer_tokens[mode]]
    by_mode: Counter = Counter()
    for (_, mode, reason), count in counts.finish.items():
        by_mode[mode, reason] += count
    reasons = sorted({reason for _, reason in by_mode})
    rows = []
    for mode in modes:
        total, cut = counts.answer_tokens[mode].total(), by_mode[mode, "length"]
        rows.append([f"thinking {mode}", total, *[by_mode[mode, reason] for reason in reasons], share(cut, total)])
    parts = histograms({f"Answers, thinking {mode}": counts.answer_tokens[mode] for mode in modes}, "tokens")
    parts += histograms({f"Prompts, thinking {mode}": counts.prompt_tokens[mode] for mode in modes}, "tokens")
    parts.append(Table("How the kept answers ended", ["", "answers", *reasons, "cut by the limit"], rows))
    parts.append(_matrix("Rows that got no answer, or one that is not kept", "reason", answers["dropped"],
                         answers["dropped_by_source"]))  # fmt: skip
    rows = [[name, *(count[key] for key in ("lost", "refilled", "not_refilled"))]
            for name, count in answers["refill"].items()]  # fmt: skip
    parts.append(Table("Training rows lost, and reserve rows in their place", ["source", "lost", "refilled", "short"],
                       rows))  # fmt: skip
    parts = [part for part in parts if not isinstance(part, Table) or part.rows]
    return Section("The answers", ["Answers cut by the limit are kept: they are what the target says so far."], parts)


def examples(counts: RowCounts) -> list:
    """By bucket, so that like stands beside like."""
    found = sorted((bucket, source) for source, rows in counts.examples.items() for bucket in {b for b, _ in rows})
    return [example for bucket, source in found for b, example in counts.examples[source] if b == bucket]
