"""The one exception a user is meant to read."""


class UserError(ValueError):
    """Something the user can fix. Stages print it as one message and exit 2, without a traceback.

    `field` is what is wrong (a config key, a path, an object key), `got` and `want` say how, `fix` what to type.
    """

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
