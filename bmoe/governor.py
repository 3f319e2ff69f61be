"""When the expert cache gives memory back, and when it takes it again.

Owns the decision, as a pure function of readings and time. Must not know where readings come from, nor how a
cache is resized (pressure_watch.py brings the three together).

What is steered by is the supply: the room that is left plus what the cache holds, which the cache's own size
does not change. The cache is too large when less than `low_bytes` would be left, and gives back until
`target_bytes` are; it may be larger when more than `high_bytes` would be left for a long time, and then takes
no more than that. Between low and high nothing happens, so neither step can cause the other, and an answer to
a change of the supply ends by itself. Stalls and refaults are a second opinion, for where the room is
wrong: heeded only near the edge, and for a while not at all once giving back has not helped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Self

if TYPE_CHECKING:
    from bmoe.io.pressure import PressureReading

MIB: Final = 1 << 20
_S: Final = 1_000_000_000

Action = Literal["keep", "shrink", "grow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GovernorLimits:
    """What the governor leaves to others, and how patient it is.

    Attributes:
        low_bytes: The cache shrinks before less room than this is left.
        target_bytes: Room that shrinking makes.
        high_bytes: Room that growing leaves.
        unit_bytes: Steps are multiples of it: the cache's memory comes in chunks.
        regrow_wait_ns: There must have been room for growing this long before the first step.
        regrow_most_ns: The most that this becomes when memory is soon wanted back: it doubles each time.
        grow_step_ns: From one step of growing to the next.
        window_ns: Over which stalls are measured, and in which giving back must show.
        stall_share: Some task waiting for memory for more of the time than this is distress.
        refault_bytes_per_s: So is more than this coming back, where stalls are not told.
        trials: Steps in answer to distress before it is taken for something else.

    Raises:
        ValueError: The three marks are not in order, or closer than a unit.
    """

    low_bytes: int
    target_bytes: int
    high_bytes: int
    unit_bytes: int = 64 * MIB
    regrow_wait_ns: int = 10 * _S
    regrow_most_ns: int = 640 * _S
    grow_step_ns: int = 2 * _S
    window_ns: int = 1 * _S
    stall_share: float = 0.1
    refault_bytes_per_s: int = 16 * MIB
    trials: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.low_bytes < self.target_bytes < self.high_bytes or self.unit_bytes <= 0:
            raise ValueError(f"marks {self.low_bytes}, {self.target_bytes}, {self.high_bytes}")
        if self.high_bytes - self.low_bytes < self.unit_bytes:
            raise ValueError(f"{self.low_bytes} and {self.high_bytes} are closer than a unit")

    @classmethod
    def leaving(cls, floor_bytes: int, *, reserve_bytes: int = 0, unit_bytes: int = 64 * MIB) -> Self:
        """Limits that leave a floor to others, of which up to half may be used.

        Args:
            floor_bytes: As automatic sizing leaves it; less than two units counts as two.
            reserve_bytes: What readings call available but is needed: dense weights in the page cache.
            unit_bytes: Of steps.
        """
        floor_bytes = max(floor_bytes, 2 * unit_bytes)
        return cls(
            low_bytes=floor_bytes // 2 + reserve_bytes,
            target_bytes=floor_bytes * 3 // 4 + reserve_bytes,
            high_bytes=floor_bytes + reserve_bytes,
            unit_bytes=unit_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do with the cache.

    Attributes:
        action: Which way.
        cache_bytes: The budget it should have.
        reason: Why, in words; of a cache that is kept, why it is not smaller though memory is short.
    """

    action: Action
    cache_bytes: int
    reason: str | None = None


