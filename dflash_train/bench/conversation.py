"""An evaluation conversation being held: the next turn as the target reads it, with its own answers as history."""

from dflash_train.bench.prompts import EvalPrompt
from dflash_train.data.answers.rules import answer_message
from dflash_train.data.chat import Renderer
from dflash_train.records import Sample


class Conversation:
    """One method's conversation about one prompt. Turns count from 0; thinking holds where the prompt says nothing."""

    def __init__(self, prompt: EvalPrompt, thinking: str, renderer: Renderer):
        self.prompt, self.renderer = prompt, renderer
        self.thinking = prompt.thinking or thinking
        self.messages = list(prompt.history)

    def ask(self, turn: int) -> list[int]:
        """Ids of the history and turn `turn` with the generation prompt. Raises RenderDrop for what cannot be asked."""
        self.messages.append({"role": "user", "content": self.prompt.turns[turn]})
        sample = Sample(id=self.prompt.id, source=self.prompt.task, license="", bucket="eval", split="heldout",
                        thinking=self.thinking, messages=self.messages, tools=self.prompt.tools)  # fmt: skip
        return self.renderer.prompt_ids(sample)

    def answer(self, token_ids: list[int]) -> None:
        """The target's answer becomes history, as serving would keep it: reasoning apart, special tokens gone."""
        text = self.renderer.tokenizer.decode(token_ids, skip_special_tokens=True)
        thinking = self.renderer.has_thinking_modes and self.thinking == "on"
        self.messages.append(answer_message(text, thinking))
