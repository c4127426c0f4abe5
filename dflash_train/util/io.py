"""Files that are either whole or absent: atomic writes, JSON lines, checksums, byte counts."""

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_train.util.errors import UserError


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it is fsynced and renamed to `path`, else removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; on success it takes that name, else it is removed.

    When another process finished first, its folder stays and ours goes.
    """
    folder = Path(folder)
    # Not named by the process id alone: in a container it is the same again, and a killed run's folder may lie there.
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_unused(parent: str | Path, unfinished_s: float, finished_s: float) -> list[str]:
    """Remove folders of `atomic_folder` in `parent` that nothing has touched for so long: what killed runs left
    unfinished, and what has its name. Returns the names."""
    removed = []
    for folder in sorted(path for path in Path(parent).glob("*") if path.is_dir()):
        unfinished = folder.name.startswith(".") and folder.name.endswith(".tmp")
        with suppress(FileNotFoundError):  # another process removes it, too, or gives it its name
            touched = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - touched > (unfinished_s if unfinished else finished_s):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
    return removed


@contextmanager
def full_disk_said(folder: str | Path, fix: str) -> Iterator[None]:
    """A disk that fills up under what is done here is a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(str(folder), got="the disk is full", want="room for what is written", fix=fix) from None


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: str | Path, value: object) -> None:
    """Write `value` atomically as indented, key-sorted UTF-8 JSON."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode("utf-8"))


def read_json(path: str | Path) -> dict:
    """Read one JSON object. Raises UserError naming the file when it is missing or cut."""
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(str(path), got="no such file", want="a JSON file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(str(path), got=f"not valid JSON ({error})", fix="delete it and run its stage again") from None


def json_line(value: object) -> str:
    """One compact JSON line, keys in insertion order, newline included."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> int:
    """Write rows atomically, one JSON object a line; returns their number."""
    count = 0
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as f:
        for row in rows:
            f.write(json_line(row))
            count += 1
        f.flush()
    return count


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """Yield the rows of a file this project wrote. Raises UserError naming file and line on a bad one."""
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}", got=f"not valid JSON ({error})", want="one object a line") from None


def count_lines(path: str | Path) -> int:
    with open(path, "rb") as f:
        return sum(1 for _ in f)


def sha256_file(path: str | Path) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def free_bytes(path: str | Path) -> int:
    """Free bytes on the file system that would hold `path` (which need not exist yet)."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def same_disk(one: str | Path, other: str | Path) -> bool:
    """Whether both paths (which need not exist yet) are on one file system."""
    devices = []
    for path in (Path(one).absolute(), Path(other).absolute()):
        while not path.exists():
            path = path.parent
        devices.append(path.stat().st_dev)
    return devices[0] == devices[1]


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KB' (powers of 1000 as disks and buckets are sold)."""
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if abs(count) < 1000 or unit == "PB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def cache_dir(*parts: str) -> Path:
    """Folder for downloaded and converted files: $DFLASH_CACHE, else ~/.cache/dflash_train."""
    root = os.environ.get("DFLASH_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "dflash_train")
    return Path(root, *parts)
