"""Eight fixed questions that are asked before the bill starts: two for each of thinking on and off, greedy and sampled.

A wrong template, a wrong thinking mode, a quantized or broken server show in their answers. One odd answer may be
chance, so what a sound target may do now and then stops the run only when half of the answers it can occur in have it.
"""

from dataclasses import dataclass

from dflash_train.config import AnswersConfig
from dflash_train.data.answers.rules import GREEDY, Prompt, repetition, sampling_of
from dflash_train.data.answers.windows import Limits
from dflash_train.data.chat import Renderer
from dflash_train.records import Sample
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import stable_hash

MAX_TOKENS = 256
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train covers 120 km in 1.5 hours. How fast is it on average?",
    "Name three differences between a list and a tuple in Python.",
)


@dataclass(frozen=True)
class Probe:
    """One question, how it was asked, and the answer that came."""

    sample: Sample
    prompt: Prompt
    token_ids: list[int]
    finish_reason: str

    @property
    def name(self) -> str:
        how = "greedy" if self.prompt.sampling == GREEDY else "sampled"
        return f"thinking {self.sample.thinking}, {how}: {self.sample.messages[0]['content']}"


def probe_questions(
    renderer: Renderer, answers: AnswersConfig, limits: Limits, seed: int
) -> list[tuple[Sample, Prompt]]:
    """The eight, rendered. Their rows are -1..-8. Raises RenderDrop where the template takes no plain question."""
    out = []
    for i in range(8):
        messages = [{"role": "user", "content": QUESTIONS[(i // 2 + 2 * (i % 2)) % 4]}]
        sample = Sample(f"probe/{i}", "probe", "", "probe", "probe", "on" if i % 2 else "off", messages)
        ids = renderer.prompt_ids(sample)
        sampled = AnswersConfig(greedy_share=0.0, on=answers.on, off=answers.off)
        sampling = GREEDY if i < 4 else sampling_of(sample, sampled, seed)
        room = min(MAX_TOKENS, limits.max_new)
        out.append((sample, Prompt(-1 - i, ids, sampling, 0, room, stable_hash(seed, sample.id) % 2**31)))
    return out


def check_probes(probes: list[Probe], renderer: Renderer, stop_ids: tuple[int, ...], num_ids: int,
                 max_repetition: float) -> dict[str, str]:  # fmt: skip
    """{probe: what is odd about it} of the odd ones that were let off. Raises UserError naming what was found."""
    tolerated, on, off = {}, of_mode("on", probes, renderer), of_mode("off", probes, renderer)
    for fault, concerned, found in (
        ("not a possible answer", probes, lambda p: impossible(p, stop_ids, num_ids)),
        ("empty", probes, lambda p: not text_of(p, renderer).strip()),
        ("the same words over and over", probes, lambda p: repetition(p.token_ids) > max_repetition),
        ("thinking is on, and there is no reasoning", on, lambda p: no_thought(p, renderer)),
        ("thinking is off, and there is reasoning", off, lambda p: "think>" in text_of(p, renderer)),
    ):
        bad = [probe for probe in concerned if found(probe)]
        if bad and (fault == "not a possible answer" or 2 * len(bad) >= len(concerned)):
            shown = text_of(bad[0], renderer)[:200]
            raise UserError(
                "the first eight answers", got=f"{fault}: {len(bad)} of {len(concerned)}, e.g. [{bad[0].name}] -> "
                f"{shown!r} ({bad[0].finish_reason})", want="answers as this target gives them",
                fix="check the server's model, its quantization and its reasoning options, and this target's chat "
                "template; data.answers.probe=false goes on regardless")  # fmt: skip
        tolerated |= {probe.name: fault for probe in bad}
    return tolerated


def of_mode(thinking: str, probes: list[Probe], renderer: Renderer) -> list[Probe]:
    """Those asked in this mode, where the template has modes."""
    return [probe for probe in probes if renderer.has_thinking_modes and probe.sample.thinking == thinking]


def text_of(probe: Probe, renderer: Renderer) -> str:
    return renderer.tokenizer.decode(probe.token_ids, skip_special_tokens=True)


def no_thought(probe: Probe, renderer: Renderer) -> bool:
    """An answer that was cut may still have been thinking; a finished one must have closed its thought."""
    text = text_of(probe, renderer)
    if probe.finish_reason == "length":
        return not (renderer.opens_thought["on"] or "<think>" in text)
    return "</think>" not in text


def impossible(probe: Probe, stop_ids: tuple[int, ...], num_ids: int) -> bool:
    """Ids the target does not have, a "stop" that is none, or a "length" that is not that long."""
    ids, stopped = probe.token_ids, probe.finish_reason == "stop"
    ended = bool(ids) and ids[-1] in stop_ids
    return any(not 0 <= i < num_ids for i in ids) or (not ended if stopped else len(ids) != probe.prompt.room)
