"""What a hub source would give and cost, before anything is downloaded: rows, licence, gate, revision, bytes, columns.

Rows come from the card, else from the footers of files that are here, else from the dataset viewer (when it has looked
at this very commit), else from the remote files' Parquet footers (a few KB each); each count says which it was.
"""

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyarrow import ArrowException

from dflash_train.config import SourceConfig
from dflash_train.data.forms import ColumnWatch
from dflash_train.data.hub import HubFile, Listing, hub, is_sha, kept_listing, subsets
from dflash_train.data.hub.errors import first_line
from dflash_train.data.hub.files import bytes_left, open_remote, present, read_range
from dflash_train.util.errors import UserError
from dflash_train.util.log import say

FOOTERS_AT_MOST = 128  # files whose footers are read to count rows; more would take minutes
HEAD_BYTES = 1 << 18  # of a JSON file, for its first row
BETWEEN_ROWS = re.compile(r"[\s,\[]*")
VIEWER_TIMEOUT_S = 10
PUBLIC_HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Survey:
    """One source. problem: why it cannot be read; then what is unknown is None, and what the hub tells everybody is
    still here. rows_from: what counted them. missing_bytes: to be downloaded, of num_bytes in num_files."""

    problem: UserError | None = None
    rows: int | None = None
    rows_from: str = ""
    licence: str | None = None
    gated: bool | None = None
    sha: str | None = None
    pinned: bool = False
    num_files: int = 0
    num_bytes: int = 0
    missing_bytes: int | None = None


def survey(name: str, config: SourceConfig) -> Survey:
    """Ask the hub about the source; a set pinned to a commit whose files are all here is not asked about."""
    pinned = is_sha(config.revision)
    licence = gated = sha = None
    try:
        if not pinned or not _is_here(config):
            info = hub().info(name, config)
            licence, gated, sha = _licence(info), bool(info.gated), info.sha
            hub().require_access(name, config)
        listings = hub().listings(name, config)
        check_columns(name, config, listings[0])
        counts = [count_rows(name, config, listing) for listing in listings]
    except UserError as problem:
        rows = _card_rows(name, config) if sha else None
        return Survey(problem, rows, "card" if rows is not None else "", licence, gated, sha, pinned)
    files = [(listing, file) for listing in listings for file in listing.files]
    return Survey(
        rows=None if any(rows is None for rows, _ in counts) else sum(rows for rows, _ in counts),
        rows_from=", ".join(dict.fromkeys(how for _, how in counts)),
        licence=licence,
        gated=gated,
        sha=listings[0].sha,
        pinned=pinned,
        num_files=len(files),
        num_bytes=sum(file.num_bytes for _, file in files),
        missing_bytes=sum(bytes_left(listing, file) for listing, file in files),
    )


def _is_here(config: SourceConfig) -> bool:
    """Whether a pinned source's listing and every file of it are in the cache."""
    found = [kept_listing(config, subset, config.revision) for subset in subsets(config)]
    return all(found) and all(present(listing, file) for listing in found for file in listing.files)


def _licence(info) -> str | None:
    value = info.card_data.get("license") if info.card_data else None
    return ", ".join(value) if isinstance(value, list) else value


# ---------------------------------------------------------------- rows


def count_rows(name: str, config: SourceConfig, listing: Listing) -> tuple[int | None, str]:
    """(rows or None, what counted them)."""
    if listing.rows is not None:
        return listing.rows, "card"
    all_parquet = all(file.suffix == ".parquet" for file in listing.files)
    local = [present(listing, file) for file in listing.files]
    if all_parquet and all(local):
        counts = [footer_rows(path) for path in local]
        return (None, "unknown until read") if None in counts else (sum(counts), "footers")
    if (rows := _viewer_rows(listing)) is not None:
        return rows, "viewer"
    if all_parquet and len(listing.files) <= FOOTERS_AT_MOST:
        try:
            footers = [_remote_footer(name, config, listing, file) for file in listing.files]
        except ArrowException:
            return None, "unknown until read"
        return sum(footer.num_rows for footer in footers), "footers"
    return None, "unknown until read"


