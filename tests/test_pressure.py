"""Readings of pressure over made-up trees and the real ones; the watch; and one fight in a real cgroup."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bmoe.governor import Decision, Governor, GovernorLimits
from bmoe.io.errors import MemoryBudgetError
from bmoe.io.memory_figures import available_bytes
from bmoe.io.pressure import PressureReading, PressureSensor
from bmoe.pressure_watch import CacheSizes, PressureEvent, PressureWatch
from tests.test_memory_figures import MIB, V1_MOUNT, V1_UNLIMITED, V2_MOUNT, plant, v1_group, v2_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PSI = "some avg10=0.00 avg60=0.00 avg300=0.00 total={some}\nfull avg10=0.00 avg300=0.00 total={full}\n"
PAGE = mmap.PAGESIZE


def v2_tree(**more: str) -> dict[str, str]:
    tree = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/outer/inner\n",
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {900 << 10} kB\n",
        "proc/vmstat": "nr_free_pages 5\npswpin 7\npswpout 8\nworkingset_refault_anon 1\n",
        "proc/pressure/memory": PSI.format(some=900, full=800),
        **v2_group("sys/fs/cgroup/outer/inner", limit="max", used_mib=100),
        **v2_group("sys/fs/cgroup/outer", limit=str(500 * MIB), used_mib=300, cache_mib=50),
    }
    return tree | more


def test_room_is_that_of_the_tightest_group_and_the_same_as_at_the_start(tmp_path: Path) -> None:
    root = plant(tmp_path, v2_tree())
    with PressureSensor(root) as sensor:
        reading = sensor.read()
        assert (reading.group_room_bytes, reading.group_limit_bytes) == (250 * MIB, 500 * MIB)
        assert reading.available_bytes == 900 * MIB
        assert reading.room_bytes == available_bytes(root) == 250 * MIB
        (tmp_path / "sys/fs/cgroup/outer/memory.current").write_text(f"{400 * MIB}\n")
        (tmp_path / "sys/fs/cgroup/outer/inner/memory.high").write_text(f"{130 * MIB}\n")
        assert sensor.read().room_bytes == available_bytes(root) == 30 * MIB
        (tmp_path / "sys/fs/cgroup/outer/memory.current").write_text(f"{530 * MIB}\n")
        assert sensor.read().room_bytes == available_bytes(root) == 20 * MIB


def test_v1_counts_memory_and_swap_too(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/a"
    tree = {
        "proc/self/mountinfo": V1_MOUNT,
        "proc/self/cgroup": "4:memory:/a\n",
        **v1_group(folder, limit=f"{64 * MIB}\n", used_mib=40, cache_mib=10),
        f"{folder}/memory.memsw.limit_in_bytes": V1_UNLIMITED,
        f"{folder}/memory.memsw.usage_in_bytes": f"{50 * MIB}\n",
    }
    root = plant(tmp_path, tree)
    with PressureSensor(root) as sensor:
        assert sensor.read().room_bytes == available_bytes(root) == 34 * MIB
        (tmp_path / folder / "memory.memsw.limit_in_bytes").write_text(f"{64 * MIB}\n")
        assert sensor.read().room_bytes == available_bytes(root) == 24 * MIB


def test_stalls_are_the_groups_own_where_it_tells(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/outer/inner"
    root = plant(tmp_path / "machine", v2_tree())
    with PressureSensor(root) as sensor:
        reading = sensor.read()
        assert (reading.some_stall_ns, reading.full_stall_ns) == (900_000, 800_000)
        assert not reading.stall_is_own
    own = {f"{group}/cgroup.events": "populated 1\n", f"{group}/memory.pressure": PSI.format(some=3, full=2)}
    with PressureSensor(plant(tmp_path / "own", v2_tree(**own))) as sensor:
        reading = sensor.read()
        assert (reading.some_stall_ns, reading.full_stall_ns, reading.stall_is_own) == (3000, 2000, True)


def test_refaults_are_the_groups_own_where_it_tells(tmp_path: Path) -> None:
    with PressureSensor(plant(tmp_path / "machine", v2_tree())) as sensor:
        reading = sensor.read()
        assert (reading.anon_refault_bytes, reading.file_refault_bytes) == (PAGE, None)
        assert reading.swap_in_bytes == 7 * PAGE
    stat = "anon 1\nworkingset_refault_anon 11\nworkingset_refault_file 12\n"
    tree = v2_tree(**{"sys/fs/cgroup/outer/inner/memory.stat": stat})
    with PressureSensor(plant(tmp_path / "v2", tree)) as sensor:
        reading = sensor.read()
        assert (reading.anon_refault_bytes, reading.file_refault_bytes) == (11 * PAGE, 12 * PAGE)
    tree = {
        "proc/self/mountinfo": V1_MOUNT,
        "proc/self/cgroup": "4:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.stat": "workingset_refault_file 1\ntotal_workingset_refault_file 5\n",
    }
    with PressureSensor(plant(tmp_path / "v1", tree)) as sensor:
        assert sensor.read().file_refault_bytes == 5 * PAGE


def test_what_is_missing_or_broken_is_none(tmp_path: Path) -> None:
    with PressureSensor(str(tmp_path)) as sensor:
        assert sensor.read() == PressureReading()
    broken = {
        "proc/meminfo": "MemAvailable: lots kB\nMemAvailableX: 5 kB\n",
        "proc/vmstat": "pswpin\nworkingset_refault_anon -5\n",
        "proc/pressure/memory": "some total=\nfull avg10=0\n",
        "sys/fs/cgroup/outer/memory.max": "0x10\n",
    }
    with PressureSensor(plant(tmp_path, v2_tree(**broken))) as sensor:
        assert sensor.read() == PressureReading()


def test_a_group_that_goes_away_is_forgotten(tmp_path: Path) -> None:
    sensor = PressureSensor(plant(tmp_path, v2_tree()))
    sensor.close()
    sensor.close()
    assert sensor.read() == PressureReading()


def test_this_machine_tells_its_room_and_files_do_not_pile_up() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with PressureSensor() as sensor:
        held = len(os.listdir("/proc/self/fd"))
        first, second = sensor.read(), sensor.read()
        assert len(os.listdir("/proc/self/fd")) == held
        assert first.room_bytes is not None
        if first.some_stall_ns is not None:
            assert second.some_stall_ns is not None
            assert second.some_stall_ns >= first.some_stall_ns
    assert len(os.listdir("/proc/self/fd")) == before


# The watch.


class _Scripted(Governor):
    """Decides what it was told to."""

    def __init__(self, *decisions: Decision) -> None:
        super().__init__(GovernorLimits.leaving(0))
        self.decisions = list(decisions)
        self.enough = asyncio.Event()

    def step(self, *_: object, **__: object) -> Decision:
        if self.decisions:
            return self.decisions.pop(0)
        self.enough.set()
        return Decision(action="keep", cache_bytes=0)


class _Cache:
    def __init__(self) -> None:
        self.cache_bytes = 100
        self.events: list[PressureEvent] = []
        self.asked: list[tuple[int, str]] = []

    def sizes(self) -> CacheSizes:
        return CacheSizes(cache_bytes=self.cache_bytes, held_bytes=50, least_bytes=10, most_bytes=200)

    async def resize(self, cache_bytes: int, reason: str) -> int:
        self.asked.append((cache_bytes, reason))
        await asyncio.sleep(0)
        self.cache_bytes = cache_bytes - cache_bytes % 10
        return self.cache_bytes

    def tell(self, event: PressureEvent) -> None:
        self.events.append(event)

    def watch(
        self, governor: Governor, *, now_ns: Callable[[], int] = lambda: 0, room: int | None = 5
    ) -> PressureWatch:
        return PressureWatch(
            read=lambda: PressureReading(available_bytes=room),
            governor=governor,
            sizes=self.sizes,
            resize=self.resize,
            on_event=self.tell,
            period_s=0,
            now_ns=now_ns,
        )


def shrink(to_bytes: int, why: str = "why") -> Decision:
    return Decision(action="shrink", cache_bytes=to_bytes, reason=why)


def test_the_watch_resizes_and_tells() -> None:
    async def scenario() -> None:
        cache = _Cache()
        governor = _Scripted(shrink(75), Decision(action="grow", cache_bytes=90, reason="room"))
        watch = cache.watch(governor)
        assert watch.start()
        await governor.enough.wait()
        await watch.aclose()
        await watch.aclose()
        assert cache.asked == [(75, "why"), (90, "room")]
        assert cache.events == [
            PressureEvent(kind="shrunk", from_bytes=100, cache_bytes=70, reason="why"),
            PressureEvent(kind="grown", from_bytes=70, cache_bytes=90, reason="room"),
        ]
        assert watch.error is None

    asyncio.run(scenario())


def test_the_watch_stays_off_without_sources() -> None:
    async def scenario() -> None:
        watch = _Cache().watch(_Scripted(), room=None)
        assert not watch.start()
        await watch.aclose()

    asyncio.run(scenario())


def test_complaints_are_made_once_a_minute() -> None:
    async def scenario() -> None:
        cache, now = _Cache(), [0]
        short = Decision(action="keep", cache_bytes=100, reason="nothing left")
        watch = cache.watch(_Scripted(*[short] * 4), now_ns=lambda: now[0])
        for seconds in (0, 30, 59, 60):
            now[0] = seconds * 1_000_000_000
            await watch.look()
        assert [(e.kind, e.reason) for e in cache.events] == [("short", "nothing left")] * 2

    asyncio.run(scenario())


def test_a_refused_resize_is_told_and_the_watch_goes_on() -> None:
    class Refusing(_Cache):
        async def resize(self, cache_bytes: int, reason: str) -> int:
            if cache_bytes < 20:
                raise MemoryBudgetError("too small")
            return await super().resize(cache_bytes, reason)

    async def scenario() -> None:
        cache = Refusing()
        governor = _Scripted(shrink(10), shrink(50))
        watch = cache.watch(governor)
        watch.start()
        await governor.enough.wait()
        await watch.aclose()
        assert [(e.kind, e.cache_bytes) for e in cache.events] == [("refused", 100), ("shrunk", 50)]
        assert cache.events[0].reason == "why; too small"

    asyncio.run(scenario())


def test_a_bug_ends_the_watch_and_is_told() -> None:
    class Broken(_Cache):
        def __init__(self) -> None:
            super().__init__()
            self.told = asyncio.Event()

        def tell(self, event: PressureEvent) -> None:
            super().tell(event)
            self.told.set()

        async def resize(self, cache_bytes: int, reason: str) -> int:  # noqa: ARG002 (same signature)
            raise ZeroDivisionError

    async def scenario() -> None:
        cache = Broken()
        watch = cache.watch(_Scripted(shrink(10)))
        watch.start()
        await cache.told.wait()
        await watch.aclose()
        assert isinstance(watch.error, ZeroDivisionError)
        assert [e.kind for e in cache.events] == ["refused"]

    asyncio.run(scenario())


def test_closing_waits_for_a_resize_and_survives_being_cancelled() -> None:
    async def scenario() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        class Slow(_Cache):
            async def resize(self, cache_bytes: int, reason: str) -> int:
                begun.set()
                await go_on.wait()
                return await super().resize(cache_bytes, reason)

        cache = Slow()
        watch = cache.watch(_Scripted(shrink(50)))
        watch.start()
        await begun.wait()
        closing = asyncio.create_task(watch.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        go_on.set()
        await watch.aclose()
        assert cache.cache_bytes == 50
        assert [e.kind for e in cache.events] == ["shrunk"]

    asyncio.run(scenario())


# A control group with a limit, a cache, and a neighbour.

_PLAYER = """
    import asyncio, mmap, sys
    from bmoe.governor import Governor, GovernorLimits
    from bmoe.io.anonymous_memory import AnonymousMemory
    from bmoe.io.pressure import PressureSensor
    from bmoe.pressure_watch import CacheSizes, PressureWatch
    MIB = 1 << 20
    UNIT = 16 * MIB
    MOST = 384 * MIB

    memory = AnonymousMemory(MOST)
    memory.touch(0, MOST)
    held = MOST

    async def resize(cache_bytes, reason):
        global held
        if cache_bytes < held:
            memory.give_back(cache_bytes, held)
        else:
            memory.touch(held, cache_bytes)
        held = cache_bytes
        return held

    async def main():
        sensor = PressureSensor()
        limits = GovernorLimits(
            low_bytes=64 * MIB, target_bytes=96 * MIB, high_bytes=128 * MIB, unit_bytes=UNIT,
            regrow_wait_ns=400_000_000, grow_step_ns=50_000_000,
        )
        watch = PressureWatch(
            read=sensor.read, governor=Governor(limits),
            sizes=lambda: CacheSizes(
                cache_bytes=held, held_bytes=held, least_bytes=32 * MIB, most_bytes=MOST),
            resize=resize, period_s=0.02,
            on_event=lambda e: print(e.kind, e.cache_bytes >> 20, flush=True),
        )
        assert watch.start()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await watch.aclose()
        print("end", held >> 20, flush=True)

    asyncio.run(main())
