"""The backends behind the seam: the same bytes, the same manners when things go wrong."""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import liburing  # type: ignore[import-untyped]  # as in bmoe.io.uring
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmoe.io import DirectFile, NullBackend, SlotMemory, open_backend
from bmoe.io import uring as uring_module
from bmoe.io.errors import BackendError, UsageError
from bmoe.io.eventfd_backend import EventfdBackend
from bmoe.io.testing import Fault, FaultyBackend
from bmoe.io.threads import ThreadsBackend
from bmoe.io.uring import UringBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from bmoe.io.backend import ReadBackend, Target
    from bmoe.io.backend_choice import BackendChoice

    Run = Callable[[Coroutine[Any, Any, None]], None]

FILE_BYTES = (3 << 20) + 1234
SLOT_BYTES = 256 << 10


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("backends") / "data.bin"
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


@pytest.fixture(scope="module")
def contents(data: Path) -> bytes:
    return data.read_bytes()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on each kind of loop."""
    return asyncio.run if request.param == "asyncio" else uvloop.run


@pytest.fixture(params=["uring", "threads"])
def choice(request: pytest.FixtureRequest) -> BackendChoice:
    """Each real backend; io_uring only where the machine has it."""
    name: BackendChoice = request.param
    if name == "uring":
        try:
            asyncio.run(open_backend("uring", 1).aclose())
        except BackendError as error:
            pytest.skip(str(error))
    return name


class Consumer:
    """A backend with slots to read into, and what came back."""

    def __init__(self, backend: ReadBackend, path: Path, slots: int, *, register: bool = True) -> None:
        self.backend = backend
        self.opened = DirectFile.open(str(path))
        self.memory = SlotMemory(SLOT_BYTES, slots, chunk_bytes=4 * SLOT_BYTES)
        self.targets: list[Target] = []
        self.buffers: list[int] = []
        while (made := self.memory.populate_next_chunk()) is not None:
            chunk = self.memory.chunk_view(made.start // self.memory.chunk_slots)
            self.buffers.append(backend.add_buffer(chunk, register=register))
            self.targets += [backend.prepare(self.buffers[-1], self.memory.slot_view(s)) for s in made]
        self.file_id = backend.add_file(self.opened)
        self.results: dict[int, int] = {}
        self.batches: list[list[int]] = []
        self._changed = asyncio.Event()
        backend.start(asyncio.get_running_loop(), self.on_complete)

    def on_complete(self, tags: list[int], results: list[int]) -> None:
        self.batches.append(tags)
        for tag, result in zip(tags, results, strict=True):
            assert tag not in self.results
            self.results[tag] = result
        self._changed.set()

    def read(self, slot: int, offset_bytes: int) -> None:
        self.backend.read(self.file_id, offset_bytes, self.targets[slot], slot)

    async def wait_results(self, count: int) -> dict[int, int]:
        while len(self.results) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.results

    def slot(self, slot: int, length_bytes: int = SLOT_BYTES) -> bytes:
        return bytes(self.memory.slot_view(slot)[:length_bytes])


@asynccontextmanager
async def consumer(
    backend: ReadBackend, path: Path, slots: int = 16, *, register: bool = True
) -> AsyncIterator[Consumer]:
    made = Consumer(backend, path, slots, register=register)
    try:
        yield made
    finally:
        await backend.aclose()
        made.opened.close()
        made.memory.close()


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_backends_deliver_the_bytes_of_the_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any block-aligned window, past the end of the file too, reads as plain pread does."""
    path = tmp_path_factory.getbasetemp() / "property.bin"
    if not path.exists():
        path.write_bytes(os.urandom(FILE_BYTES))
    contents = path.read_bytes()
    with DirectFile.open(str(path)) as opened:
        block = opened.block_bytes
    windows = data.draw(
        st.lists(
            st.tuples(st.integers(0, FILE_BYTES // block), st.integers(1, SLOT_BYTES // block)),
            min_size=1,
            max_size=24,
        )
    )

    async def scenario(backend: ReadBackend, register: bool) -> None:
        async with consumer(backend, path, len(windows), register=register) as c:
            for tag, (at, blocks) in enumerate(windows):
                view = c.targets[tag].view[: blocks * block]
                target = backend.prepare(c.targets[tag].buffer_id, view)
                backend.read(c.file_id, at * block, target, tag)
            backend.submit()
            results = await c.wait_results(len(windows))
            for tag, (at, blocks) in enumerate(windows):
                expected = contents[at * block : (at + blocks) * block]
                assert results[tag] == len(expected)
                assert c.slot(tag, len(expected)) == expected

    def source(file_id: int, offset_bytes: int, view: memoryview) -> int:
        del file_id
        piece = contents[offset_bytes : offset_bytes + view.nbytes]
        view[: len(piece)] = piece
        return len(piece)

    asyncio.run(scenario(NullBackend(3, source=source), register=True))
    asyncio.run(scenario(open_backend("threads", 5), register=True))
    asyncio.run(scenario(open_backend("auto", 5), register=True))
    uvloop.run(scenario(open_backend("auto", 64), register=False))


def test_reads_beyond_the_queue_depth_wait_and_all_complete(
    run: Run, choice: BackendChoice, data: Path, contents: bytes
) -> None:
    async def scenario() -> None:
        async with consumer(open_backend(choice, 4), data, 16) as c:
            # Rounds whose completions start at every place of the completion ring.
            for rounds in range(5):
                for slot in range(16 - rounds):
                    c.read(slot, (slot + rounds) * 4096)
                assert c.backend.in_flight == 16 - rounds
                c.backend.submit()
                results = await c.wait_results(16 - rounds)
                assert set(results.values()) == {SLOT_BYTES}
                for slot in range(16 - rounds):
                    at = (slot + rounds) * 4096
                    assert c.slot(slot) == contents[at : at + SLOT_BYTES]
                c.results.clear()
            statistics = c.backend.statistics()
            assert statistics.max_in_flight <= 4
            assert statistics.reads == statistics.completions == 16 + 15 + 14 + 13 + 12
            assert statistics.read_bytes == statistics.reads * SLOT_BYTES
            assert (statistics.errors, c.backend.in_flight) == (0, 0)

    run(scenario())


def test_one_bad_read_of_many_fails_alone(run: Run, choice: BackendChoice, data: Path) -> None:
    """A descriptor that is not open: the kernel says so for this read and serves the others."""

    async def scenario() -> None:
        async with consumer(open_backend(choice, 8), data, 8) as c:
            stranger = DirectFile.open(str(data))
            bad = c.backend.add_file(stranger)
            stranger.close()
            for slot in range(8):
                c.backend.read(bad if slot == 3 else c.file_id, 0, c.targets[slot], slot)
            c.backend.submit()
            results = await c.wait_results(8)
            assert results.pop(3) == -errno.EBADF
            assert set(results.values()) == {SLOT_BYTES}
            assert c.backend.statistics().errors == 1

    run(scenario())


def test_injected_eio_is_one_of_many(run: Run, choice: BackendChoice, data: Path) -> None:
    async def scenario() -> None:
        faulty = FaultyBackend(open_backend(choice, 4), {5: Fault(errno=errno.EIO)})
        async with consumer(faulty, data, 12) as c:
            for slot in range(12):
                c.read(slot, slot * 4096)
            c.backend.submit()
            results = await c.wait_results(12)
            assert results.pop(5) == -errno.EIO
            assert set(results.values()) == {SLOT_BYTES}

    run(scenario())


def test_delayed_and_held_completions_come_when_the_script_says() -> None:
    """The fake's own manners: `after_reads` counts later reads, `hold` waits for `release`."""

    async def scenario() -> None:
        script = {0: Fault(after_reads=2), 1: Fault(hold=True, short_bytes=7)}
        faulty = FaultyBackend(NullBackend(1), script)
        got: list[tuple[int, int]] = []
        three = asyncio.Event()

        def on_complete(tags: list[int], results: list[int]) -> None:
            got.extend(zip(tags, results, strict=True))
            if len(got) == 3:
                three.set()

        faulty.start(asyncio.get_running_loop(), on_complete)
        memory = SlotMemory(4096, 4)
        buffer_id = faulty.add_buffer(memory.chunk_view(0))
        for tag in range(4):
            faulty.read(0, 0, faulty.prepare(buffer_id, memory.slot_view(tag)), tag)
        faulty.submit()
        await three.wait()
        assert got == [(2, 4096), (0, 4096), (3, 4096)]
        assert (faulty.held, faulty.in_flight) == ([1], 1)
        faulty.release()
        assert got[3:] == [(1, 7)]
        await faulty.aclose()
        memory.close()

    asyncio.run(scenario())


def test_close_waits_for_what_the_kernel_has_and_cancels_the_rest(
    run: Run, choice: BackendChoice, data: Path, contents: bytes
) -> None:
    async def scenario() -> None:
        async with consumer(open_backend(choice, 4), data, 16) as c:
            for slot in range(16):
                c.read(slot, slot * 4096)
            c.backend.submit()
            await c.backend.aclose()
            await c.backend.aclose()
            assert sorted(c.results) == list(range(16))
            assert [c.results[slot] for slot in range(4)] == [SLOT_BYTES] * 4
            assert {c.results[slot] for slot in range(4, 16)} == {-errno.ECANCELED}
            assert c.slot(3) == contents[3 * 4096 : 3 * 4096 + SLOT_BYTES]
            assert c.backend.in_flight == 0
            with pytest.raises(RuntimeError, match="closed"):
                c.read(0, 0)

    run(scenario())


def test_two_closes_at_once_both_wait(run: Run, choice: BackendChoice, data: Path) -> None:
    async def scenario() -> None:
        async with consumer(open_backend(choice, 4), data, 8) as c:
            for slot in range(8):
                c.read(slot, slot * 4096)
            c.backend.submit()
            left: list[int] = []

            async def close() -> None:
                await c.backend.aclose()
                left.append(c.backend.in_flight)

            await asyncio.gather(close(), close(), close())
            assert left == [0, 0, 0]
            assert sorted(c.results) == list(range(8))

    run(scenario())


def test_close_works_when_the_loop_is_gone(choice: BackendChoice, data: Path) -> None:
    """A session may end in another loop than the one that read."""
    backend = open_backend(choice, 4)
    kept: list[Consumer] = []

    async def begin() -> None:
        kept.append(Consumer(backend, data, 4))
        for slot in range(4):
            kept[0].read(slot, 0)
        backend.submit()

    asyncio.run(begin())
    asyncio.run(backend.aclose())
    assert kept[0].results == dict.fromkeys(range(4), SLOT_BYTES)
    kept[0].opened.close()
    kept[0].memory.close()


def test_closing_an_unstarted_backend_leaks_no_descriptor(choice: BackendChoice) -> None:
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(open_backend(choice, 4).aclose())
    assert len(os.listdir("/proc/self/fd")) == before


def test_misuse_is_told(choice: BackendChoice, data: Path) -> None:
    async def scenario() -> None:
        backend = open_backend(choice, 4)
        async with consumer(backend, data, 8) as c:
            with pytest.raises(ValueError, match="does not lie in buffer"):
                backend.prepare(c.buffers[0], c.memory.slot_view(7))
            c.read(0, 0)
            with pytest.raises(RuntimeError, match="in flight"):
                c.read(0, 0)
            with pytest.raises(RuntimeError, match="in flight"):
                backend.start(asyncio.get_running_loop(), c.on_complete)
            backend.submit()
            await c.wait_results(1)
            assert backend.add_file(c.opened) == c.file_id
            assert backend.file(c.file_id) is c.opened

    asyncio.run(scenario())
    backend = open_backend(choice, 4)
    scratch = memoryview(bytearray(4096))
    target = backend.prepare(backend.add_buffer(scratch, register=False), scratch)
    with pytest.raises(RuntimeError, match="not started"):
        backend.read(0, 0, target, 0)
    asyncio.run(backend.aclose())
    with pytest.raises(UsageError, match="expected auto, uring or threads"):
        open_backend("libaio", 4)  # type: ignore[arg-type]  # what a caller might pass
    for depth in (0, -1):
        with pytest.raises(ValueError, match="queue_depth"):
            open_backend(choice, depth)


def test_no_memory_is_freed_or_reused_while_the_kernel_writes(
    run: Run, choice: BackendChoice, data: Path, contents: bytes
) -> None:
    """Under a storm of collections and allocations, when only the backend holds the targets."""

    async def scenario() -> None:
        async with consumer(open_backend(choice, 8), data, 32) as c:
            for repeat in range(4):
                c.results.clear()
                for slot in range(32):
                    view = c.targets[slot].view[:]
                    passing = c.backend.prepare(c.targets[slot].buffer_id, view)
                    c.backend.read(c.file_id, (slot * 7 + repeat) * 4096, passing, slot)
                    del passing, view
                c.backend.submit()
                litter: list[object] = []
                while len(c.results) < 32:
                    litter = [bytearray(b"\xff" * 16) for _ in range(500)]
                    litter += [memoryview(bytearray(SLOT_BYTES)) for _ in range(4)]
                    litter.append(litter)  # garbage that only the collector gets
                    gc.collect()
                    await asyncio.sleep(0)
                del litter
                for slot in range(32):
                    at = (slot * 7 + repeat) * 4096
                    expected = hashlib.sha256(contents[at : at + SLOT_BYTES]).digest()
                    assert hashlib.sha256(c.slot(slot)).digest() == expected

    run(scenario())


def test_starting_a_process_does_not_disturb_reads(
    choice: BackendChoice, data: Path, contents: bytes
) -> None:
    async def scenario() -> None:
        async with consumer(open_backend(choice, 8), data, 8) as c:
            for slot in range(8):
                c.read(slot, slot * 4096)
            c.backend.submit()
            child = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "")
            assert await child.wait() == 0
            await c.wait_results(8)
            for slot in range(8):
                assert c.slot(slot) == contents[slot * 4096 : slot * 4096 + SLOT_BYTES]

    asyncio.run(scenario())


def test_backend_can_be_handed_to_another_loop(choice: BackendChoice, data: Path) -> None:
    backend = open_backend(choice, 4)
    memory = SlotMemory(SLOT_BYTES, 1)
    memory.populate_next_chunk()
    target = backend.prepare(backend.add_buffer(memory.chunk_view(0)), memory.slot_view(0))
    opened = DirectFile.open(str(data))

    async def once() -> None:
        done = asyncio.Event()
        backend.start(asyncio.get_running_loop(), lambda _tags, _results: done.set())
        backend.read(backend.add_file(opened), 0, target, 0)
        backend.submit()
        await done.wait()

    asyncio.run(once())
    uvloop.run(once())
    asyncio.run(once())
    asyncio.run(backend.aclose())
    opened.close()
    memory.close()


def test_completions_of_one_wake_up_come_in_one_call() -> None:
    async def scenario() -> None:
        backend = NullBackend(8)
        first: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        backend.start(asyncio.get_running_loop(), lambda tags, _results: first.set_result(tags))
        memory = SlotMemory(4096, 8)
        buffer_id = backend.add_buffer(memory.chunk_view(0))
        for tag in range(8):
            backend.read(0, 0, backend.prepare(buffer_id, memory.slot_view(tag)), tag)
        backend.submit()
        assert (first.done(), backend.in_flight) == (False, 8)
        assert await first == [0, 1, 2, 3, 4, 5, 6, 7]
        assert backend.in_flight == 0
        await backend.aclose()
        memory.close()

    asyncio.run(scenario())


# io_uring alone


@pytest.fixture
def has_uring() -> None:
    try:
        asyncio.run(UringBackend(1).aclose())
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("has_uring")
def test_submission_that_the_kernel_puts_off_is_repeated(
    run: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [errno.EAGAIN, errno.EBUSY, errno.EAGAIN]

    def reluctant(ring: object) -> int:
        if refusals:
            number = refusals.pop()
            raise OSError(number, os.strerror(number))
        submitted: int = liburing.io_uring_submit(ring)
        return submitted

    monkeypatch.setattr("bmoe.io.uring.io_uring_submit", reluctant)

    async def scenario() -> None:
        async with consumer(UringBackend(4), data, 8) as c:
            for slot in range(8):
                c.read(slot, 0)
            c.backend.submit()
            assert set((await c.wait_results(8)).values()) == {SLOT_BYTES}

    run(scenario())


@pytest.mark.usefixtures("has_uring")
@pytest.mark.parametrize("why", ["no readv_fixed", "table full", "register=False"])
def test_unregistered_buffers_work_and_the_reason_is_kept(
    data: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no readv_fixed":
        monkeypatch.setattr(uring_module, "_why_not_readv_fixed", lambda _ring: "too old")
    elif why == "table full":
        monkeypatch.setattr(uring_module, "_TABLE_SLOTS", 1)

    async def scenario() -> None:
        async with consumer(UringBackend(4), data, 8, register=why != "register=False") as c:
            for slot in range(8):
                c.read(slot, slot * 4096)
            c.backend.submit()
            assert set((await c.wait_results(8)).values()) == {SLOT_BYTES}
            assert c.slot(7) == contents[7 * 4096 : 7 * 4096 + SLOT_BYTES]
            reason = c.backend.unregistered_reason
            assert c.backend.registered == (reason is None)
            if why == "no readv_fixed":
                assert reason == "too old"
            elif why == "table full":
                assert reason is not None
                assert "table holds" in reason

    asyncio.run(scenario())


# Start-up without io_uring


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSYS, "this kernel has none"),
        (errno.ENOMEM, "locked"),
        (errno.EMFILE, "descriptor"),
        (errno.EPERM, "io_uring"),
        (errno.E2BIG, "Argument list too long"),
    ],
)
def test_refused_ring_falls_back_or_refuses_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(liburing, "io_uring_queue_init", refuse)
    backend = open_backend("auto", 4)
    assert isinstance(backend, ThreadsBackend)
    assert backend.fallback_reason is not None
    assert says in backend.fallback_reason
    asyncio.run(backend.aclose())
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(BackendError, match="io_uring cannot be used") as caught:
        open_backend("uring", 4)
    assert caught.value.hint


