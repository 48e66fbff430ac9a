"""How long a tier takes to give blocks, from the reads that were asked of it."""

import threading
import time
from typing import Final, NamedTuple

__all__ = ["ReadCost", "ReadMeter"]

_WINDOW_SECONDS: Final = 0.1  # of reading without a pause, after which a measurement is taken
_KEPT: Final = 0.9  # of the weight of earlier measurements, at each new one
_ALIKE: Final = 0.01  # squared coefficient of variation of window sizes below which no line is fit


class ReadCost(NamedTuple):
    """What reading takes now."""

    wait_seconds: float  # before the first block: latency, and what is queued
    block_seconds: float  # for each block after that


class ReadMeter:
    """A line through the latest measurements, seconds = latency + blocks * block_seconds.

    A measurement is a time in which blocks were asked for all along, and the blocks read in it;
    later ones weigh more. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued = 0
        self._since = 0.0  # the window: begun, and blocks read in it
        self._read = 0
        self._weight = self._n = self._t = self._nn = self._nt = 0.0  # sums over measurements

    def asked(self, blocks: int) -> None:
        with self._lock:
            if not self._queued:
                self._since, self._read = time.monotonic(), 0
            self._queued += blocks

    @property
    def queued_blocks(self) -> int:
        """Blocks that were asked for and have not ended yet."""
        return self._queued

    def ended(self, asked: int, read: int) -> None:
        """Of *asked* blocks *read* have come, the others will not."""
        with self._lock:
            self._queued -= asked
            self._read += read
            now = time.monotonic()
            seconds = now - self._since
            if self._read and (not self._queued or seconds > _WINDOW_SECONDS):
                self._measured(self._read, seconds)
                self._since, self._read = now, 0

    def cost(self) -> ReadCost | None:
        """None before the first measurement."""
        with self._lock:
            if not self._weight:
                return None
            n, t = self._n / self._weight, self._t / self._weight
            variance = self._nn / self._weight - n * n
            slope = t / n
            if variance > _ALIKE * n * n:
                covariance = self._nt / self._weight - n * t
                # Neither time nor latency can be negative, whatever the noise says.
                slope = min(max(covariance / variance, 0.0), slope)
            latency = t - slope * n
            return ReadCost(latency + self._queued * slope, slope)

    def _measured(self, blocks: int, seconds: float) -> None:
        self._weight = self._weight * _KEPT + 1
        self._n = self._n * _KEPT + blocks
        self._t = self._t * _KEPT + seconds
        self._nn = self._nn * _KEPT + blocks * blocks
        self._nt = self._nt * _KEPT + blocks * seconds
