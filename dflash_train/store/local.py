"""A folder as an object store: whole files by temporary name + fsync + rename, first-one-wins by hard link."""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_train.config import StoreConfig
from dflash_train.util.errors import UserError
from dflash_train.util.io import free_bytes, human_bytes

_TEMPORARY = ".tmp"


@dataclass
class Options:
    """A folder has none."""


def open_store(config: StoreConfig, name: str) -> "LocalStore":
    """Store under `<store.root>/<name>/`; the root is a folder or a file:// address. Nothing is touched yet."""
    root = config.root.removeprefix("file://")
    if "://" in root:
        raise UserError("store.root", got=config.root, want="a folder, since store=local", fix="store=s3")
    return LocalStore(Path(root, name))


class LocalStore:
    """See `base.ObjectStore`. Objects are never changed in place, so `get_file` may hand out a hard link."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).absolute()
        self.url = f"file://{self.folder}"
        self._unfinished: set[Path] = set()

    def check(self) -> None:
        probe = f"check-{uuid.uuid4().hex[:12]}"
        with self._named_errors():
            self.put_bytes(probe, b"probe", if_absent=True)
            self.delete(probe)

    def put_file(self, key: str, path: Path) -> None:
        with self._named_errors(), self._temporary(key) as temporary:
            shutil.copyfile(path, temporary)
            self._flush(temporary, os.path.getsize(path))
            os.replace(temporary, self._path(key))
            _flush_folder(self._path(key).parent)

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        with self._named_errors(), self._temporary(key) as temporary:
            temporary.write_bytes(data)
            self._flush(temporary, len(data))
            if if_absent:
                try:
                    os.link(temporary, self._path(key))  # the one call that is both whole and exclusive
                except FileExistsError:
                    return False
            else:
                os.replace(temporary, self._path(key))
            _flush_folder(self._path(key).parent)
            return True

    def get_bytes(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(key) from None

    def get_file(self, key: str, path: Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{_TEMPORARY}")
        try:
            try:
                os.link(self._path(key), temporary)  # no second copy of a terabyte
            except (FileNotFoundError, NotADirectoryError):
                raise KeyError(key) from None
            except OSError:  # another file system, or one without hard links
                shutil.copyfile(self._path(key), temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def size(self, key: str) -> int | None:
        try:
            return self._path(key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        entries = self._entries(prefix)
        return sorted((key, stat.st_size) for key, stat in entries if not key.endswith(_TEMPORARY))

    def older(self, prefix: str, older_than_s: float) -> Sequence[str]:
        latest = time.time() - older_than_s
        entries = self._entries(prefix)
        return sorted(key for key, stat in entries if stat.st_mtime <= latest and not key.endswith(_TEMPORARY))

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def free_bytes(self) -> int | None:
        return free_bytes(self.folder)

    def drop_unfinished(self, older_than_s: float) -> int:
        latest = time.time() - older_than_s
        old = [key for key, stat in self._entries("") if key.endswith(_TEMPORARY) and stat.st_mtime <= latest]
        self.delete_many(old)
        return len(old)

    def abort_unfinished(self) -> int:
        unfinished = list(self._unfinished)
        for temporary in unfinished:
            temporary.unlink(missing_ok=True)
        return len(unfinished)

    def _entries(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """(key, stat) of every file under the prefix, temporary ones too. Only its folder is read; a file that goes
        meanwhile is left out. Strings, not paths: a store has hundreds of thousands of files."""
        start = prefix.rpartition("/")[0]
        folders = [f"{start}/" if start else ""]
        while folders:
            inside = folders.pop()
            try:
                with os.scandir(self.folder / inside) as entries:
                    for entry in entries:
                        key = inside + entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(f"{key}/")
                        elif key.startswith(prefix):
                            with suppress(FileNotFoundError):
                                yield key, entry.stat()
            except (FileNotFoundError, NotADirectoryError):
                continue

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        assert all(part and part not in (".", "..") for part in parts), f"bad key {key!r}"
        return self.folder.joinpath(*parts)

    @contextmanager
    def _temporary(self, key: str) -> Iterator[Path]:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{_TEMPORARY}")
        self._unfinished.add(temporary)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
            self._unfinished.discard(temporary)

    def _flush(self, path: Path, want_bytes: int) -> None:
        with open(path, "rb") as f:
            os.fsync(f.fileno())
        got = path.stat().st_size
        if got != want_bytes:
            raise OSError(errno.EIO, f"wrote {got} of {want_bytes} bytes")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise  # the caller's own file is missing: a mistake of ours, not of the folder
        except OSError as error:
            raise UserError(
                f"store.root ({self.url})",
                got=f"{error.strerror or error} ({human_bytes(self.free_bytes())} free)",
                want="a folder that can be written, on a file system with hard links",
                fix="free some space, or store.root=<another folder>",
            ) from error


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
