"""The one exception a user is meant to read."""


class UserError(ValueError):
    """Something the user can fix. Stages print it as one message and end with `exit_code`, without a traceback.

    `field` is what is wrong (a config key, a path, an object key), `got` and `want` say how, `fix` what to type.
    """

    exit_code = 2
    """2: final, the same command gives the same message. 1: the same command may do better later."""

    def __init__(self, field: str, *, got: object = None, want: object = None, fix: str | None = None):
        self.field, self.got, self.want, self.fix = field, got, want, fix
        lines = [field]
        if got is not None:
            lines.append(f"  got:  {got}")
        if want is not None:
            lines.append(f"  want: {want}")
        if fix is not None:
            lines.append(f"  fix:  {fix}")
        super().__init__("\n".join(lines))
