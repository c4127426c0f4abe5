"""Files of hub data sets: downloaded once into the cache, resumed at the byte where they broke, verified, read.

    <cache>/hub/<owner--name>/<digest><suffix>      whole and verified
    <cache>/hub/<owner--name>/<digest>.part         its first bytes: the next run goes on from there

Names are digests of the content, so an unchanged file of a newer revision is not fetched again, and no name out of a
data set becomes a path. The library's own download starts a file anew when its process was killed; this one does not.
"""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from filelock import FileLock

from dflash_train.config import SourceConfig
from dflash_train.data.hub import HubFile, Listing, folder_name, hub
from dflash_train.data.row_files import file_rows
from dflash_train.util.errors import UserError
from dflash_train.util.io import cache_dir, human_bytes
from dflash_train.util.log import Progress, say

CHUNK_BYTES = 32 << 20  # of one request: what a kill can cost
DOWNLOADS_AT_ONCE = 4


def local_path(listing: Listing, file: HubFile) -> Path:
    """Where the file lies when it is here."""
    return cache_dir("hub", folder_name(listing.dataset), file.digest.replace(":", "-") + file.suffix)


def part_path(listing: Listing, file: HubFile) -> Path:
    return local_path(listing, file).with_name(file.digest.replace(":", "-") + ".part")


def present(listing: Listing, file: HubFile) -> Path | None:
    """The whole file: ours, or the hub library's own copy (`hf download`); None when it is not here."""
    from huggingface_hub import try_to_load_from_cache

    ours = local_path(listing, file)
    if ours.exists() and ours.stat().st_size == file.num_bytes:
        return ours
    theirs = try_to_load_from_cache(listing.dataset, file.path, revision=listing.sha, repo_type="dataset")
    whole = isinstance(theirs, str) and os.path.getsize(theirs) == file.num_bytes
    return Path(theirs) if whole else None


def bytes_left(listing: Listing, file: HubFile) -> int:
    """Bytes of the file that are still to be downloaded."""
    if present(listing, file) is not None:
        return 0
    part = part_path(listing, file)
    return file.num_bytes - (part.stat().st_size if part.exists() else 0)


# ---------------------------------------------------------------- download


class _Stopped(Exception):
    """Another file's download failed, or the user pressed Ctrl-C."""


def download(sources: dict[str, SourceConfig]) -> None:
    """Fetch what the sources (pinned to a commit) still lack, several files at a time, so that no line is cut in the
    middle of mixing. Raises UserError; then the others stop too, and what has come stays."""
    wanted = {}
    for name, config in sources.items():
        for listing in hub().listings(name, config):
            for file in listing.files:
                if present(listing, file) is None:
                    wanted.setdefault(local_path(listing, file), (name, config, listing, file))
    if not wanted:
        return
    todo = list(wanted.values())
    left = sum(bytes_left(listing, file) for _, _, listing, file in todo)
    say(f"hub: downloading {human_bytes(left)} in {len(todo)} file(s) to {cache_dir('hub')}")
    progress, stop = Progress("hub", left, "bytes"), threading.Event()

    def on_bytes(count: int) -> None:
        progress.update(count)
        if stop.is_set():
            raise _Stopped

    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        jobs = [pool.submit(fetch, *item, on_bytes=on_bytes) for item in todo]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress.close()


def fetch(
    name: str,
    config: SourceConfig,
    listing: Listing,
    file: HubFile,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Path:
    """The file's path, after downloading what of it is not here. Raises UserError when the hub does not give it, gives
    other bytes than it announced, or the disk is full."""
    found = present(listing, file)
    if found is not None:
        return found
    final, part = local_path(listing, file), part_path(listing, file)
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{part}.lock"):  # another process may want the same file
        for last_try in (False, True):
            if (found := present(listing, file)) is not None:
                return found
            try:
                _append(name, config, listing, file, part, on_bytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                fix = "free some space, or DFLASH_CACHE=<a folder on a larger disk>"
                raise UserError(
                    str(final.parent), got="the disk is full", want=human_bytes(file.num_bytes), fix=fix
                ) from None
            if digest_of(part, file) == file.digest:
                os.replace(part, final)
                return final
            part.unlink()
            if last_try:
                raise UserError(
                    f"data.sources.{name}: {config.path}/{file.path}", got="twice other bytes than the hub announced",
                    want=file.digest, fix="run it again; if it stays, look for a proxy on the way",
                )  # fmt: skip
            say(f"hub: {config.path}/{file.path} arrived damaged; once more from its start")
    raise AssertionError


def _append(name: str, config: SourceConfig, listing: Listing, file: HubFile, part: Path, on_bytes) -> None:
    """Fetch from the end of `part` to the end of the file."""
    done = part.stat().st_size if part.exists() else 0
    if done:
        say(f"hub: {config.path}/{file.path} goes on at {human_bytes(done)} of {human_bytes(file.num_bytes)}")
    with open(part, "ab") as out:
        while done < file.num_bytes:
            end = min(done + CHUNK_BYTES, file.num_bytes)
            chunk = read_range(name, config, listing, file, done, end)
            out.write(chunk)
            out.flush()
            done += len(chunk)
            on_bytes(len(chunk))


def read_range(name: str, config: SourceConfig, listing: Listing, file: HubFile, start: int, end: int) -> bytes:
    """Bytes start..end-1 of a remote file, asked for again when the line is cut. Raises UserError."""

    def call() -> bytes:
        with open_remote(listing, file) as f:
            f.seek(start)
            data = f.read(end - start)
        if len(data) != end - start:
            raise ConnectionError(f"{len(data):,} of {end - start:,} bytes of {file.path} came")
        return data

    return hub().ask(name, config, call)


def open_remote(listing: Listing, file: HubFile, block_bytes: int = CHUNK_BYTES):
    """The remote file as a seekable binary file; each read is one ranged request."""
    from huggingface_hub import HfFileSystem

    path = f"datasets/{listing.dataset}@{listing.sha}/{file.path}"
    options = {"block_size": block_bytes, "cache_type": "none", "size": file.num_bytes}
    return HfFileSystem().open(path, "rb", **options)


def digest_of(path: Path, file: HubFile) -> str:
    """The local bytes' digest, of the kind the hub states for this file."""
    kind = file.digest.partition(":")[0]
    sha = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            sha.update(chunk)
    return f"{kind}:{sha.hexdigest()}"


# ---------------------------------------------------------------- read


def hub_rows(name: str, config: SourceConfig, unread: Collection[str] = ()) -> Iterator[tuple[str, dict, object]]:
    """(location, upstream, row) of every row, file by file in the set's order, downloading what is not here. unread:
    columns that nobody needs."""
    for listing in hub().listings(name, config):
        where, number = f"{config.path}/{listing.subset}/{listing.split}", 0
        for file in listing.files:
            for _, row in file_rows(fetch(name, config, listing, file), unread):
                upstream = {"dataset": config.path, "config": listing.subset, "split": listing.split, "row": number}
                yield f"{where}:{number}", upstream, row
                number += 1
