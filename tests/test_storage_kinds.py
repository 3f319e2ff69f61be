"""Every kind of storage delivers the right bytes, whatever it thinks of O_DIRECT.

Loop devices with 4096-byte sectors and mounts need root and the tools; without them these tests skip.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bmoe.io import DirectFile, ReadQueue, SlotMemory, files, open_backend
from bmoe.io.mounts import mount_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bmoe.io import BackendChoice
    from bmoe.io.errors import ReadError

SIZE_BYTES = (3 << 20) + 777
CONTENTS = os.urandom(SIZE_BYTES)
WINDOW_BYTES = 256 << 10

# What mkfs wants as the least, and how to say that nothing may be asked.
_FORMATS = {
    "ext4": (16 << 20, ["-q", "-F"]),
    "xfs": (320 << 20, ["-q", "-f"]),
    "btrfs": (128 << 20, ["-q", "-f"]),
}


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def _try(*words: str) -> str:
    """Runs a command that only a privileged and well equipped machine can run."""
    try:
        return _run(*words)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"{words[0]}: {' '.join(said.split())}")


@contextlib.contextmanager
def mounted(directory: Path, *words: str) -> Iterator[Path]:
    """Mounts something at `directory` for the time being."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    directory.mkdir(exist_ok=True)
    _try("mount", *words, str(directory))
    try:
        yield directory
    finally:
        _run("umount", "-l", str(directory))


@contextlib.contextmanager
def file_system(kind: str, tmp_path: Path, *, sector_bytes: int) -> Iterator[tuple[str, Path]]:
    """A new file system on a loop device with such sectors: the device and where it is mounted."""
    if os.geteuid():
        pytest.skip("loop devices need root")
    if shutil.which(f"mkfs.{kind}") is None or shutil.which("losetup") is None:
        pytest.skip(f"no mkfs.{kind} or losetup here")
    size_bytes, options = _FORMATS[kind]
    image = tmp_path / f"{kind}.img"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    device = _try("losetup", "-f", "--show", "-b", str(sector_bytes), str(image))
    try:
        _try(f"mkfs.{kind}", *options, device)
        with mounted(tmp_path / kind, "-t", kind, device) as where:
            yield device, where
    finally:
        _run("losetup", "-d", device)


def read_all(file: DirectFile, choice: BackendChoice) -> bytes:
    """The file through a backend, window by window, the last one reaching past its end."""
    got = bytearray()

    async def scenario() -> None:
        queue = ReadQueue(open_backend(choice, 8), file.block_bytes, 8)
        windows = range(0, file.size_bytes, WINDOW_BYTES)
        over = asyncio.Event()
        errors: list[ReadError] = []
        with SlotMemory(WINDOW_BYTES, 8) as memory:
            try:
                memory.populate_next_chunk()
                buffer_id = queue.backend.add_buffer(memory.chunk_view(0))
                targets = [queue.backend.prepare(buffer_id, memory.slot_view(slot)) for slot in range(8)]
                file_id = queue.add_file(file)

                def failed(_: int, error: ReadError) -> None:
                    errors.append(error)
                    over.set()

                queue.start(
                    asyncio.get_running_loop(), lambda _: over.set() if not queue.in_flight else None, failed
                )
                for first in range(0, len(windows), 8):
                    part = windows[first : first + 8]
                    over.clear()
                    for slot, offset in enumerate(part):
                        need = min(WINDOW_BYTES, file.size_bytes - offset)
                        queue.read(slot, file_id, offset, need, targets[slot])
                    queue.submit()
                    await over.wait()
                    assert not errors
                    for slot, offset in enumerate(part):
                        got.extend(memory.slot_view(slot)[: min(WINDOW_BYTES, file.size_bytes - offset)])
            finally:
                await queue.aclose()

    asyncio.run(scenario())
    return bytes(got)


def check(path: Path, *, contents: bytes = CONTENTS, block_bytes: int | None = None) -> DirectFile:
    """Opens, reads by both backends, compares; the closed file with what was found out."""
    with DirectFile.open(str(path)) as file:
        for choice in ("uring", "threads"):
            assert read_all(file, choice) == contents
        assert file.direct == (file.fallback_reason is None)
        if block_bytes is not None:
            assert (file.direct, file.block_bytes) == (True, block_bytes)
        return file


