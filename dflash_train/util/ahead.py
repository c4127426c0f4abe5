"""An iterator that works in a thread, a bounded number of items before its consumer."""

import queue
import threading
from collections.abc import Iterable, Iterator

_TICK_S = 0.2
_JOIN_S = 1.0


class Ahead:
    """Items of `items`, at most `depth` of them made before they are asked for. What the iterator raises is raised in
    the consumer, in its place; leaving the context ends the thread at its next item, and waits a moment for that: what
    it does there (a claim in a store, say) should not come after what the consumer undoes next."""

    def __init__(self, items: Iterable, depth: int = 1):
        self._items, self._queue, self._closed = items, queue.Queue(depth), threading.Event()
        self.finished = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="ahead")

    def __enter__(self) -> "Ahead":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        self._thread.join(_JOIN_S)

    def __iter__(self) -> Iterator:
        while not self.finished:
            yield from self._take(block=True)

    def poll(self) -> object | None:
        """The next item if there is one by now, else None; `finished` says whether there will be more."""
        return next(self._take(block=False), None)

    def _take(self, block: bool) -> Iterator:
        try:
            kind, value = self._queue.get(block)
        except queue.Empty:
            return
        if kind == "item":
            yield value
            return
        self.finished = True
        if kind == "error":
            raise value

    def _work(self) -> None:
        try:
            for item in self._items:
                self._put("item", item)
                if self._closed.is_set():
                    return
            self._put("end", None)
        except BaseException as error:  # whatever it is, SystemExit too: the consumer must learn of it
            self._put("error", error)

    def _put(self, kind: str, value: object) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put((kind, value), timeout=_TICK_S)
            except queue.Full:
                continue
