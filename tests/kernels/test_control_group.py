"""Quotas and limits of nested control groups, from trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.kernels import control_group


class Tree:
    """A fake /sys/fs/cgroup, and what /proc/self/cgroup says."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def own(self, text: str) -> None:
        (self.root / "self").write_text(text)

    def write(self, path: str, text: str) -> None:
        file = self.root / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def write_v1(self, folder: str, quota: int, period: int = 100_000) -> None:
        self.write(f"{folder}/cpu.cfs_quota_us", str(quota))
        self.write(f"{folder}/cpu.cfs_period_us", str(period))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(control_group, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(control_group, "_OWN", tmp_path / "self")
    return Tree(tmp_path)


def test_without_control_groups_there_is_no_limit(tree: Tree) -> None:
    assert (control_group.processor_limit(), control_group.memory_limit()) == (None, None)
    tree.own("nonsense\n")
    assert (control_group.processor_limit(), control_group.memory_limit()) == (None, None)


@pytest.mark.parametrize(("number", "total"), [(48 << 30, 48 << 30), (None, 4 << 30)])
def test_memory_is_what_sysctl_says_where_no_file_does(
    tree: Tree, number: int | None, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no /proc/meminfo; a system that says nothing is taken to have 4 GiB."""
    monkeypatch.setattr(control_group, "_MEMINFO", tree.root / "nowhere")
    monkeypatch.setattr(control_group, "sysctl_number", {"hw.memsize": number}.get)
    assert control_group.total_memory() == total


@pytest.mark.parametrize(
    ("content", "limit"),
    [("150000 100000", 1.5), ("50000 100000", 0.5), ("max 100000", None), ("", None), ("1 0", None), ("x y", None)],
)
def test_the_quota_of_the_root_group_is_the_limit(tree: Tree, content: str, limit: float | None) -> None:
    tree.write("cpu.max", content)
    assert control_group.processor_limit() == limit


@pytest.mark.parametrize(
    ("inner", "outer", "limit"), [(200_000, 400_000, 2), (800_000, 300_000, 3), ("max", 300_000, 3)]
)
def test_the_smallest_quota_on_the_way_to_the_root_counts(tree: Tree, inner: object, outer: object, limit: int) -> None:
    tree.own("0::/system.slice/chairlift.service/worker\n")
    tree.write("cpu.max", "max 100000")
    tree.write("system.slice/cpu.max", f"{outer} 100000")
    tree.write("system.slice/chairlift.service/cpu.max", f"{inner} 100000")
    tree.write("system.slice/other.service/cpu.max", "1000 100000")
    assert control_group.processor_limit() == limit


@pytest.mark.parametrize("mounted_as", ["cpu,cpuacct", "cpu"])
def test_the_smallest_quota_of_nested_version_1_groups_counts(tree: Tree, mounted_as: str) -> None:
    tree.own("5:memory:/user\n4:cpu,cpuacct:/user/job:1\n1:name=systemd:/\n0::/\n")
    tree.write_v1(mounted_as, -1)
    tree.write_v1(f"{mounted_as}/user", 600_000)
    tree.write_v1(f"{mounted_as}/user/job:1", 125_000, 50_000)
    assert control_group.processor_limit() == 2.5


def test_limits_are_found_where_a_container_sees_its_group_as_the_root(tree: Tree) -> None:
    tree.own("4:cpu:/docker/0123abcd\n3:memory:/docker/0123abcd\n0::/docker/0123abcd\n")
    tree.write_v1("cpu", 300_000)
    tree.write("memory/memory.limit_in_bytes", "1000")
    assert (control_group.processor_limit(), control_group.memory_limit()) == (3, 1000)


def test_a_group_outside_the_visible_tree_sets_no_limit(tree: Tree) -> None:
    tree.own("0::/../sibling\n")
    tree.write("cpu.max", "400000 100000")
    tree.write("sibling/cpu.max", "1000 100000")
    assert control_group.processor_limit() == 4


def test_limits_are_found_where_both_versions_are_mounted(tree: Tree) -> None:
    tree.own("2:cpu:/a\n0::/b\n")
    tree.write_v1("cpu/a", 300_000)
    tree.write("unified/b/cpu.max", "200000 100000")
    tree.write("unified/b/memory.max", "max")
    assert control_group.processor_limit() == 2
    assert control_group.memory_limit() is None


def test_the_smallest_memory_limit_counts(tree: Tree) -> None:
    tree.own("0::/a/b\n")
    tree.write("a/memory.max", "5000")
    tree.write("a/b/memory.max", "7000")
    assert control_group.memory_limit() == 5000
