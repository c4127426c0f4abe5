"""Forms of plain conversations and prompts: general ones first, then those of named data sets."""

from dflash_train.data.clean import normalized
from dflash_train.data.forms.base import Form, Hints, as_list, ask, with_system, word
from dflash_train.data.schemas import clean_tools
from dflash_train.data.text import PLACEHOLDERS, Drop

PROMPT_KEYS = ("prompt", "question", "query", "problem", "turns")

# ---------------------------------------------------------------- general


def from_messages(row: dict, hints: Hints) -> dict:
    """OpenAI's form; a `prompt` column that holds a message list counts too."""
    keys = (hints.prompt_field,) if hints.prompt_field else ("messages", "conversations", "prompt")
    value = next((row[key] for key in keys if row.get(key) is not None), None)
    system = row.get(hints.system_field) if hints.system_field else None
    return {
        "messages": with_system(system, as_list(value, "messages_not_a_list")),
        "tools": clean_tools(row.get("tools")),
    }


def from_native(row: dict, hints: Hints) -> dict:
    """A canonical row of this project, with its own thinking mode."""
    thinking = row.get("thinking")
    if thinking not in (None, "on", "off"):
        raise Drop("bad_thinking_mode")
    return {**from_messages(row, hints), "thinking": thinking}


def from_sharegpt(row: dict, hints: Hints) -> dict:
    """ShareGPT: from/value turns."""
    value = row.get(hints.prompt_field) if hints.prompt_field else row.get("conversations", row.get("messages"))
    turns = as_list(value, "messages_not_a_list")
    if not all(isinstance(turn, dict) for turn in turns):
        raise Drop("message_not_an_object")
    messages = [{"role": turn.get("from"), "content": turn.get("value")} for turn in turns]
    return {
        "messages": with_system(row.get(hints.system_field or "system"), messages),
        "tools": clean_tools(row.get("tools")),
    }


def from_alpaca(row: dict, hints: Hints) -> dict:
    """Instruction with optional input. The row's own answer is not read: the target answers anew."""
    instruction, extra = row.get(hints.prompt_field or "instruction"), row.get("input")
    both = all(isinstance(text, str) and text.strip() for text in (instruction, extra))
    if both and extra.strip() not in PLACEHOLDERS:
        instruction = f"{instruction}\n\n{extra}"
    return {
        "messages": ask(instruction, row.get(hints.system_field or "system")),
        "tools": clean_tools(row.get("tools")),
    }


def from_prompt(row: dict, hints: Hints) -> dict:
    """A prompt alone. Of several turns only the first can be asked, since the later ones wait for an answer."""
    keys = (hints.prompt_field,) if hints.prompt_field else PROMPT_KEYS
    value = next((row[key] for key in keys if row.get(key)), None)
    if isinstance(value, list):
        value = value[0] if value else None
    return {"messages": ask(value, row.get(hints.system_field or "system")), "tools": clean_tools(row.get("tools"))}


# ---------------------------------------------------------------- named data sets


def from_nemotron(row: dict, hints: Hints) -> dict:
    """nvidia/Nemotron-Post-Training-Dataset-v2: messages, a licence in every row. Its own `reasoning` switch is not
    read: the mode a row is answered in is the recipe's."""
    return {**from_messages(row, hints), "kind": word(row.get("category"))}


def from_openorca(row: dict, hints: Hints) -> dict:
    """Open-Orca/OpenOrca: ids say which collection a question is from ("t0.12" -> kind t0), and the same question
    stands under many ids, with other system prompts."""
    question, own_id = row.get("question"), row.get("id")
    return {
        "messages": ask(question, row.get("system_prompt")),
        "unique": normalized(question) if isinstance(question, str) else None,
        "kind": own_id.partition(".")[0] if isinstance(own_id, str) and "." in own_id else "other",
    }


def from_perfectblend(row: dict, hints: Hints) -> dict:
    """mlabonne/open-perfectblend: ShareGPT turns, with the collection they are from."""
    return {**from_sharegpt(row, hints), "kind": word(row.get("source"))}


def from_magpie(row: dict, hints: Hints) -> dict:
    """Magpie: ShareGPT turns, or only the instruction where a row has no turns."""
    if row.get("conversations"):
        return from_sharegpt(row, hints)
    return {"messages": ask(row.get("instruction"))}


FORMS = {
    "messages": Form(from_messages, (("messages", "conversations", "prompt"),)),
    "native": Form(from_native, (("messages",),)),
    "sharegpt": Form(from_sharegpt, (("conversations", "messages"),)),
    "alpaca": Form(from_alpaca, (("instruction",),)),
    "prompt": Form(from_prompt, (PROMPT_KEYS,)),
    "nemotron": Form(from_nemotron, (("messages",),)),
    "ultrachat": Form(from_messages, (("messages",),)),
    "openorca": Form(from_openorca, (("id",), ("question",)), unread=("response",)),
    "perfectblend": Form(from_perfectblend, (("conversations",),)),
    "magpie": Form(from_magpie, (("conversations", "instruction"),)),
}
