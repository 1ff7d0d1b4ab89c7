"""`ReadAhead`: what an iterator gives, made beside the work on what it gave before."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["ReadAhead"]

_Item = TypeVar("_Item")


class ReadAhead(Generic[_Item]):
    """The items in their order, made by a thread, up to `count` of them before they are asked for.

    An error of theirs is raised where the item is asked for, then and ever after. `close` ends the thread: with `wait`
    after the item that it is at, otherwise at some time, as reading a pipe that nothing comes through has no end.
    """

    def __init__(self, items: Iterator[_Item], count: int, name: str) -> None:
        self._ready: queue.Queue[tuple[_Item, None] | tuple[None, BaseException]] = queue.Queue(count)
        self._is_closed = threading.Event()
        self._failure: BaseException | None = None
        # A daemon: what cannot be interrupted must not delay the end of the process.
        self._thread = threading.Thread(target=self._work, args=(items,), name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[_Item]:
        return self

    def __next__(self) -> _Item:
        if self._failure is None:
            item, failure = self._ready.get()
            if failure is None:
                return item  # type: ignore[return-value]
            self._failure = failure
        raise self._failure

    def close(self, wait: bool = False) -> None:
        """See the class."""
        self._is_closed.set()
        if wait:
            self._thread.join()

    def _work(self, items: Iterator[_Item]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:
            self._put((None, error))

    def _put(self, entry: tuple[_Item, None] | tuple[None, BaseException]) -> bool:
        """Whether anybody may still ask for it."""
        while not self._is_closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(entry, timeout=0.1)
                return True
        return False