class Governor:
    """Decides step by step. It has no clock and no randomness of its own.

    The number of times that it turns from giving to taking within a time T is at most
    1 + log2(regrow_most / regrow_wait) + T / (5 regrow_wait), whatever it reads: a turn needs
    `regrow_wait_ns` of quiet, which doubles when the memory was wanted back within four times of it, and
    halves only when it was not.
    """

    def __init__(self, limits: GovernorLimits) -> None:
        self._limits = limits
        self._wait_ns = limits.regrow_wait_ns
        self._supply: int | None = None
        self._fall_bytes = 0
        self._quiet_since_ns: int | None = None
        self._lowest_supply: int | None = None
        self._grown_at_ns: int | None = None
        self._step_wait_ns = self._wait_ns
        self._seen: list[tuple[int, PressureReading]] = []
        self._given_at_ns: int | None = None
        self._trials = 0
        self._deaf_until_ns: int | None = None
        self._deaf_ns = limits.regrow_wait_ns

    @property
    def regrow_wait_ns(self) -> int:
        """How long there must be room before the cache grows again, as of now."""
        return self._wait_ns

    def step(
        self,
        reading: PressureReading,
        now_ns: int,
        cache_bytes: int,
        least_bytes: int,
        most_bytes: int,
        *,
        held_bytes: int | None = None,
    ) -> Decision:
        """Looks once and decides. The caller carries the decision out before it asks again.

        Args:
            reading: Memory now.
            now_ns: When, on a clock that only goes forward.
            cache_bytes: The cache's budget.
            least_bytes: The least that it may be set to.
            most_bytes: The most.
            held_bytes: What it has taken of its budget so far; None is all. The rest is counted as taken.
        """
        lim = self._limits
        held_bytes = cache_bytes if held_bytes is None else min(held_bytes, cache_bytes)
        supply = None if reading.room_bytes is None else reading.room_bytes + held_bytes
        falling_bytes = self._follow(supply)
        stall = self._distress(reading, now_ns)
        room = None if supply is None else supply - cache_bytes
        if self._grown_at_ns is not None and now_ns - self._grown_at_ns >= 4 * self._wait_ns:
            self._grown_at_ns = None
            self._wait_ns = max(lim.regrow_wait_ns, self._wait_ns // 2)

        if room is not None and (ahead := room - falling_bytes) < lim.low_bytes:
            self._noise()
            give = _up(lim.target_bytes - ahead, lim.unit_bytes)
            expected = "" if ahead == room else f", about to be {_mib(ahead)}"
            why = f"{_mib(room)} of memory left{expected}, at least {_mib(lim.low_bytes)} is to be"
            return self._shrink(now_ns, cache_bytes, least_bytes, give, why)

        deaf = self._deaf_until_ns is not None and now_ns < self._deaf_until_ns
        if stall is not None and not deaf and (room is None or room < 2 * lim.high_bytes):
            self._noise()
            if self._given_at_ns is not None and now_ns - self._given_at_ns < lim.window_ns:
                return Decision(action="keep", cache_bytes=cache_bytes)
            return self._relieve(stall, now_ns, cache_bytes, least_bytes)
        if stall is None and self._trials and now_ns - (self._given_at_ns or 0) >= lim.window_ns:
            self._trials, self._deaf_ns = 0, lim.regrow_wait_ns  # it has helped
        return self._grow(supply, now_ns, cache_bytes, most_bytes)

    # --- giving -------------------------------------------------------------------------------------------

    def _shrink(self, now_ns: int, cache_bytes: int, least_bytes: int, give: int, why: str) -> Decision:
        target = max(least_bytes, cache_bytes - give)
        if target >= cache_bytes:
            return Decision(action="keep", cache_bytes=cache_bytes, reason=f"{why}; no more can be given")
        if self._grown_at_ns is not None:  # what was taken is wanted back
            self._grown_at_ns = None
            self._wait_ns = min(self._limits.regrow_most_ns, 2 * self._wait_ns)
        self._given_at_ns = now_ns
        self._step_wait_ns = self._wait_ns
        return Decision(action="shrink", cache_bytes=target, reason=why)

    def _relieve(self, stall: str, now_ns: int, cache_bytes: int, least_bytes: int) -> Decision:
        lim = self._limits
        if self._trials >= lim.trials:
            self._deaf_until_ns = now_ns + self._deaf_ns
            self._deaf_ns = min(lim.regrow_most_ns, 2 * self._deaf_ns)
            self._trials = 0
            return Decision(
                action="keep", cache_bytes=cache_bytes, reason=f"{stall}; giving back has not helped"
            )
        self._trials += 1
        return self._shrink(now_ns, cache_bytes, least_bytes, _up(cache_bytes // 8, lim.unit_bytes), stall)

    # --- taking -------------------------------------------------------------------------------------------

    def _grow(self, supply: int | None, now_ns: int, cache_bytes: int, most_bytes: int) -> Decision:
        lim = self._limits
        keep = Decision(action="keep", cache_bytes=cache_bytes)
        enough = supply is None or supply - cache_bytes >= lim.high_bytes + lim.unit_bytes
        if not enough or cache_bytes >= most_bytes:
            self._noise()
            return keep
        if self._quiet_since_ns is None:
            self._quiet_since_ns, self._lowest_supply = now_ns, supply
        if supply is not None:
            self._lowest_supply = min(supply, supply if self._lowest_supply is None else self._lowest_supply)
        if now_ns - self._quiet_since_ns < self._step_wait_ns:
            return keep
        take = lim.unit_bytes
        if self._lowest_supply is not None:
            over = self._lowest_supply - lim.high_bytes - cache_bytes
            take = max(take, over // 4 // lim.unit_bytes * lim.unit_bytes)
        waited_ns = now_ns - self._quiet_since_ns
        what = "no stall" if supply is None else f"more than {_mib(lim.high_bytes)} of memory left"
        self._noise()
        self._grown_at_ns = now_ns
        self._step_wait_ns = lim.grow_step_ns
        return Decision(
            action="grow",
            cache_bytes=min(most_bytes, cache_bytes + take),
            reason=f"{what} for {waited_ns / _S:.0f} s",
        )

    def _noise(self) -> None:
        """From here on, quiet is counted anew."""
        self._quiet_since_ns = self._lowest_supply = None

    # --- what readings say --------------------------------------------------------------------------------

    def _follow(self, supply: int | None) -> int:
        """By how much the supply falls from one reading to the next, if it did so twice; else 0.

        Once is noise.
        """
        before, self._supply = self._supply, supply
        fell = 0 if supply is None or before is None else max(0, before - supply)
        steady, self._fall_bytes = min(fell, self._fall_bytes), fell
        return steady

    def _distress(self, reading: PressureReading, now_ns: int) -> str | None:
        """What is wrong, in words, over the last window; None when nothing is or it is not known."""
        seen = self._seen
        seen.append((now_ns, reading))
        # The oldest that is needed is the youngest at least a window old.
        while len(seen) > 2 and now_ns - seen[1][0] >= self._limits.window_ns:
            del seen[0]
        then_ns, then = seen[0]
        if now_ns - then_ns < self._limits.window_ns:
            return None
        seconds = (now_ns - then_ns) / _S
        stall_ns = _rise(then.some_stall_ns, reading.some_stall_ns)
        if stall_ns is not None:
            share = stall_ns / _S / seconds
            whose = "this program" if reading.stall_is_own else "the machine"
            if share >= self._limits.stall_share:
                return f"{whose} waited for memory {100 * min(share, 1):.0f} % of the time"
            return None
        rises = (
            _rise(then.anon_refault_bytes, reading.anon_refault_bytes),
            _rise(then.file_refault_bytes, reading.file_refault_bytes),
            _rise(then.swap_in_bytes, reading.swap_in_bytes),
        )
        rate = sum(rise or 0 for rise in rises) / seconds
        if rate >= self._limits.refault_bytes_per_s:
            return f"{_mib(int(rate))} per second of memory are read back"
        return None


def _rise(then: int | None, now: int | None) -> int | None:
    return None if then is None or now is None or now < then else now - then


def _up(size_bytes: int, unit_bytes: int) -> int:
    return max(1, -(-size_bytes // unit_bytes)) * unit_bytes


def _mib(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB"
