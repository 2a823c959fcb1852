"""Work that is done ahead, in threads, while something else runs.

XLA releases the interpreter while it compiles, so the next program compiles while this one runs.
"""

import contextlib
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from fedjax_inv import platforms

T = TypeVar("T")

DEPTH = 2  # how many cells or rows are prepared ahead; each holds its data and its program


class Ahead:
    """Threads that prepare values; `take` waits for a value, or makes it where nothing has begun.

    An error of a thread is not lost: `take` then makes the value again, and so raises the error
    where it would be raised without threads.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(DEPTH, thread_name_prefix="ahead")
        self._begun: dict[Hashable, Future[Any]] = {}

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error or a signal nobody waits for what a thread is still compiling.
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def begin(self, key: Hashable, make: Callable[[], Any]) -> None:
        """Makes a value in a thread, unless that has begun already."""
        if key not in self._begun:
            # Threads do not inherit the platform that programs are traced for.
            self._begun[key] = self._pool.submit(_inside, platforms.same_context(), make)

    def take(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value that `begin` has begun to make; without one, or after an error, `make()`."""
        future = self._begun.pop(key, None)
        if future is not None and not future.cancel():
            with contextlib.suppress(Exception):
                return future.result()
        return make()


def _inside(context: contextlib.AbstractContextManager[None], make: Callable[[], T]) -> T:
    with context:
        return make()