"""

_NEIGHBOUR = """
    import sys, time
    steps = []
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(int(sys.argv[1])):
        steps.append(b"x" * (16 << 20))
        time.sleep(0.06)
    print("full", flush=True)
    sys.stdin.readline()
    steps.clear()
    print("free", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """A memory group below this process's own; skips the test where none can be made."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    base, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = base / f"bmoe-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no right to make a control group: {error}")
    try:
        try:
            (group / name).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no memory controller here: {error}")
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def start_in(group: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    joined = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    child = subprocess.Popen(joined, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


@pytest.mark.slow
def test_in_a_real_group_a_neighbour_gets_its_memory_and_nobody_is_killed() -> None:
    """640 MiB for both; the cache holds 384, the neighbour takes 352 in steps and frees it."""
    with limited_group(640 * MIB) as group, contextlib.ExitStack() as stack:
        cache = stack.enter_context(start_in(group, _PLAYER))
        neighbour = stack.enter_context(start_in(group, _NEIGHBOUR, "22"))
        stack.callback(cache.kill)
        stack.callback(neighbour.kill)
        assert cache.stdout is not None
        assert neighbour.stdout is not None
        tell(neighbour)
        assert neighbour.stdout.readline() == "full\n"
        tell(neighbour)
        assert neighbour.stdout.readline() == "free\n"
        events = []
        for line in cache.stdout:
            events.append(line.split())
            if events[-1] == ["grown", "384"]:
                break
        tell(cache)
        tell(neighbour)
        assert cache.wait(5) == 0
        assert neighbour.wait(5) == 0
    kinds = [kind for kind, _ in events]
    turns = sum(a != b for a, b in itertools.pairwise(kinds))
    assert set(kinds) == {"shrunk", "grown"}
    assert turns == 1
    assert min(int(size) for _, size in events) <= 192
