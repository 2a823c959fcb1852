"""Ctrl-C, SIGTERM and SIGHUP: they ask a run to stop at the end of a segment."""

import os
import signal
import sys
import threading
from types import FrameType

from tqdm import tqdm

from fedjax_inv.callbacks import Callback
from fedjax_inv.fitted import Fitted

from ..assembly import machine
from ..start import CONTINUES


class Interrupt(Callback):
    """Inside its `with` block SIGINT, SIGTERM and SIGHUP ask for a stop at the end of the segment.

    SIGHUP comes when a terminal closes; under nohup, which ignores it, it asks for nothing.
    A second signal ends the process at once, like a kill; run folders survive it. A thread waits
    for signals, because Python runs handlers only between computations.
    """

    signal = 0  # the number of the first signal, 0 before it

    def __enter__(self) -> "Interrupt":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        asking = [signal.SIGINT, signal.SIGTERM]
        asking += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
        self._before = {number: signal.signal(number, _pass) for number in asking}
        self._wakeup_before = signal.set_wakeup_fd(self._writer)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writer)  # the thread ends

    def evaluated(self, fitted: Fitted) -> str:
        """Ends the training after a signal, of whichever process."""
        if not fitted.round:  # the first network alone is nothing to keep
            return ""
        # A signal that comes while the processes agree is for the next segment.
        if asked := machine.agree(self.signal):
            self.signal = asked
        return "signal" if asked else ""

    def _listen(self) -> None:
        while number := os.read(self._reader, 1):
            self._ask(number[0])
        os.close(self._reader)

    def _ask(self, number: int) -> None:
        if self.signal:
            text = f"\nstopped at once; {CONTINUES} from the last checkpoint\n"
            os.write(2, text.encode())
            os._exit(128 + number)
        self.signal = number
        text = (
            "stopping after the next rounds, when they are evaluated and saved; press Ctrl-C again "
            "to stop at once"
        )
        tqdm.write(text, file=sys.stderr)


def _pass(number: int, frame: FrameType | None) -> None:
    del number, frame
