"""The only chat renderer: a Sample -> the token ids the target reads, and which of them are its own answer.

The target's own template is used as it ships; the loss mask is derived from the boundary between prompt and answer,
never from `{% generation %}` tags, which stock templates do not have. Control tokens come from the template alone:
a row whose text spells one is dropped (and counted by the caller), since it would parse as one.
"""

import re
from collections.abc import Iterator
from unicodedata import normalize

from jinja2.exceptions import TemplateError

from dflash_train.records import Rendered, Sample
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import canonical_json, template_hash

PROBE = "zqprobeqz"  # text no template and no tokenizer treats specially


class RenderDrop(Exception):
    """This row cannot be rendered. `reason` is a short key to count by, `detail` says more."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def history(sample: Sample) -> list[dict]:
    """The messages before the answer: all of them, or all but a last assistant turn."""
    answered = bool(sample.messages) and sample.messages[-1]["role"] == "assistant"
    return sample.messages[:-1] if answered else sample.messages


def answer_message(text: str, thinking: bool) -> dict:
    """An answer's text as a message. With thinking, text up to </think> (all of a cut one) is reasoning_content."""
    if not thinking:
        return {"role": "assistant", "content": text}
    reasoning, _, content = text.partition("</think>")
    return {
        "role": "assistant",
        "content": content.lstrip("\n"),
        "reasoning_content": reasoning.removeprefix("<think>").strip("\n"),
    }


def unclosed_thought(text: str, in_thought: bool = False) -> bool:
    """Whether the text ends inside a <think>, given whether it began in one."""
    opened, closed = text.rfind("<think>"), text.rfind("</think>")
    return opened > closed or (in_thought and closed < 0)


