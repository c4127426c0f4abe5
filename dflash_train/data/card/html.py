"""A card as one HTML page that needs nothing else: inline style, inline SVG, no script, no request.

The page is card.html.jinja beside this file; Jinja escapes every value, and what it shows went through `visible`.
"""

from functools import cache
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from dflash_train.data.card.markdown import number, visible
from dflash_train.data.card.parts import Card


@cache
def _page() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    by_kind = lambda parts: [(kind.__name__, list(group)) for kind, group in groupby(parts, type)]
    environment.filters |= {"visible": visible, "number": number, "by_kind": by_kind}
    return environment.from_string(Path(__file__).with_name("card.html.jinja").read_text("utf-8"))


def page(card: Card) -> str:
    """The whole page, well-formed XML after its doctype."""
    return _page().render(card=card)
