"""What fits: prompts counted in the target's own tokens, and long agentic ones cut at message boundaries."""

from dataclasses import dataclass, replace

from dflash_train.config import AnswersConfig
from dflash_train.data.chat import RenderDrop, Renderer
from dflash_train.records import Sample
from dflash_train.util.provenance import canonical_json

WINDOWED = ("agentic",)
"""Buckets whose long histories are cut; a long prompt of any other is dropped."""


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens. context: prompt and answer together; max_prompt, min_prompt: of the rendered prompt; window:
    of a rendered agentic prompt; max_new: of an answer."""

    context: int
    min_prompt: int
    max_prompt: int
    window: int
    max_new: int

    def room(self, num_prompt_tokens: int) -> int:
        """Tokens that the answer to such a prompt may have."""
        return min(self.max_new, self.context - num_prompt_tokens)


def limits_of(answers: AnswersConfig, max_context: int) -> Limits:
    """max_context: of the target's position embedding."""
    context = min(answers.clip, max_context)
    longest = context - min(answers.answer_room, answers.max_new_tokens, context // 2)
    return Limits(context, answers.min_prompt_tokens, longest, min(answers.window_tokens, longest),
                  answers.max_new_tokens)  # fmt: skip


def fit(sample: Sample, renderer: Renderer, limits: Limits) -> tuple[list[int], int]:
    """(ids of the prompt, messages cut out of its middle). Raises RenderDrop: "too_short", "too_long", or why
    it cannot be rendered."""
    num_cut = 0
    if sample.bucket in WINDOWED:
        num_cut = first_guess(sample, renderer, limits.window)
    ids = renderer.prompt_ids(cut_middle(sample, num_cut))
    while sample.bucket in WINDOWED and len(ids) > limits.window:
        num_cut = next((cut for cut in legal_cuts(sample) if cut > num_cut), None)
        if num_cut is None:
            raise RenderDrop("too_long", "its head and last turns alone")
        ids = renderer.prompt_ids(cut_middle(sample, num_cut))
    if len(ids) > limits.max_prompt:
        raise RenderDrop("too_long")
    if len(ids) < limits.min_prompt:
        raise RenderDrop("too_short")
    return ids, num_cut


def cut_middle(sample: Sample, num_cut: int) -> Sample:
    """The sample without the `num_cut` messages that follow its head."""
    head = head_length(sample.messages)
    messages = sample.messages[:head] + sample.messages[head + num_cut :]
    return replace(sample, messages=messages) if num_cut else sample


def head_length(messages: list[dict]) -> int:
    """Messages up to and with the first user turn: the system turn and the task, which every window keeps."""
    return next((i + 1 for i, message in enumerate(messages) if message["role"] == "user"), len(messages))


def legal_cuts(sample: Sample) -> list[int]:
    """Numbers of messages that may be cut behind the head, rising. What then follows the head is an assistant turn:
    never a tool result without its call, never two user turns in a row."""
    head = head_length(sample.messages)
    return [0] + [i for i, message in enumerate(sample.messages[head:]) if i and message["role"] == "assistant"]


def first_guess(sample: Sample, renderer: Renderer, window: int) -> int:
    """The smallest cut whose texts alone fit the window: at most a window of tokens is counted, however long the row.
    The template's own tokens come on top, so the rendered prompt decides."""
    messages, cuts = sample.messages, legal_cuts(sample)
    head = head_length(messages)
    size = sum(num_tokens(message, renderer) for message in messages[:head])
    best = cuts[-1]
    for i in range(len(messages) - 1, head - 1, -1):
        size += num_tokens(messages[i], renderer)
        if size > window:
            break
        if i - head in cuts:
            best = i - head
    return best


def num_tokens(message: dict, renderer: Renderer) -> int:
    calls = canonical_json(message["tool_calls"]) if message.get("tool_calls") else ""
    text = message["content"] + (message.get("reasoning_content") or "") + calls
    return len(renderer.tokenizer.encode(text, add_special_tokens=False))
