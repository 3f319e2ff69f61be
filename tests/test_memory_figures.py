"""`bmoe.io.memory_figures` over made-up /proc and /sys trees, and once over the real ones."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from bmoe.io.memory_figures import (
    MachineMemory,
    ProcessMemory,
    available_bytes,
    cgroup_memory,
    machine_memory,
    memlock_limit_bytes,
    process_memory,
)

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
V1_UNLIMITED = "9223372036854771712\n"
V2_MOUNT = "30 23 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def plant(root: Path, tree: dict[str, str]) -> str:
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def v2_group(
    folder: str, *, limit: str, used_mib: int, cache_mib: int = 0, high: str = "max"
) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{used_mib * MIB}\n",
        f"{folder}/memory.stat": f"anon 1\nfile 99999\nactive_file {cache_mib * MIB}\ninactive_file 0\n",
    }


def v1_group(folder: str, *, limit: str, used_mib: int, cache_mib: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": f"{used_mib * MIB}\n",
        f"{folder}/memory.stat": f"active_file 7\ntotal_inactive_file {cache_mib * MIB}\n",
    }


def test_this_process_and_machine_have_figures() -> None:
    process = process_memory()
    assert process.rss_bytes is not None
    assert process.anon_bytes is not None
    assert process.file_bytes is not None
    assert process.anon_bytes + process.file_bytes <= process.rss_bytes
    assert process.minor_faults
    machine = machine_memory()
    assert machine.total_bytes is not None
    assert 0 < (available_bytes() or 0) <= machine.total_bytes


def test_process_figures_are_read_from_status_and_stat(tmp_path: Path) -> None:
    """A name with blanks and parentheses moves nothing."""
    root = plant(
        tmp_path,
        {
            "proc/self/status": "Name:\tx\nVmHWM:\t 400 kB\nVmRSS:\t300 kB\n"
            "RssAnon:\t200 kB\nRssFile:\t90 kB\nVmSwap:\t1 kB\nThreads:\t3\n",
            "proc/self/stat": "12 (a) b (c)) S 1 2 3 4 5 6 111 8 222 10 11\n",
        },
    )
    assert process_memory(root) == ProcessMemory(
        rss_bytes=300 << 10,
        anon_bytes=200 << 10,
        file_bytes=90 << 10,
        swap_bytes=1 << 10,
        peak_rss_bytes=400 << 10,
        minor_faults=111,
        major_faults=222,
    )


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 8 kB\nMemAvailable: lots kB\nMemFree: 7\n",
            "proc/self/stat": "1 (x) S 1",
        },
    )
    assert machine_memory(root) == MachineMemory(
        total_bytes=8 << 10, available_bytes=None, free_bytes=None, swap_free_bytes=None
    )
    process = process_memory(root)
    assert (process.rss_bytes, process.minor_faults, process.major_faults) == (None, None, None)
    assert cgroup_memory(root) is None
    assert available_bytes(root) is None


def test_v2_takes_the_group_or_ancestor_with_the_least_room(tmp_path: Path) -> None:
    tree = {
        "proc/self/mountinfo": "garbage\n" + V2_MOUNT,
        "proc/self/cgroup": "0::/user.slice/app.scope\n",
        "proc/meminfo": f"MemAvailable: {900 << 10} kB\n",
        **v2_group("sys/fs/cgroup/user.slice/app.scope", limit=str(800 * MIB), used_mib=100, cache_mib=60),
        **v2_group("sys/fs/cgroup/user.slice", limit=str(500 * MIB), used_mib=300, cache_mib=50),
    }
    root = plant(tmp_path, tree)
    group = cgroup_memory(root)
    assert group is not None
    assert (group.version, group.path) == (2, "/sys/fs/cgroup/user.slice")
    assert (group.limit_bytes, group.used_bytes) == (500 * MIB, 300 * MIB)
    assert (group.reclaimable_bytes, group.room_bytes) == (50 * MIB, 250 * MIB)
    assert available_bytes(root) == 250 * MIB


def test_v2_unlimited_everywhere_leaves_the_machine(tmp_path: Path) -> None:
    tree = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/a/b\n",
        "proc/meminfo": "MemAvailable: 1024 kB\n",
        **v2_group("sys/fs/cgroup/a/b", limit="max", used_mib=1),
        **v2_group("sys/fs/cgroup/a", limit="max", used_mib=1),
    }
    root = plant(tmp_path, tree)
    assert cgroup_memory(root) is None
    assert available_bytes(root) == MIB


def test_v2_throttling_limit_counts(tmp_path: Path) -> None:
    tree = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/a\n",
        **v2_group("sys/fs/cgroup/a", limit=str(100 * MIB), used_mib=10, high=str(60 * MIB)),
    }
    group = cgroup_memory(plant(tmp_path, tree))
    assert group is not None
    assert group.limit_bytes == 60 * MIB


def test_v1_limit_of_an_ancestor_and_the_unlimited_encoding(tmp_path: Path) -> None:
    tree = {
        "proc/self/mountinfo": V1_MOUNT,
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/outer/inner\n0::/\n",
        **v1_group("sys/fs/cgroup/memory/outer/inner", limit=V1_UNLIMITED, used_mib=40),
        **v1_group("sys/fs/cgroup/memory/outer", limit=f"{64 * MIB}\n", used_mib=70, cache_mib=30),
        **v1_group("sys/fs/cgroup/memory", limit=V1_UNLIMITED, used_mib=4000),
    }
    group = cgroup_memory(plant(tmp_path, tree))
    assert group is not None
    assert (group.version, group.path) == (1, "/sys/fs/cgroup/memory/outer")
    assert group.room_bytes == 24 * MIB


@pytest.mark.parametrize("cgroup_path", ["/docker/abc", "/../other", "/elsewhere"])
def test_container_that_sees_its_group_as_the_root(tmp_path: Path, cgroup_path: str) -> None:
    """The mount's root is the group itself, whatever the path says."""
    tree = {
        "proc/self/mountinfo": "40 30 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        "proc/self/cgroup": f"4:memory:{cgroup_path}\n",
        **v1_group("sys/fs/cgroup/memory", limit=f"{10 * MIB}\n", used_mib=4),
    }
    group = cgroup_memory(plant(tmp_path, tree))
    assert group is not None
    assert group.room_bytes == 6 * MIB


