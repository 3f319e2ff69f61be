"""`bmoe.io.files`: what can be opened, how it is read, and what is noticed when it changes."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bmoe.io import files
from bmoe.io.errors import FileError, ReadError
from bmoe.io.files import DirectFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZE_BYTES = (1 << 20) + 777


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(SIZE_BYTES))
    return path


def read_blocks(file: DirectFile, offset_bytes: int, length_bytes: int) -> bytes:
    with mmap.mmap(-1, length_bytes) as memory:
        got_bytes = os.preadv(file.fd, [memory], offset_bytes)
        return memory[:got_bytes]


def test_opened_file_delivers_its_blocks_and_its_unaligned_tail(data: Path) -> None:
    with DirectFile.open(str(data)) as file:
        assert file.size_bytes == SIZE_BYTES
        assert file.direct == (file.fallback_reason is None)
        assert file.block_bytes >= file.memory_align_bytes > 0
        last_block = SIZE_BYTES - SIZE_BYTES % file.block_bytes
        for offset_bytes in (0, file.block_bytes, last_block):
            got = read_blocks(file, offset_bytes, 65536)
            assert got == data.read_bytes()[offset_bytes : offset_bytes + 65536]


def test_buffered_on_request_is_no_fallback(data: Path) -> None:
    with DirectFile.open(str(data), direct=False) as file:
        assert (file.direct, file.fallback_reason, file.block_bytes) == (False, None, 4096)
        assert read_blocks(file, 4096, 4096) == data.read_bytes()[4096:8192]


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs here")  # noqa: S108 (a file system of its own kind)
def test_tmpfs_reads_right_one_way_or_the_other() -> None:
    path = Path("/dev/shm") / f"bmoe-test-{os.getpid()}"  # noqa: S108 (as above)
    path.write_bytes(os.urandom(300_000))
    try:
        with DirectFile.open(str(path)) as file:
            assert file.direct == (file.fallback_reason is None)
            assert read_blocks(file, 65536, 65536) == path.read_bytes()[65536:131072]
    finally:
        path.unlink()


def test_sparse_file_and_symlink_are_fine(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(10 << 20)
    link = tmp_path / "link"
    link.symlink_to(sparse)
    with DirectFile.open(str(link)) as opened:
        assert opened.path == str(link)
        assert read_blocks(opened, 5 << 20, 4096) == bytes(4096)
        opened.check_unchanged()


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))


def link_to(target: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.symlink_to(target)

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such file"),  # noqa: ARG005 (makes nothing)
        (Path.mkdir, "got a directory"),
        (make_fifo, "got a FIFO"),
        (make_socket, "got a socket"),
        (Path.touch, "is empty"),
        (link_to("nowhere"), "no such file"),
        (link_to("odd"), "cannot be opened"),
        (link_to("/dev/zero"), "got a character device"),
    ],
    ids=["missing", "directory", "fifo", "socket", "empty", "dangling", "link-loop", "device"],
)
def test_refuses_what_cannot_be_read_at_offsets(
    tmp_path: Path, make: Callable[[Path], None], says: str
) -> None:
    """Each in one line that names the path; a FIFO does not hang the open."""
    path = tmp_path / "odd"
    make(path)
    with pytest.raises(FileError, match=says) as caught:
        DirectFile.open(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nul\0byte", "x" * 5000, ""])
def test_refuses_names_that_are_no_paths(name: str) -> None:
    with pytest.raises(FileError):
        DirectFile.open(name)


def test_refuses_an_unreadable_file(data: Path) -> None:
    data.chmod(0)
    script = (
        "import os, sys; from bmoe.io import DirectFile\n"
        "from bmoe.io.errors import FileError\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: DirectFile.open(sys.argv[1])\n"
        "except FileError as error: print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(data)], capture_output=True, text=True, check=True
    )
    assert f"{data}: is not readable; got Permission denied" in ran.stdout


def test_file_smaller_than_a_block_is_buffered(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x" * 100)
    with DirectFile.open(str(path)) as file:
        assert not file.direct
        assert file.fallback_reason is not None
        assert "smaller than a block" in file.fallback_reason


def test_refused_o_direct_falls_back_with_the_reason(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refusing(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", refusing)
    with DirectFile.open(str(data)) as file:
        assert file.fallback_reason == "the file system refuses O_DIRECT: Invalid argument"
        assert read_blocks(file, 0, 4096) == data.read_bytes()[:4096]


def test_kernel_that_allows_no_direct_reads_is_believed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_statx_dio_align", lambda _fd: (0, 0))
    with DirectFile.open(str(data)) as file:
        assert file.fallback_reason == "the kernel says that this file takes no direct reads"


def test_alignment_from_statx_is_used_and_block_covers_memory(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_statx_dio_align", lambda _fd: (4096, 512))
    with DirectFile.open(str(data)) as file:
        if file.direct:
            assert (file.block_bytes, file.memory_align_bytes) == (4096, 4096)


@pytest.mark.parametrize("wanted_bytes", [512, 4096, 65536])
def test_probing_finds_the_smallest_block_that_works(
    data: Path, monkeypatch: pytest.MonkeyPatch, wanted_bytes: int
) -> None:
    """Where the kernel does not tell, on a device that takes multiples of `wanted_bytes` only."""
    contents = data.read_bytes()

    def picky(fd: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        del fd
        (block,) = buffers
        if block.nbytes % wanted_bytes or offset_bytes % wanted_bytes:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        block[:] = contents[offset_bytes : offset_bytes + block.nbytes]
        return block.nbytes

    with monkeypatch.context() as patch:
        patch.setattr(files, "_statx_dio_align", lambda _fd: None)
        patch.setattr(os, "preadv", picky)
        file = DirectFile.open(str(data))
    with file:
        if file.direct:
            # A file system may answer less than its own blocks from the page cache: not even tried.
            expected_bytes = max(wanted_bytes, os.statvfs(data).f_frsize)
            assert (file.block_bytes, file.memory_align_bytes) == (expected_bytes, expected_bytes)


def test_block_that_differs_falls_back(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(fd: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        del fd, offset_bytes
        buffers[0][:] = bytes(buffers[0].nbytes)
        return buffers[0].nbytes

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        file = DirectFile.open(str(data))
    with file:
        assert file.fallback_reason is not None
        assert not file.direct


def test_probe_that_meets_a_bad_block_falls_back(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        file = DirectFile.open(str(data))
    with file:
        assert not file.direct


def truncate(path: Path) -> None:
    os.truncate(path, 1000)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.write_bytes(bytes(SIZE_BYTES))


def modify(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (truncate, "was truncated .* expected 1049353 bytes, got 1000"),
        (grow, "grew after"),
        (replace, "was replaced"),
        (Path.unlink, "is gone"),
        (modify, "was modified"),
    ],
)
def test_notices_a_file_that_changed(data: Path, change: Callable[[Path], None], says: str) -> None:
    with DirectFile.open(str(data)) as file:
        file.check_unchanged()
        change(data)
        with pytest.raises(ReadError, match=says):
            file.check_unchanged()


def test_second_close_leaves_other_descriptors_alone(data: Path) -> None:
    file = DirectFile.open(str(data))
    file.close()
    other = os.open(data, os.O_RDONLY)
    try:
        file.close()
        assert os.read(other, 4) == data.read_bytes()[:4]
    finally:
        os.close(other)


def test_failed_opens_leak_no_descriptors(tmp_path: Path, data: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileError):
            DirectFile.open(str(path))
    DirectFile.open(str(data)).close()
    assert len(os.listdir("/proc/self/fd")) == before
