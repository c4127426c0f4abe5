"""Refusing a config value: the two helpers that every check of a config uses."""

from dflash_train.util.errors import UserError


def require(ok: bool, name: str, *, got: object, want: object, fix: str | None = None) -> None:
    """Raise UserError for config key `name` unless ok."""
    if not ok:
        raise UserError(name, got=got, want=want, fix=fix)


def require_choice(value: str, choices: tuple[str, ...], name: str) -> None:
    """Raise UserError for config key `name` unless value is one of choices."""
    require(value in choices, name, got=value, want=" | ".join(choices))