@pytest.mark.usefixtures("has_uring")
def test_trial_read_that_fails_means_unregistered(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on kernels before 6.15, which answer the operation with an error."""

    def wrong_slot(sqe: object, fd: int, iovec: object, slot: int, offset_bytes: int) -> None:
        liburing.io_uring_prep_readv_fixed(sqe, fd, iovec, slot + 1, offset_bytes)

    monkeypatch.setattr("bmoe.io.uring.io_uring_prep_readv_fixed", wrong_slot)

    async def scenario() -> None:
        async with consumer(UringBackend(4), data, 4) as c:
            assert c.backend.unregistered_reason is not None
            assert "READV_FIXED does not work here" in c.backend.unregistered_reason
            c.read(0, 0)
            c.backend.submit()
            assert await c.wait_results(1) == {0: SLOT_BYTES}

    asyncio.run(scenario())


@pytest.mark.usefixtures("has_uring")
def test_ring_without_an_eventfd_is_refused_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(liburing, "io_uring_register_eventfd", refuse)
    with pytest.raises(BackendError, match="io_uring cannot be used"):
        open_backend("uring", 4)
    assert len(os.listdir("/proc/self/fd")) == before


def test_disabled_by_sysctl_is_told_from_seccomp(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(uring_module, "_io_uring_disabled", lambda: "2")
    assert "io_uring_disabled is 2" in uring_module._why_no_ring(error)[0]
    monkeypatch.setattr(uring_module, "_io_uring_disabled", lambda: "0")
    assert "seccomp" in uring_module._why_no_ring(error)[1]


def test_missing_liburing_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bmoe.io.uring", None)
    backend = open_backend("auto", 4)
    assert backend.name == "threads"
    asyncio.run(backend.aclose())
    with pytest.raises(BackendError, match="liburing"):
        open_backend("uring", 4)


def test_chosen_backend_has_no_fallback_reason(choice: BackendChoice) -> None:
    backend = open_backend(choice, 4)
    assert isinstance(backend, EventfdBackend)
    assert (backend.name, backend.fallback_reason, backend.queue_depth) == (choice, None, 4)
    asyncio.run(backend.aclose())


CHILD = """
import asyncio, ctypes, json, os, resource, sys
from bmoe.io import DirectFile, SlotMemory, open_backend
from bmoe.io.errors import BackendError
import bmoe.io.threads, bmoe.io.uring

def deny(number, error):
    # if (nr == number) return ERRNO|error; return ALLOW
    program = (ctypes.c_uint64 * 4)(
        0x20, 0x15 | 1 << 24 | number << 32, 0x06 | (0x50000 | error) << 32, 0x06 | 0x7FFF0000 << 32)
    class Fprog(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no_new_privs"
    fprog = Fprog(4, ctypes.addressof(program))
    assert libc.prctl(22, 2, ctypes.byref(fprog), 0, 0) == 0, os.strerror(ctypes.get_errno())

async def main():
    opened = DirectFile.open(sys.argv[1])
    exec(sys.argv[2])
    try:
        await open_backend("uring", 4).aclose()
        refusal = None
    except BackendError as error:
        refusal = str(error)
    backend = open_backend("auto", 4)
    memory = SlotMemory(1 << 20, 1)
    memory.populate_next_chunk()
    target = backend.prepare(backend.add_buffer(memory.chunk_view(0)), memory.slot_view(0))
    done = asyncio.get_running_loop().create_future()
    backend.start(asyncio.get_running_loop(), lambda tags, results: done.set_result(results[0]))
    backend.read(backend.add_file(opened), 0, target, 0)
    backend.submit()
    await done
    same = bytes(memory.slot_view(0)) == os.pread(opened.fd, 1 << 20, 0) if not opened.direct else None
    print(json.dumps(dict(name=backend.name, registered=backend.registered, result=done.result(),
        unregistered=backend.unregistered_reason, fallback=backend.fallback_reason, refusal=refusal)))
    await backend.aclose()
    opened.close()
    memory.close()

asyncio.run(main())
"""


def in_child(data: Path, restriction: str) -> dict[str, Any]:
    """What a process that has put `restriction` on itself gets to see."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, str(data), restriction],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    assert told["result"] == 1 << 20
    return told


def as_ordinary_user_with(memlock_bytes: int) -> str:
    return (
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({memlock_bytes}, {memlock_bytes}))\n"
        "os.geteuid() == 0 and os.setuid(65534)"
    )


@pytest.mark.usefixtures("has_uring")
def test_small_memlock_reads_unregistered_and_says_why(data: Path) -> None:
    told = in_child(data, as_ordinary_user_with(64 << 10))
    assert (told["name"], told["registered"], told["refusal"]) == ("uring", False, None)
    assert "RLIMIT_MEMLOCK" in told["unregistered"]


@pytest.mark.usefixtures("has_uring")
def test_no_memlock_at_all_still_reads(data: Path) -> None:
    """Newer kernels count the rings themselves, and then refuse them; older ones do not."""
    told = in_child(data, as_ordinary_user_with(0))
    assert not told["registered"]
    if told["name"] == "threads":
        assert "no (locked) memory for the rings" in told["fallback"]


@pytest.mark.skipif(os.uname().machine not in {"x86_64", "aarch64"}, reason="system call numbers")
@pytest.mark.parametrize(("call", "number"), [(425, "EPERM"), (425, "ENOSYS"), (427, "EPERM")])
def test_seccomp_without_io_uring_falls_back_to_threads(data: Path, call: int, number: str) -> None:
    """io_uring_setup denied, absent, and io_uring_register denied."""
    told = in_child(data, f"deny({call}, {getattr(errno, number)})")
    assert told["name"] == "threads"
    assert told["fallback"].startswith("io_uring cannot be used")
    assert told["refusal"] == told["fallback"]
