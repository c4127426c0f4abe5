"""The pure parts of regeneration: which prompts are answered together and how, and which answers are kept."""

from collections import Counter
from dataclasses import asdict, dataclass, replace

from dflash_train.config import AnswersConfig
from dflash_train.data.chat import history
from dflash_train.records import Sample
from dflash_train.util.provenance import stable_hash

NGRAM = 8


@dataclass(frozen=True)
class Sampling:
    """How one batch is sampled; temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int


GREEDY = Sampling(0.0, 1.0, 0)


@dataclass(frozen=True)
class Prompt:
    """Row `row` of the mix (training rows first, then held-out ones) as the target reads it."""

    row: int
    token_ids: list[int]
    sampling: Sampling


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


def plan_batches(prompts: list[Prompt], batch_size: int, seed: int) -> list[Batch]:
    """Batches as a function of the prompts alone: per sampling, by falling length (memory trouble shows first)."""
    batches = []
    key = lambda sampling: (sampling.temperature, sampling.top_p, sampling.top_k)
    for sampling in sorted({prompt.sampling for prompt in prompts}, key=key):
        group = [prompt for prompt in prompts if prompt.sampling == sampling]
        group.sort(key=lambda prompt: (-len(prompt.token_ids), prompt.row))
        for start in range(0, len(group), batch_size):
            index = len(batches)
            batch_seed = stable_hash(seed, "answers", index) % 2**63
            batches.append(Batch(index, group[start : start + batch_size], sampling, batch_seed))
    return batches


def repetition(token_ids: list[int]) -> float:
    """Share of 8-grams that occurred before in the same answer; 0.0 for short ones."""
    grams = [tuple(token_ids[i : i + NGRAM]) for i in range(len(token_ids) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def drop_reason(token_ids: list[int], finish_reason: str, tokenizer, max_repetition: float) -> str | None:
    """Why an answer is not kept ("empty" | "special_token" | "repetition"), or None. Length-capped ones are kept:
    they are valid prefixes, and dropping them would be a bias against long answers."""
    body = token_ids[:-1] if finish_reason == "stop" else token_ids
    if not tokenizer.decode(body, skip_special_tokens=True).strip():
        return "empty"
    added = tokenizer.added_tokens_decoder
    if any(token_id in added and added[token_id].special for token_id in body):
        return "special_token"
    return "repetition" if repetition(body) > max_repetition else None


def answer_message(text: str, thinking: bool) -> dict:
    """The answer as a message. With thinking, text up to </think> (all of a cut one) is reasoning_content."""
    if not thinking:
        return {"role": "assistant", "content": text}
    reasoning, _, content = text.partition("</think>")
    return {
        "role": "assistant",
        "content": content.lstrip("\n"),
        "reasoning_content": reasoning.removeprefix("<think>").strip("\n"),
    }


def answered(sample: Sample, regen: dict, tokenizer, has_thinking_modes: bool) -> Sample:
    """The sample with the target's answer as its last turn; `regen` carries its exact ids beside the text."""
    text = tokenizer.decode(regen["token_ids"], skip_special_tokens=True)
    message = answer_message(text, has_thinking_modes and sample.thinking == "on")
    return replace(sample, messages=[*history(sample), message], regen=regen)


def regen_record(spec, sampling: dict, finish_reason: str, token_ids: list[int]) -> dict:
    """Who answered and how: `Sample.regen`. spec: name and fingerprint of the target."""
    return {
        "model": spec.name,
        "fingerprint": spec.fingerprint,
        "sampling": sampling,
        "finish_reason": finish_reason,
        "n_tokens": len(token_ids),
        "token_ids": token_ids,
    }


def sampling_record(batch: Batch) -> dict:
    """What `regen.sampling` says."""
    return {**asdict(batch.sampling), "seed": batch.seed}


class Counts:
    """What the manifest says about the answers."""

    def __init__(self, dropped: dict[int, str]):
        self.dropped = Counter(dropped.values())
        self.finish_reasons, self.kept, self.thinking, self.capped = Counter(), Counter(), Counter(), Counter()
        self.num_tokens = 0

    def keep(self, sample: Sample) -> None:
        self.kept[sample.split] += 1
        self.thinking[sample.thinking] += 1
        self.capped[sample.thinking] += sample.regen["finish_reason"] == "length"
        self.num_tokens += sample.regen["n_tokens"]

    def to_json(self) -> dict:
        share = {mode: round(self.capped[mode] / count, 4) for mode, count in self.thinking.items()}
        return {"kept": dict(self.kept), "kept_by_thinking": dict(self.thinking), "dropped": dict(self.dropped),
                "finish_reasons": dict(self.finish_reasons), "length_capped_share": share,
                "answer_tokens": self.num_tokens}  # fmt: skip
