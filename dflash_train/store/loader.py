"""The rows training gets: packed samples from a local disk cache, fetched and read ahead of the loop (order.py)."""

import fcntl
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dflash_train.records import DraftBatch, HiddenShard
from dflash_train.store.base import ObjectStore
from dflash_train.store.fp8 import dequantize
from dflash_train.store.order import WINDOW_SHARDS, Row
from dflash_train.store.shard import Marker, fetch_shard, read_shard
from dflash_train.util.errors import UserError

FETCH_THREADS = 4


class ShardCache:
    """Shards on local disk, least recently used ones dropped above `max_bytes`; several processes may share a folder.

    Opened shards stay mapped, not copied. Raises UserError naming the object when it is gone or its checksum is wrong.
    """

    def __init__(self, store: ObjectStore, folder: str | Path, max_bytes: int, keep_open: int = 2 * WINDOW_SHARDS):
        self.store, self.folder, self.max_bytes, self.keep_open = store, Path(folder), max_bytes, keep_open
        self._open: OrderedDict[str, HiddenShard] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, marker: Marker) -> HiddenShard:
        with self._lock:
            if marker.key in self._open:
                self._open.move_to_end(marker.key)
                return self._open[marker.key]
        name = f"{self.store.url}/{marker.key}"
        with self._file_lock(marker.shard_id):
            path = fetch_shard(self.store, marker, self.folder)
            os.utime(path)  # last used now
            shard = read_shard(path, name)
        if list(shard.sample_ids) != list(marker.sample_ids):
            raise UserError(name, got="other samples than its marker names", want=f"those of {marker.shard_id}.json")
        with self._lock:
            self._open[marker.key] = shard
            while len(self._open) > self.keep_open:
                self._open.popitem(last=False)
        self._evict(keep=path)
        return shard

    def _evict(self, keep: Path) -> None:
        """Drop old files. One that another process has mapped stays readable to it; one that it is just fetching or
        opening is locked and stays."""
        files = []
        for path in self.folder.glob("*.safetensors"):
            try:
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
            except FileNotFoundError:  # another process evicts too
                continue
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                return
            if path == keep:
                continue
            try:
                with self._file_lock(path.name.rpartition("-")[0], wait=False):
                    path.unlink(missing_ok=True)
            except BlockingIOError:
                continue
            total -= size

    @contextmanager
    def _file_lock(self, shard_id: str, wait: bool = True) -> Iterator[None]:
        """Ranks of one host download a shard once. Raises BlockingIOError when it is taken and wait is False."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f".{shard_id}.lock", "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield


class RowReader:
    """Rows -> DraftBatch. samples are cut at row_tokens; hidden rows keep the store's dtype, eight-bit ones are decoded
    to bfloat16."""

    def __init__(self, cache: ShardCache, markers: Sequence[Marker], row_tokens: int):
        self.cache, self.markers, self.row_tokens = cache, list(markers), row_tokens
        self._widths: tuple[int, int | None, torch.dtype] | None = None

    def widths(self) -> tuple[int, int | None, torch.dtype]:
        """(L*H, H of last_hidden or None, dtype), from the first shard: empty rows need them too."""
        if self._widths is None:
            shard = self.cache.get(self.markers[0])
            last = None if shard.last_hidden is None else shard.last_hidden.shape[1]
            dtype = shard.hidden.dtype if shard.hidden_scale is None else torch.bfloat16
            self._widths = shard.hidden.shape[1], last, dtype
        return self._widths

    def read(self, rows: Sequence[Row]) -> DraftBatch:
        """Pack rows into [len(rows), row_tokens]. Raises UserError naming the object that cannot be read."""
        width, last_width, dtype = self.widths()
        shape = (len(rows), self.row_tokens)
        token_ids, position_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        loss_mask, document_ids = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
        hidden = torch.zeros(*shape, width, dtype=dtype)
        last_hidden = None if last_width is None else torch.zeros(*shape, last_width, dtype=dtype)
        sample_ids = []
        for b, row in enumerate(rows):
            at = 0
            for document, (i, j) in enumerate(row.samples):
                shard = self.cache.get(self.markers[i])
                start = int(shard.offsets[j])
                size = min(int(shard.offsets[j + 1]) - start, self.row_tokens)
                here, there = slice(at, at + size), slice(start, start + size)
                token_ids[b, here], loss_mask[b, here] = shard.token_ids[there], shard.loss_mask[there]
                document_ids[b, here], position_ids[b, here] = document, torch.arange(size)
                hidden[b, here] = hidden_rows(shard, there, dtype)
                if last_hidden is not None:
                    last_hidden[b, here] = shard.last_hidden[there]
                at += size
            sample_ids.append([self.markers[i].sample_ids[j] for i, j in row.samples])
        return DraftBatch(token_ids, loss_mask, document_ids, position_ids, hidden, last_hidden, sample_ids)


def hidden_rows(shard: HiddenShard, rows: slice, dtype: torch.dtype) -> Tensor:
    """Captured rows [n, L*H] of a shard: as they are stored, or decoded to `dtype` where that is eight bits."""
    if shard.hidden_scale is None:
        return shard.hidden[rows]
    return dequantize(shard.hidden[rows], shard.hidden_scale[rows], dtype)


class Prefetcher:
    """Reads micro-batches ahead in a thread; iterating gives (rows, batch) in order, or raises what the thread met.

    The thread never outlives `close`, and a reader that dies without a word is an error, not a wait.
    """

    def __init__(self, reader: RowReader, micro_batches: Iterable[list[Row]], ahead: int, pin: bool = False):
        self._reader, self._pin = reader, pin
        self._queue: queue.Queue = queue.Queue(maxsize=max(1, ahead))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(iter(micro_batches), ahead), daemon=True)
        self._thread.start()

    def _work(self, micro_batches: Iterator[list[Row]], ahead: int) -> None:
        pool = ThreadPoolExecutor(FETCH_THREADS)
        try:
            upcoming: list[tuple[list[Row], list[Future]]] = []
            for rows in micro_batches:
                # Shards of rows further on are fetched in parallel while this one is packed.
                needed = {i for row in rows for i, _ in row.samples}
                upcoming.append((rows, [pool.submit(self._reader.cache.get, self._reader.markers[i]) for i in needed]))
                if len(upcoming) > ahead and not self._emit(*upcoming.pop(0)):
                    return
            for item in upcoming:
                if not self._emit(*item):
                    return
            self._put(StopIteration())
        except BaseException as error:  # whatever it is, the training loop must hear of it
            self._put(error)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _emit(self, rows: list[Row], fetches: list[Future]) -> bool:
        for fetch in fetches:
            fetch.result()
        batch = self._reader.read(rows)
        return self._put((rows, _pinned(batch) if self._pin else batch))

    def _put(self, item: object) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[tuple[list[Row], DraftBatch]]:
        while True:
            try:
                item = self._queue.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    raise RuntimeError("the prefetch thread ended without a result") from None
                continue
            if isinstance(item, StopIteration):
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=30)


def _pinned(batch: DraftBatch) -> DraftBatch:
    """Page-locked copies, so that the transfer to a GPU overlaps with its work."""
    pin = lambda t: t.pin_memory() if isinstance(t, Tensor) else t
    return DraftBatch(**{name: pin(value) for name, value in vars(batch).items()})
