"""How samples are answered: which sampling, in which batches, which answers are kept, and what is counted."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from dflash_train.config import AnswersConfig
from dflash_train.data.answers.tool_calls import tool_call_problem
from dflash_train.data.chat import answer_message, history, unclosed_thought
from dflash_train.records import Sample
from dflash_train.util.provenance import stable_hash

NGRAM = 8  # tokens; repetition is counted in these


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int


GREEDY = Sampling(0.0, 1.0, 0)


@dataclass(frozen=True)
class Prompt:
    """Row `row` of the mix as the target reads it. num_cut: messages left out behind its head; room: tokens that its
    answer may have; seed: of this prompt alone."""

    row: int
    token_ids: list[int]
    sampling: Sampling
    num_cut: int = 0
    room: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """Prompts of similar length and equal sampling, answered together under one seed."""

    index: int
    prompts: list[Prompt]
    sampling: Sampling
    seed: int


def sampling_of(sample: Sample, answers: AnswersConfig, seed: int) -> Sampling:
    """The sampling of the sample's thinking mode; a stable share of all samples is answered greedily."""
    if stable_hash(seed, "greedy", sample.id) < answers.greedy_share * 2**64:
        return GREEDY
    mode = answers.on if sample.thinking == "on" else answers.off
    return Sampling(mode.temperature, mode.top_p, mode.top_k) if mode.temperature > 0 else GREEDY


def plan_batches(prompts: list[Prompt], batch_size: int, seed: int, first_index: int = 0) -> list[Batch]:
    """Batches as a function of the prompts alone: per sampling, by falling length (memory trouble shows first)."""
    batches = []
    key = lambda sampling: (sampling.temperature, sampling.top_p, sampling.top_k)
    for sampling in sorted({prompt.sampling for prompt in prompts}, key=key):
        group = [prompt for prompt in prompts if prompt.sampling == sampling]
        group.sort(key=lambda prompt: (-len(prompt.token_ids), prompt.row))
        for start in range(0, len(group), batch_size):
            index = first_index + len(batches)
            batch_seed = stable_hash(seed, "answers", index) % 2**63
            batches.append(Batch(index, group[start : start + batch_size], sampling, batch_seed))
    return batches


def refill(lost: Callable[[int], bool], rows: Iterable[int], reserve: dict[str, list[int]],
           source: Callable[[int], str]) -> list[int]:  # fmt: skip
    """Reserve rows that stand in for lost ones of the same source, in the reserve's order: as many as are lost among
    `rows` and among the stand-ins themselves, as long as the reserve lasts. A reserve row not answered yet is not lost:
    call again once it is."""
    missing = Counter(source(row) for row in rows if lost(row))
    chosen = []
    for name, count in missing.items():
        for row in reserve.get(name, []):
            if count == 0:
                break
            chosen.append(row)
            count -= not lost(row)
    return sorted(chosen)


# ---------------------------------------------------------------- one answer


def repetition(token_ids: list[int]) -> float:
    """Share of 8-grams that occurred before in the same answer; 0.0 for short ones."""
    grams = [tuple(token_ids[i : i + NGRAM]) for i in range(len(token_ids) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def drop_reason(token_ids: list[int], finish_reason: str, tokenizer, max_repetition: float, *,
                tools: list[dict] | None = None, in_thought: bool = False) -> str | None:  # fmt: skip
    """Why an answer is not kept ("empty" | "special_token" | "unclosed_think" | "unknown_tool" | "broken_tool_call" |
    "repetition"), or None. in_thought: the prompt leaves a <think> open.

    Length-capped answers are kept: they are valid prefixes, and dropping them would be a bias against long reasoning.
    """
    body = token_ids[:-1] if finish_reason == "stop" else token_ids
    text = tokenizer.decode(body, skip_special_tokens=True)
    if not text.replace("<think>", "").replace("</think>", "").strip():
        return "empty"
    added = tokenizer.added_tokens_decoder
    if any(token_id in added and added[token_id].special for token_id in body):
        return "special_token"
    if finish_reason == "stop" and unclosed_thought(text, in_thought):
        return "unclosed_think"  # it ended before it began to answer
    if problem := tool_call_problem(text.rpartition("</think>")[2], tools):
        return problem
    return "repetition" if repetition(body) > max_repetition else None


def answered(sample: Sample, regen: dict, tokenizer, has_thinking_modes: bool) -> Sample:
    """The sample with the target's answer as its last turn; `regen` carries its exact ids beside the text."""
    text = tokenizer.decode(regen["token_ids"], skip_special_tokens=True)
    message = answer_message(text, has_thinking_modes and sample.thinking == "on")
    return replace(sample, messages=[*history(sample), message], regen=regen)


# ---------------------------------------------------------------- records


def record(prompt: Prompt, token_ids: list[int], finish_reason: str, seed: int, dropped: str | None,
           **facts: object) -> dict:  # fmt: skip
    """A journal record of an answer. seed: what it was drawn under; facts: e.g. the server, or token_ids_from."""
    return {"row": prompt.row, "dropped": dropped, "finish_reason": finish_reason, "n_prompt": len(prompt.token_ids),
            "num_cut": prompt.num_cut, "sampling": {**asdict(prompt.sampling), "seed": seed}, **facts,
            "token_ids": token_ids}  # fmt: skip


def no_answer(row: int, reason: str, detail: str = "") -> dict:
    """A journal record of a row that gets none."""
    return {"row": row, "dropped": reason, "detail": detail}


def regen_record(spec, found: dict) -> dict:
    """Who answered and how: `Sample.regen`. spec: name and fingerprint of the target; found: a journal record."""
    facts = {key: value for key, value in found.items() if key not in ("row", "dropped", "num_cut", "token_ids")}
    return {"model": spec.name, "fingerprint": spec.fingerprint, **facts, "n_tokens": len(found["token_ids"]),
            "token_ids": found["token_ids"]}  # fmt: skip


class Counts:
    """What the manifest says about the answers. `clip`: tokens that prompt and answer may have together."""

    def __init__(self, clip: int):
        self.clip = clip
        self.dropped, self.by_source = Counter(), {}
        self.finish_reasons, self.kept, self.thinking, self.capped = Counter(), Counter(), Counter(), Counter()
        self.num_tokens = self.clipped = self.windows = 0

    def drop(self, source: str, reason: str) -> None:
        self.dropped[reason] += 1
        self.by_source.setdefault(source, Counter())[reason] += 1

    def keep(self, sample: Sample) -> None:
        regen = sample.regen
        self.kept[sample.split] += 1
        self.thinking[sample.thinking] += 1
        self.capped[sample.thinking] += regen["finish_reason"] == "length"
        self.clipped += regen["finish_reason"] == "length" and regen["n_prompt"] + regen["n_tokens"] >= self.clip
        self.windows += "messages_cut" in sample.upstream
        self.num_tokens += regen["n_tokens"]

    def to_json(self) -> dict:
        share = {mode: round(self.capped[mode] / count, 4) for mode, count in self.thinking.items()}
        return {"kept": dict(self.kept), "kept_by_thinking": dict(self.thinking), "dropped": dict(self.dropped),
                "dropped_by_source": {name: dict(reasons) for name, reasons in self.by_source.items()},
                "finish_reasons": dict(self.finish_reasons), "length_capped_share": share,
                "clipped_share": round(self.clipped / max(1, self.kept.total()), 4), "windows": self.windows,
                "answer_tokens": self.num_tokens}  # fmt: skip