def _card_rows(name: str, config: SourceConfig) -> int | None:
    """Rows as the card of a set says them that may not be listed (its card is public)."""
    card = hub().info(name, config).card_data
    infos = (card.get("dataset_info") if card else None) or []
    infos = infos if isinstance(infos, list) else [infos]
    wanted = [subset or "default" for subset in subsets(config)]
    counts = [
        split["num_examples"]
        for info in infos
        if info.get("config_name", "default") in wanted
        for split in info.get("splits", [])
        if split["name"] == config.split
    ]
    return sum(counts) if len(counts) == len(wanted) else None


def footer_rows(path: Path) -> int | None:
    """Rows of a local Parquet file, None when it is not one."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(path).num_rows
    except ArrowException:
        return None


def _remote_footer(name: str, config: SourceConfig, listing: Listing, file: HubFile):
    """pyarrow's FileMetaData of a remote Parquet file: its last 64 KB, and more where the footer is larger. Raises
    ArrowException for a file that is none."""
    import pyarrow.parquet

    def call():
        with open_remote(listing, file) as f:
            try:
                return pyarrow.parquet.read_metadata(f)
            except ArrowException as error:
                return error  # the file's fault, not the hub's: asking again would not help

    found = hub().once(("footer", listing.dataset, file.digest), lambda: hub().ask(name, config, call))
    if isinstance(found, ArrowException):
        raise found
    return found


def viewer_url() -> str | None:
    """The dataset viewer's address. Only the public hub has one."""
    from huggingface_hub import constants

    return constants.DATASETS_SERVER_ENDPOINT if constants.ENDPOINT == PUBLIC_HUB else None


def _viewer_rows(listing: Listing) -> int | None:
    """The viewer's count, when it is complete and of this commit; it is a help, so its failures are not errors."""
    from huggingface_hub.utils import build_hf_headers, get_session

    url = viewer_url()
    if url is None:
        return None
    try:
        answer = get_session().get(f"{url}/size", params={"dataset": listing.dataset}, headers=build_hf_headers(),
                                   timeout=VIEWER_TIMEOUT_S)  # fmt: skip
        if answer.status_code != 200 or answer.headers.get("X-Revision") != listing.sha:
            return None
        found = answer.json()
    except Exception:  # whatever the HTTP library of the day raises
        return None
    if found.get("partial") or found.get("pending") or found.get("failed"):
        return None
    splits = found.get("size", {}).get("splits", [])
    mine = [s["num_rows"] for s in splits if (s["config"], s["split"]) == (listing.subset, listing.split)]
    return mine[0] if len(mine) == 1 else None


# ---------------------------------------------------------------- columns


def check_columns(name: str, config: SourceConfig, listing: Listing) -> None:
    """Raises UserError when the first file's columns are not those that the source's form reads: a Parquet file's
    schema, a JSON file's first rows. Says so where that file is too damaged to tell; reading counts what it costs."""
    watch, file = ColumnWatch(name, config.form, config.options.get("prompt_field")), listing.files[0]
    local = present(listing, file)
    try:
        for row in _head_rows(name, config, listing, file, local):
            watch.see(row)
    except (zlib.error, ArrowException) as error:
        say(f"hub: {config.path}: {file.path} is damaged ({first_line(error)}); its columns are not looked at")
        return
    watch.finish()


def _head_rows(
    name: str, config: SourceConfig, listing: Listing, file: HubFile, local: Path | None
) -> Iterator[object]:
    """A Parquet file's columns as one row of nulls, or the first rows of a JSON file."""
    if file.suffix == ".parquet":
        if local is None:
            yield dict.fromkeys(_remote_footer(name, config, listing, file).schema.to_arrow_schema().names)
        else:
            yield dict.fromkeys(_local_names(local))
        return
    if local is None:
        head = read_range(name, config, listing, file, 0, min(HEAD_BYTES, file.num_bytes))
    else:
        with open(local, "rb") as f:
            head = f.read(HEAD_BYTES)
    yield from _first_rows(head, file.suffix.endswith(".gz"))


def _local_names(path: Path) -> list[str]:
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(path).names


def _first_rows(head: bytes, gzipped: bool) -> Iterator[object]:
    """The rows that stand whole in the first bytes of a JSON file; none where even the first is longer."""
    if gzipped:
        head = zlib.decompressobj(wbits=31).decompress(head)
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "ignore")
    decoder, position = json.JSONDecoder(strict=False), 0
    while True:
        position = BETWEEN_ROWS.match(text, position).end()
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return
        yield row
