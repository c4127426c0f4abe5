"""Plug-ins by name: a dict of modules, imported when they are asked for."""

import importlib

from dflash_train.util.errors import UserError


def plugin(table: dict[str, str], kind: str, field: str):
    """The module behind a plug-in name. Raises UserError listing what exists."""
    if kind not in table:
        raise UserError(field, got=kind, want=" | ".join(table))
    return importlib.import_module(table[kind])
