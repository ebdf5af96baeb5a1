"""How many cores a process may use: those that it may run on, or as many as its container's limit is worth."""

import os

import pytest

from lightning_rl.processes import cores

UNLIMITED = {"cpu.max": "max 100000"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "20000 100000"}, 1),
        ("0::/", UNLIMITED, None),
        ("0::/", {}, None),  # no controller of CPUs
        # The group above, and a path of the machine that is not in this container.
        ("0::/pod/container", {"pod/cpu.max": "300000 100000", "pod/container/cpu.max": "800000 100000"}, 3),
        ("0::/pod/container", {"pod/cpu.max": "900000 100000", "pod/container/cpu.max": "max 100000"}, 9),
        ("0::/../elsewhere", {"cpu.max": "400000 100000"}, 4),
        (
            "4:memory:/x\n1:cpu,cpuacct:/docker/1f\n0::/",
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "50000"},
            5,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_least_limit_of_its_groups_counts(groups, files, expected, tmp_path, monkeypatch) -> None:
    (tmp_path / "groups").write_text(groups + "\n")
    for name, text in files.items():
        file = tmp_path / "mounted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    monkeypatch.setattr(cores, "_OF_PROCESS", tmp_path / "groups")
    monkeypatch.setattr(cores, "_MOUNTED", tmp_path / "mounted")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cores.limit() == expected
    assert cores.cores() == (expected or 64)


def test_no_more_cores_than_it_may_run_on(monkeypatch) -> None:
    monkeypatch.setattr(cores, "limit", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5})
    assert cores.cores() == 3


@pytest.mark.parametrize(
    ("limit", "given", "threads"),
    [(2, None, "2"), (32, None, "32"), (33, None, None), (None, None, None), (2, "7", "7")],
)
def test_torch_gets_as_many_threads_as_the_limit_is_worth(limit, given, threads, monkeypatch) -> None:
    monkeypatch.setattr(cores, "limit", lambda: limit)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    monkeypatch.setattr(os, "environ", environment)
    cores.limit_threads()
    assert environment.get("OMP_NUM_THREADS") == threads
