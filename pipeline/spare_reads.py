"""How many reads that nobody has asked for may be in flight: decided from how the guesses turned out.

It owns that decision and its memory. It must not know what is read.
"""

from __future__ import annotations

_PAUSE_NS = 2_000_000_000
_MIN_SAMPLE = 64


class SpareReads:
    """Watches how many experts that were read ahead got used.

    The drive is idle between a layer's last read and the next layer's routing, however busy it is otherwise:
    nothing is read ahead beside demand, and few reads at a time, since demand has to wait for those that are
    in flight. A wrong guess costs that wait, and the slot of what ranked lowest; it takes rather few right
    ones to make up for it.

    Args:
        most: Reads in flight, demand's included.
        useful_limit: Share of useful guesses below which reading ahead pauses for two seconds.
        always: Never hold back (a route that is committed to will be used).
    """

    def __init__(self, *, most: int, useful_limit: float = 0.3, always: bool = False) -> None:
        self._most = most
        self._useful_limit = useful_limit
        self._always = always
        self._issued = self._useful = 0
        self._paused_until_ns = 0
        self.pauses = 0
        """Times that guesses were too poor."""

    def reads_allowed(self, *, now_ns: int, issued: int, useful: int) -> int:
        """Most reads in flight, demand's included, for one more to be started.

        Args:
            now_ns: Monotonic.
            issued: Experts read ahead since ever.
            useful: Of those, routed to before they were evicted.
        """
        if self._always:
            return self._most
        if issued - self._issued >= _MIN_SAMPLE:
            if useful - self._useful < self._useful_limit * (issued - self._issued):
                self._paused_until_ns = now_ns + _PAUSE_NS
                self.pauses += 1
            self._issued, self._useful = issued, useful
        return 0 if now_ns < self._paused_until_ns else self._most
