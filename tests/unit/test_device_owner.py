"""Container and pod from cgroup paths, as the common runtimes write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.ebpf.hostfiles.container import HOST_PID_NAMESPACE, ContainerOwner, parse_container

ID = "0123456789abcdef" * 4
UID = "8f4e6c1a-1111-2222-3333-444455556666"
UNDERSCORED = UID.replace("-", "_")
BOTH = {"container.id": ID, "k8s.pod.uid": UID}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope",
            BOTH,
        ),
        (f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope", BOTH),
        (f"4:memory:/kubepods/besteffort/pod{UID}/{ID}\n0::/", BOTH),
        (f"0::/system.slice/docker-{ID}.scope", {"container.id": ID}),
        (f"12:cpu,cpuacct:/docker/{ID}", {"container.id": ID}),
        (f"0::/system.slice/docker-{ID}.scope/init", {"container.id": ID}),
        (f"0::/machine.slice/libpod-{ID}.scope/container", {"container.id": ID}),
        (f"0::/kubepods/pod{'a' * 32}/{ID}", {"container.id": ID, "k8s.pod.uid": "a" * 32}),
        (
            f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope",
            BOTH,
        ),
        (f"0::/docker/{'f' * 64}/kubepods/pod{UID}/{ID}", BOTH),
        (f"0::/machine.slice/libpod-conmon-{ID}.scope", {}),
        ("0::/user.slice/user-1000.slice/session-2.scope", {}),
        ("0::/", {}),
        ("", {}),
        (f"0::/system.slice/docker-{ID}a.scope", {}),
    ],
)
def test_the_path_tells(text: str, want: dict[str, str]):
    assert parse_container(text) == want


@given(st.text())
def test_no_text_breaks_it(text: str):
    found = parse_container(text)
    assert all(len(value) in {64, 32, 36} for value in found.values())


def process(proc: Path, pid: int, namespace: str, *files: str) -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cgroup").write_text(f"0::/docker/{ID}\n")
    for number, target in enumerate(files):
        (folder / "fd" / str(number)).symlink_to(target)
    if not (proc / "1").exists():
        (proc / "1" / "ns").mkdir(parents=True)
        (proc / "1" / "ns" / "pid").symlink_to(namespace)


def test_where_the_hosts_processes_are_seen_the_pid_is_enough(tmp_path: Path):
    process(tmp_path, 4711, HOST_PID_NAMESPACE)
    assert ContainerOwner(tmp_path)(4711) == {"container.id": ID}


def test_inside_a_container_a_number_alone_proves_nothing(tmp_path: Path):
    process(tmp_path, 4711, "pid:[4026532999]", "/dev/null")
    process(tmp_path, 4712, "pid:[4026532999]", "/dev/null", "/dev/nvidia0")
    assert ContainerOwner(tmp_path)(4711) == {}
    assert ContainerOwner(tmp_path)(4712) == {"container.id": ID}


def test_a_process_that_has_gone_has_no_owner(tmp_path: Path):
    assert ContainerOwner(tmp_path)(1) == {}
