"""Row forms: what one row of a data set looks like, turned into a raw conversation.

    messages   {"messages": [{"role", "content", ...}], "tools"?}            OpenAI
    sharegpt   {"conversations": [{"from", "value"}], "tools"?, "system"?}
    alpaca     {"instruction", "input"?, "system"?}
    prompt     {"prompt" | "question" | "query" | "problem": text} or {"turns": [text, ...]}
    native     a canonical row of this project, with its own id, licence and thinking mode
    auto       whichever of these a row's own keys say, in the order of `detect`

    chat.py    also nemotron, ultrachat, openorca, perfectblend, magpie
    code.py    opencodeinstruct, magicoder_evol, magicoder_oss, codealpaca
    tools.py   xlam, glaive, hermes, toolace, bfcl
    agentic.py open_swe, swe_smith

A form only finds the parts; `clean.py` repairs or refuses them.
"""

from dflash_train.data.forms import agentic, chat, code, tools
from dflash_train.data.forms.base import Form, Hints, RawRow, row_id
from dflash_train.data.forms.chat import PROMPT_KEYS
from dflash_train.data.text import Drop, Skip, clean_text, parse_literal
from dflash_train.util.errors import UserError

__all__ = ["FORMS", "KNOWN_FORMS", "ColumnWatch", "Form", "RawRow", "convert", "detect", "row_id"]

FORMS: dict[str, Form] = {**chat.FORMS, **code.FORMS, **tools.FORMS, **agentic.FORMS}
KNOWN_FORMS = ("auto", *FORMS)
GENERAL_FORMS = ("auto", "prompt", "messages", "sharegpt", "alpaca")  # those that read options.prompt_field


def detect(row: dict) -> str:
    """The form that a row's keys and first turn say; the same row always gives the same answer. Raises Drop."""
    for key, usual in (("messages", "messages"), ("conversations", "sharegpt")):
        if row.get(key) is None:
            continue
        turns = parse_literal(row[key]) if isinstance(row[key], str) else row[key]
        first = turns[0] if isinstance(turns, list) and turns else None
        if key == "messages" and {"source", "license", "bucket", "split", "thinking"} <= row.keys():
            return "native"
        if isinstance(first, dict):
            return "sharegpt" if "from" in first else "messages"
        return usual
    if isinstance(row.get("prompt"), list):
        return "messages"
    if "instruction" in row:
        return "alpaca"
    if any(key in row for key in PROMPT_KEYS):
        return "prompt"
    raise Drop("unknown_form")


def convert(
    row: object,
    form: str,
    location: str,
    upstream: dict,
    *,
    prompt_field: str | None = None,
    system_field: str | None = None,
    id_field: str | None = None,
) -> RawRow:
    """One decoded row -> RawRow; a row that does not fit comes back with its `drop` or `skip` reason."""
    if not isinstance(row, dict):
        return RawRow(location, drop="row_not_an_object")
    hints = Hints(prompt_field, system_field, upstream.get("config"))
    try:
        name = form if form != "auto" else "prompt" if prompt_field else detect(row)
        parts = FORMS[name].parts(row, hints)
        raw = RawRow(location, row_id(row, id_field), upstream=upstream, **parts)
        if isinstance(row.get("license"), str) and row["license"].strip():
            raw.license = clean_text(row["license"]).strip()
        return raw
    except Skip as skip:
        return RawRow(location, skip=skip.reason)
    except Drop as drop:
        return RawRow(location, drop=drop.reason)
    except RecursionError:
        return RawRow(location, drop="nested_too_deep")


class ColumnWatch:
    """Notices that a source's columns are not the ones its form reads, as after a rename, before millions of rows are
    dropped one by one: `see` raises UserError when none of the first `patience` rows had them, `finish` when a shorter
    source had none."""

    def __init__(self, source: str, form: str, prompt_field: str | None = None, patience: int = 100):
        self.source, self.form, self.patience = source, form, patience
        if prompt_field and form not in GENERAL_FORMS:
            raise UserError(
                f"data.sources.{source}.options.prompt_field",
                got=f"{prompt_field}, with form '{form}'",
                want=f"one of the forms {', '.join(GENERAL_FORMS)}: '{form}' is the form of one data set's own columns",
                fix=f"data.sources.{source}.form=prompt",
            )
        if prompt_field:
            self.columns = ((prompt_field,),)
        elif form == "auto":
            self.columns = (("messages", "conversations", "instruction", *PROMPT_KEYS),)
        else:
            self.columns = FORMS[form].columns
        self.num_rows, self.fits, self.found = 0, False, set()

    def see(self, row: object) -> None:
        """One decoded row, whatever it is."""
        if self.fits or not isinstance(row, dict):
            return
        self.num_rows += 1
        self.found |= row.keys()
        self.fits = all(any(name in row for name in names) for names in self.columns)
        if self.num_rows >= self.patience and not self.fits:
            self.finish()

    def finish(self) -> None:
        """The source has no more rows."""
        if self.fits or not self.num_rows:
            return
        found = sorted(map(str, self.found))
        lacking = [names for names in self.columns if not set(names) & self.found] or list(self.columns)
        raise UserError(
            f"data.sources.{self.source}",
            got=f"columns {', '.join(found[:30]) or 'none'}" + (" ..." if len(found) > 30 else "")
            + f" in the first {self.num_rows} row(s), none of which has all that form '{self.form}' reads",
            want="a column " + " and one ".join(" or ".join(names) for names in lacking),
            fix=f"data.sources.{self.source}.form=... (one of {', '.join(KNOWN_FORMS)}), or form=prompt and "
            f"data.sources.{self.source}.options.prompt_field=<the column of the question>",
        )  # fmt: skip