class Renderer:
    """Renders samples for one tokenizer. Raises UserError for a template that cannot work."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.template_hash = template_hash(tokenizer)
        tokens = tokenizer.added_tokens_decoder.values()
        added = {token.content: token.special for token in tokens if token.content.strip()}
        self.any_control = _spelling(added)
        self.special_control = _spelling(word for word, special in added.items() if special)
        self.special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        question = [{"role": "user", "content": PROBE}]
        prompts = {thinking: self._template(question, None, thinking, True) for thinking in ("on", "off")}
        self.has_thinking_modes = prompts["on"] != prompts["off"]
        self.opens_thought = {thinking: unclosed_thought(text) for thinking, text in prompts.items()}
        self.end_token_id = self._end_token_id(question)

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Ids of the history with the generation prompt, in the sample's thinking mode. Raises RenderDrop."""
        return self._encode(self._prompt_text(sample))

    def render(self, sample: Sample) -> Rendered:
        """Full ids, and True exactly on the last assistant turn's text and its end token. Raises RenderDrop.

        An answer made by `regenerate` is taken by its recorded token ids: they are what the target emitted, and
        tokenizing its text again could give others. The scaffold a template puts before the answer (an empty
        think block with thinking off) belongs to the prompt.
        """
        prompt_text = self._prompt_text(sample)
        prompt_ids = self._encode(prompt_text)
        if sample.regen and sample.regen.get("token_ids"):
            answer_ids, written = list(sample.regen["token_ids"]), None
        elif sample.messages[-1]["role"] == "assistant":
            answer_ids, written = self._answer_ids(sample, prompt_text, prompt_ids)
        else:
            raise RenderDrop("no_supervised_token")
        token_ids = prompt_ids + answer_ids
        loss_mask = [False] * len(prompt_ids) + [True] * len(answer_ids)
        self._check(sample, prompt_ids, token_ids, loss_mask, written)
        return Rendered(sample.id, token_ids, loss_mask)

    def _check(self, sample: Sample, prompt_ids: list[int], token_ids: list[int], loss_mask: list[bool],
               written: str | None) -> None:  # fmt: skip
        """What must hold for every row, or RenderDrop: the ids start with the prompt's; the mask is one run from there
        to the end, which is an end token unless the answer was cut; and what it covers, decoded, is the answer:
        `written` by the template, or, of an answer made by `regenerate`, the message that was read from it."""
        start, message = len(prompt_ids), sample.messages[-1]
        if token_ids[:start] != prompt_ids or loss_mask != [i >= start for i in range(len(token_ids))]:
            raise RenderDrop("mask_invariant", "the mask is not one run behind the prompt")
        answer_ids = token_ids[start:]
        cut = written is None and sample.regen.get("finish_reason") == "length"
        if not cut and answer_ids[-1] not in self.special_ids:
            raise RenderDrop("mask_invariant", "the answer does not end with an end token")
        text = self.tokenizer.decode(answer_ids, skip_special_tokens=written is None)
        if written is None:
            found = answer_message(text, self.has_thinking_modes and sample.thinking == "on")
            same = all(found[key] == message.get(key) for key in found)
        else:  # tokenizers may normalise characters, and drop a space at the start
            same = normalize("NFC", text).strip() == normalize("NFC", written).strip()
            same = same and normalize("NFC", message["content"].strip()) in normalize("NFC", text)
        if not same:
            raise RenderDrop("mask_invariant", "the supervised tokens do not spell the answer")

    def _prompt_text(self, sample: Sample) -> str:
        messages = history(sample)
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise RenderDrop("no_question", "the history does not end at a user or tool turn")
        self._refuse_control_words(messages, sample.tools)
        return self._template(messages, sample.tools, sample.thinking, True)

    def _answer_ids(self, sample: Sample, prompt_text: str, prompt_ids: list[int]) -> tuple[list[int], str]:
        """The last assistant turn as the template writes it behind the prompt, up to and with its end token: ids and
        text."""
        answer = sample.messages[-1]
        self._refuse_control_words([answer], None)
        content, reasoning = answer["content"], answer.get("reasoning_content")
        if not (content.strip() or reasoning or answer.get("tool_calls")):
            raise RenderDrop("empty_answer")
        if self.has_thinking_modes and sample.thinking == "on" and not reasoning and "</think>" not in content:
            raise RenderDrop("no_reasoning", "thinking is on, and the answer has none")
        full_text = self._template(sample.messages, sample.tools, sample.thinking, False)
        end = self.tokenizer.convert_ids_to_tokens(self.end_token_id)
        if not full_text.startswith(prompt_text):
            if reasoning or answer.get("tool_calls"):
                raise RenderDrop("not_prefix_stable", "the template rewrites the prompt once the answer is there")
            return [*self._encode(content), self.end_token_id], content + end  # as serving would continue the prompt
        written, found, _ = full_text[len(prompt_text) :].partition(end)
        if not found:
            raise RenderDrop("no_end_token", "the template writes no end token behind the answer")
        # Tokens may merge across the boundary; then the answer is tokenized alone, as the target would continue.
        full_ids = self._encode(prompt_text + written + end)
        whole = full_ids[: len(prompt_ids)] == prompt_ids
        return full_ids[len(prompt_ids) :] if whole else self._encode(written + end), written + end

    def _template(self, messages: list[dict], tools: list[dict] | None, thinking: str, generation: bool) -> str:
        """The template's text: for ids transformers 5 returns a dict, and only text shows the boundary."""
        clean = [{key: value for key, value in message.items() if value is not None} for message in messages]
        for call in (call for message in clean for call in message.get("tool_calls", ())):
            if not isinstance(call["function"]["arguments"], dict):  # a template would quote a text again, or raise
                raise RenderDrop("tool_arguments", f"of {call['function']['name']} are no mapping")
        try:
            return self.tokenizer.apply_chat_template(
                clean, tools=tools or None, tokenize=False, add_generation_prompt=generation,
                enable_thinking=thinking == "on",
            )  # fmt: skip
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise RenderDrop("template_error", (str(error).splitlines() or [type(error).__name__])[0]) from None

    def _encode(self, text: str) -> list[int]:
        """No special tokens are added: a template that wants a BOS has written it."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RenderDrop("bad_unicode", "a lone surrogate") from None
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _end_token_id(self, question: list[dict]) -> int:
        """The control token the template writes behind an answer, found by rendering one."""
        text = self._template([*question, {"role": "assistant", "content": PROBE}], None, "off", False)
        behind = self._encode(text[text.rindex(PROBE) + len(PROBE) :]) if PROBE in text else []
        found = [token_id for token_id in behind if token_id in self.special_ids]
        if not found:
            raise UserError("target.chat_template", got="no end token behind an assistant turn",
                            want="a template that ends the assistant's turn with a special token")  # fmt: skip
        return found[0]

    def _refuse_control_words(self, messages: list[dict], tools: list[dict] | None) -> None:
        """Raise RenderDrop where text spells a control token. The assistant may write the model's plain markers
        (<think>, <tool_call>), the others may not."""
        for message in messages:
            pattern = self.special_control if message["role"] == "assistant" else self.any_control
            for text in _texts({key: value for key, value in message.items() if key != "role"}):
                if found := pattern.search(text):
                    raise RenderDrop("special_token", f"{found[0]} in a {message['role']} turn")
        if tools and (found := self.any_control.search(canonical_json(tools))):
            raise RenderDrop("special_token", f"{found[0]} in the tools")


def _spelling(words) -> re.Pattern:
    """A pattern that finds any of the words, or nothing at all."""
    words = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) if words else r"(?!)")


def _texts(value: object) -> Iterator[str]:
    """Every string inside a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