def put(directory: Path) -> Path:
    path = directory / "model"
    path.write_bytes(CONTENTS)
    return path


@pytest.mark.parametrize("sector_bytes", [512, 4096])
@pytest.mark.parametrize("kind", sorted(_FORMATS))
def test_file_systems_on_devices_with_large_sectors(tmp_path: Path, kind: str, sector_bytes: int) -> None:
    with file_system(kind, tmp_path, sector_bytes=sector_bytes) as (device, where):
        path = put(where)
        # btrfs answers less than its own sectors without a word, through the page cache.
        check(path, block_bytes=4096 if kind == "btrfs" else sector_bytes)
        mount = mount_of(str(path))
        assert mount is not None
        assert (mount.source, mount.file_system, mount.read_only) == (device, kind, False)


def test_probing_finds_large_sectors_where_the_kernel_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before Linux 6.1: 512 to 2048 bytes are refused, 4096 work."""
    monkeypatch.setattr(files, "_statx_dio_align", lambda fd: None)  # noqa: ARG005 (an older kernel)
    with file_system("ext4", tmp_path, sector_bytes=4096) as (_, where):
        check(put(where), block_bytes=4096)


def test_read_only_mount(tmp_path: Path) -> None:
    with file_system("ext4", tmp_path, sector_bytes=4096) as (_, where):
        path = put(where)
        _run("mount", "-o", "remount,ro", str(where))
        check(path, block_bytes=4096)
        mount = mount_of(str(path))
        assert mount is not None
        assert mount.read_only


def test_tmpfs(tmp_path: Path) -> None:
    with mounted(tmp_path / "tmpfs", "-t", "tmpfs", "tmpfs") as where:
        check(put(where))


@pytest.mark.parametrize("layer", ["lower", "upper"])
def test_overlay(tmp_path: Path, layer: str) -> None:
    """A file of the image below, and one that was written in the container."""
    with mounted(tmp_path / "base", "-t", "tmpfs", "tmpfs") as base:
        for name in ("lower", "upper", "work"):
            (base / name).mkdir()
        if layer == "lower":
            put(base / "lower")
        options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
        with mounted(tmp_path / "overlay", "-t", "overlay", "-o", options, "overlay") as where:
            path = where / "model" if layer == "lower" else put(where)
            check(path)
            mount = mount_of(str(path))
            assert mount is not None
            assert mount.file_system == "overlay"


def test_overlay_over_large_sectors(tmp_path: Path) -> None:
    """The block size is that of the file system below."""
    with file_system("ext4", tmp_path, sector_bytes=4096) as (_, below):
        for name in ("lower", "upper", "work"):
            (below / name).mkdir()
        put(below / "lower")
        options = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
        with mounted(tmp_path / "overlay", "-t", "overlay", "-o", options, "overlay") as where:
            assert check(where / "model").block_bytes % 4096 == 0


def test_sparse_file_reads_as_zeros_where_it_has_none(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.seek(1 << 20)
        file.write(CONTENTS[: 64 << 10])
        file.truncate(SIZE_BYTES)
    expected = bytes(1 << 20) + CONTENTS[: 64 << 10]
    check(path, contents=expected + bytes(SIZE_BYTES - len(expected)))


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to], ids=["symbolic", "hard"])
def test_links(tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    link = tmp_path / "link"
    make(link, put(tmp_path))
    file = check(link)
    assert file.path == str(link)


def test_link_out_of_a_read_only_mount_is_of_the_drive_it_leads_to(tmp_path: Path) -> None:
    path = put(tmp_path)
    with mounted(tmp_path / "tmpfs", "-t", "tmpfs", "tmpfs") as where:
        (where / "link").symlink_to(path)
        _run("mount", "-o", "remount,ro", str(where))
        check(where / "link")
        assert mount_of(str(where / "link")) == mount_of(str(path))
