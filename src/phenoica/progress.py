"""Progress of long steps: a bar with rate and time left in a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """Count finished units of one long step.

    Parameters
    ----------
    total
        How many units the step has.
    what
        The name of the step, printed in front.
    unit
        The name of one unit.
    every_s
        Seconds between two lines where the output is no terminal.
    """

    def __init__(self, total: int, what: str, unit: str = "well", every_s: float = 10.0):
        self.total, self.what, self.unit, self.every_s = total, what, unit, every_s
        self.done = 0
        self._start = self._last = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit=unit)

    def __enter__(self) -> Progress:
        """Start counting."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the bar, or print the last line."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._line()

    def update(self, n: int = 1) -> None:
        """Say that `n` more units are done."""
        self.done += n
        if self._bar is not None:
            self._bar.update(n)
        elif time.monotonic() - self._last > self.every_s:
            self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        elapsed = max(self._last - self._start, 1e-9)
        rate = self.done / elapsed
        left = (self.total - self.done) / rate if rate > 0 else float("inf")
        rest = "" if self.done >= self.total else f", {left:.0f} s left"
        print(
            f"{self.what}: {self.done}/{self.total} {self.unit}s, {rate:.1f} {self.unit}s/s, {elapsed:.0f} s{rest}",
            file=sys.stderr,
            flush=True,
        )


def track(items: Iterable[T], total: int, what: str, unit: str = "well") -> Iterator[T]:
    """Yield `items`, counting each as it is finished."""
    with Progress(total, what, unit) as progress:
        for item in items:
            yield item
            progress.update()
