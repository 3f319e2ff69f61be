"""How many reads that nobody has asked for may be in flight: decided from what the drive and the guesses did.

It owns that decision and its memory. It must not know what is read.
"""

from __future__ import annotations

_WINDOW_NS = 20_000_000
_PAUSE_NS = 2_000_000_000
_MIN_SAMPLE = 64


class SpareReads:
    """Watches the drive's busy share and how many experts that were read ahead got used.

    A drive that demand keeps busy for most of the time has nothing to spare: there, each wrong guess delays a
    right read. Guesses that are mostly wrong cost slots of better experts whatever the drive does.

    Args:
        most: Reads in flight on an idle drive.
        busy_limit: Busy share of the drive from which nothing is read ahead.
        useful_limit: Share of useful guesses below which reading ahead pauses for two seconds.
        always: Never hold back (a route that is committed to will be used).
    """

    def __init__(
        self, *, most: int, busy_limit: float = 0.6, useful_limit: float = 0.5, always: bool = False
    ) -> None:
        self._most = most
        self._busy_limit = busy_limit
        self._useful_limit = useful_limit
        self._always = always
        self._busy_share = 0.0
        self._mark_ns = self._mark_busy_ns = 0
        self._issued = self._useful = 0
        self._paused_until_ns = 0
        self.pauses = 0
        """Times that guesses were too poor."""

    def reads_allowed(self, *, now_ns: int, io_busy_ns: int, issued: int, useful: int) -> int:
        """Most reads in flight, demand's included, for one more to be started.

        Args:
            now_ns: Monotonic.
            io_busy_ns: Time with reads in flight, since ever.
            issued: Experts read ahead since ever.
            useful: Of those, looked up while they were there.
        """
        if self._always:
            return self._most
        if now_ns - self._mark_ns >= _WINDOW_NS:
            share = (io_busy_ns - self._mark_busy_ns) / (now_ns - self._mark_ns)
            self._busy_share += 0.3 * (share - self._busy_share)
            self._mark_ns, self._mark_busy_ns = now_ns, io_busy_ns
        if issued - self._issued >= _MIN_SAMPLE:
            if useful - self._useful < self._useful_limit * (issued - self._issued):
                self._paused_until_ns = now_ns + _PAUSE_NS
                self.pauses += 1
            self._issued, self._useful = issued, useful
        if now_ns < self._paused_until_ns or self._busy_share >= self._busy_limit:
            return 0
        return max(1, round(self._most * (1 - self._busy_share / self._busy_limit)))
