"""The supervisor's end of a worker's pipe, where nothing waits for the worker.

A worker that is stopped reads nothing, and perhaps stopped in the middle of a message. A message larger than the
kernel's buffer (a job names every sample of its shard) would hold up whoever sends it, the rest of half a message
whoever reads it, and the time limits that end such a worker would never be looked at.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection

CLOSE_S = 2.0
"""A dead worker's pipe ends at once; one that the kernel does not let die never does."""


class Line:
    """Messages to and from one worker, with a thread each way. `news` is set whenever there is something to hear."""

    def __init__(self, connection: Connection, news: threading.Event):
        self._connection, self._news = connection, news
        self._out: queue.SimpleQueue = queue.SimpleQueue()
        self._in: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True, name="line") for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def send(self, message: object) -> None:
        """Returns at once. What a dead worker was sent is lost."""
        self._out.put(message)

    def heard(self) -> Iterator[object]:
        """The whole messages that have come by now."""
        with suppress(queue.Empty):
            while True:
                yield self._in.get_nowait()

    def last_words(self) -> Iterator[object]:
        """Of a worker that has ended: all that it has said. What was cut by its death is left out."""
        self._threads[0].join(CLOSE_S)
        yield from self.heard()

    def close(self) -> None:
        """For a worker that has ended; for one that cannot be ended the pipe stays open, and its threads with it."""
        self._out.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._connection.close()

    def _read(self) -> None:
        with suppress(EOFError, OSError):  # it has ended, perhaps in the middle of a message
            while True:
                self._in.put(self._connection.recv())
                self._news.set()
        self._news.set()

    def _write(self) -> None:
        with suppress(OSError):  # it has ended
            while (message := self._out.get()) is not None:
                self._connection.send(message)
