"""What can go wrong with a data set on the hub: one clear message a kind, a bounded wait for what passes by itself.

Kinds: no token, no access, bad token, no such set, disabled, no such revision, offline by choice, no connection, too
many requests, a hub that is down. `ask` repeats the last three.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from dflash_train.config import SourceConfig
from dflash_train.util.errors import UserError
from dflash_train.util.log import say
from dflash_train.util.retry import backoff_s, retry_after_s

ATTEMPTS = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
PASSING_STATUS = (408, 429, 500, 502, 503, 504)
# The hub's client has changed its HTTP library twice, so its network errors are known by the package that raises them.
HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "aiohttp")
pause = time.sleep

Answer = TypeVar("Answer")


class Unreachable(UserError):
    """There is no way to the hub at all: no other source on it needs to be tried."""


def ask(name: str, config: SourceConfig, call: Callable[[], Answer], retry_network: bool = True) -> Answer:
    """`call()`, again after a pause when the hub is busy or the line is cut (retry_network=False: only once more, for a
    line that may not be there at all). Raises UserError, of one kind."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except UserError:
            raise
        except Exception as error:  # they come from five libraries; `explain` tells them apart
            last = attempt == ATTEMPTS or (http_status(error) is None and not retry_network and attempt > 1)
            if last or not passes(error):
                raise explain(name, config, error) from error
            asked_s = retry_after_s(response_header(error, "Retry-After"))
            wait_s = min(max(backoff_s(attempt, FIRST_PAUSE_S, LONGEST_PAUSE_S), asked_s), LONGEST_PAUSE_S)
            say(f"hub: {config.path}: {first_line(error)}; again in {wait_s:.1f} s")
        pause(wait_s)
    raise AssertionError


def passes(error: Exception) -> bool:
    """Whether the same request may well succeed later."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return False
    return http_status(error) in PASSING_STATUS or (http_status(error) is None and is_network(error))


def explain(name: str, config: SourceConfig, error: Exception) -> UserError:
    """The error as one message: field, got, want, fix."""
    from huggingface_hub import constants, errors, get_token

    page, without = dataset_page(config.path), f"'~data.sources.{name}'"
    status, kinds = http_status(error), tuple(type(e) for e in chain(error))
    found = lambda kind: any(issubclass(k, kind) for k in kinds)
    say_so = lambda got, want, fix, kind=UserError: kind(
        f"data.sources.{name}: data set {config.path}", got=got, want=want, fix=fix
    )
    if found(errors.OfflineModeIsEnabled):
        return say_so("HF_HUB_OFFLINE is set, and it is not all here", "the hub", "unset HF_HUB_OFFLINE", Unreachable)
    if found(errors.GatedRepoError):
        return no_token(name, config) if get_token() is None else no_access(name, config)
    if found(errors.RevisionNotFoundError):
        want = "a commit, tag or branch of it"
        return say_so(f"no revision {config.revision}", want,
                      f"data.sources.{name}.revision=null takes the newest; {page}/commits lists them")  # fmt: skip
    if status == 401 and not found(errors.RepositoryNotFoundError):
        return say_so("the hub does not know this token (401)", "a valid one", "hf auth login, or another HF_TOKEN")
    if found(errors.RepositoryNotFoundError) and Path(config.path).expanduser().exists():
        return say_so(f"there is none of that name on {constants.ENDPOINT}, but a file here", "the owner/name of one",
                      f"data.sources.{name}.kind=files")  # fmt: skip
    if found(errors.RepositoryNotFoundError):
        return say_so(f"there is none of that name on {constants.ENDPOINT}, or it is private", "the owner/name of one",
                      f"data.sources.{name}.path=<owner/name>, or leave it out: {without}")  # fmt: skip
    if found(errors.DisabledRepoError):
        return say_so("the hub has disabled it", "a data set that can be read", f"leave it out: {without}")
    if status == 429:
        return say_so(f"too many requests (429), after {ATTEMPTS} tries", "an answer",
                      "run it again in some minutes (what is downloaded stays); HF_TOKEN raises the limit")  # fmt: skip
    if status is not None and status >= 500:
        return say_so(f"the hub answers {status}, after {ATTEMPTS} tries", "an answer",
                      "run it again later: what is downloaded stays")  # fmt: skip
    if status is None and is_network(error):
        return say_so(f"no connection to {constants.ENDPOINT}, or it breaks ({first_line(error)})", "the hub",
                      "check the network and HTTPS_PROXY, or HF_ENDPOINT=<a mirror>", Unreachable)  # fmt: skip
    return say_so(first_line(error), "a data set this machine can read", f"see {page}, or leave it out: {without}")


def no_token(name: str, config: SourceConfig) -> UserError:
    """The set is gated and nobody is logged in."""
    return UserError(
        f"data.sources.{name}: data set {config.path}",
        got="it is gated, and there is no token",
        want="its licence accepted, and a token of that account",
        fix=f"accept its licence at {dataset_page(config.path)}, then HF_TOKEN=<your token> or `hf auth login`",
    )


def no_access(name: str, config: SourceConfig) -> UserError:
    """The set is gated and the token's account is not on its list."""
    return UserError(
        f"data.sources.{name}: data set {config.path}",
        got="it is gated, and this token's account may not read it",
        want="its licence accepted by that account",
        fix=f"accept its licence at {dataset_page(config.path)} (some owners answer by hand, later); a fine-grained "
        "token also needs the right to read public gated repositories",
    )


def dataset_page(dataset: str | None) -> str:
    """Where a person reads about the set and accepts its licence."""
    return f"https://huggingface.co/datasets/{dataset}"


# ---------------------------------------------------------------- looking at errors


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def http_response(error: Exception):
    """What the hub answered, where the error came from an answer; else None."""
    from huggingface_hub.errors import HfHubHTTPError

    return next((e.response for e in chain(error) if isinstance(e, HfHubHTTPError)), None)


def http_status(error: Exception) -> int | None:
    response = http_response(error)
    return None if response is None else response.status_code


def response_header(error: Exception, name: str) -> str | None:
    response = http_response(error)
    return None if response is None else response.headers.get(name)


def is_network(error: Exception) -> bool:
    """A connection that could not be made, was cut, or fell silent."""
    return any(
        isinstance(e, ConnectionError | TimeoutError) or type(e).__module__.split(".")[0] in HTTP_LIBRARIES
        for e in chain(error)
    )


def first_line(error: BaseException) -> str:
    """'TypeOfError: its first line', of the first in the chain that says something."""
    for e in chain(error):
        lines = [line for line in str(e).splitlines() if line.strip()]
        if lines:
            return f"{type(e).__name__}: {lines[0].strip()}"
    return type(error).__name__
