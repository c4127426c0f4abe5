"""Forms of recorded agent sessions on repositories. All messages are kept: `regenerate` cuts the window in tokens and
lets the target answer the last turn; tool results stay as recorded. A repository never falls on both sides of the
hold-out."""

import re

from dflash_train.data.forms.base import Form, Hints, as_list, called_names, word
from dflash_train.data.schemas import clean_tools
from dflash_train.data.text import Drop, Skip

# SPDX names, lower case, of licences that ask for no more than to be named.
PERMISSIVE = {
    "0bsd", "afl-3.0", "apache-2.0", "blueoak-1.0.0", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "bsl-1.0",
    "cc-by-4.0", "cc0-1.0", "isc", "mit", "mit-0", "ncsa", "postgresql", "psf-2.0", "python-2.0", "unlicense",
    "upl-1.0", "wtfpl", "zlib",
}  # fmt: skip
_COMMIT = re.compile(r"\.[0-9a-f]{6,40}\.")  # owner__name.<commit>.<what was broken>
_NUMBER = re.compile(r"-\d+$")  # owner__name-123


def is_permissive(license: object) -> bool:
    if not isinstance(license, str):
        return False
    name = license.strip().lower().removesuffix(" license").replace(" ", "-")
    return name in PERMISSIVE


def is_resolved(value: object) -> bool:
    """Whether the session solved its task. Raises Drop where the row does not say."""
    spelled = value.strip().lower() if isinstance(value, str) else value
    if spelled in (1, "1", "true"):
        return True
    if spelled in (0, -1, "0", "-1", "false"):
        return False
    raise Drop("bad_resolved_flag")


def repository(row: dict) -> str:
    """owner/name of the row's repository, lower case; from the task's name where there is no such column."""
    repo, task = word(row.get("repo")), word(row.get("instance_id"))
    if not repo and task:
        commit, number = _COMMIT.search(task), _NUMBER.search(task)
        cut = commit or number
        repo = task[: cut.start()] if cut else None
    if not repo:
        raise Drop("no_repository")
    return repo.replace("__", "/").lower()


def _session(row: dict, tools: list[dict] | None) -> dict:
    messages = as_list(row.get("messages"), "messages_not_a_list")
    if called_names(messages) and not tools:
        raise Skip("tools_not_in_row")  # a template would show calls of tools it never offered
    return {"messages": messages, "tools": tools, "group": repository(row)}


def from_open_swe(row: dict, hints: Hints) -> dict:
    """nvidia/Open-SWE-Traces: solved sessions on repositories with a permissive licence; tools are JSON texts."""
    if not is_resolved(row.get("resolved")):
        raise Skip("not_resolved")
    if not is_permissive(row.get("license")):
        raise Skip("licence_not_permissive")
    return {**_session(row, clean_tools(row.get("tools"))), "kind": word(row.get("language"))}


def from_swe_smith(row: dict, hints: Hints) -> dict:
    """SWE-bench/SWE-smith-trajectories: solved sessions; the messages are one JSON text. Only the splits `xml` and
    `ticks` can be used, whose calls are plain text: the rows of `tool` do not say which tools there were."""
    if not is_resolved(row.get("resolved")):
        raise Skip("not_resolved")
    return _session(row, clean_tools(row.get("tools")))


FORMS = {
    "open_swe": Form(from_open_swe, (("messages",), ("resolved",), ("license",)), unread=("metadata",)),
    "swe_smith": Form(from_swe_smith, (("messages",), ("resolved",), ("instance_id", "repo")), unread=("patch",)),
}