def test_hybrid_mounts_find_the_version_that_has_memory(tmp_path: Path) -> None:
    tree = {
        "proc/self/mountinfo": V1_MOUNT + V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        "proc/self/cgroup": "4:memory:/a\n0::/a\n",
        "sys/fs/cgroup/unified/a/cgroup.procs": "",
        **v1_group("sys/fs/cgroup/memory/a", limit=f"{10 * MIB}\n", used_mib=12),
    }
    group = cgroup_memory(plant(tmp_path, tree))
    assert group is not None
    assert (group.version, group.room_bytes) == (1, 0)


def test_mount_point_with_a_blank(tmp_path: Path) -> None:
    tree = {
        "proc/self/mountinfo": V2_MOUNT.replace("/sys/fs/cgroup", "/my\\040groups"),
        "proc/self/cgroup": "0::/\n",
        **v2_group("my groups", limit=str(5 * MIB), used_mib=1),
    }
    group = cgroup_memory(plant(tmp_path, tree))
    assert group is not None
    assert group.path == "/my groups"


def test_broken_stat_counts_nothing_as_reclaimable(tmp_path: Path) -> None:
    tree = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/a\n",
        **v2_group("sys/fs/cgroup/a", limit=str(9 * MIB), used_mib=4),
        "sys/fs/cgroup/a/memory.stat": "active_file\ninactive_file many\n",
    }
    group = cgroup_memory(plant(tmp_path, tree))
    assert group is not None
    assert (group.reclaimable_bytes, group.room_bytes) == (0, 5 * MIB)


def test_memlock_limit_is_the_soft_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (8 * MIB, 16 * MIB))
    assert memlock_limit_bytes() == 8 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (resource.RLIM_INFINITY, 0))
    assert memlock_limit_bytes() is None
