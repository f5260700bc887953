"""When processes are looked at: soon after they begin, seldom when nothing changes any more, never too many at once."""

from pathlib import Path

from pasta_otel.ebpf.processes import (
    GLANCES,
    HOST_PID_NAMESPACE,
    LATEST_S,
    TICKS_PER_S,
    ProcessTable,
    may_trace,
    seen_from,
)

PYTHON = "0-1 r-xp 00000000 08:01 3 /usr/bin/python3.11\n"
MAP = PYTHON + "7f00-8f00 r-xp 00000000 08:01 {inode} /usr/lib/libcuda.so.1\n"


class World:
    """A /proc whose files tests write, and a clock that they set."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.now_s = folder, 1000.0
        self.table = ProcessTable(folder, "libcuda.so", now_s=lambda: self.now_s, boot_s=lambda: self.now_s)

    def process(self, pid: int, inode: int = 0, leader: int = 0, began_s: float = 1000.0) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} (a) S {' '.join(['0'] * 18)} {int(began_s * TICKS_PER_S)} 4096 0\n")
        (folder / "status").write_text(f"Name:\ta\nTgid:\t{leader or pid}\nPid:\t{pid}\n")
        (folder / "statm").write_text(f"{1000 + inode} 0 0 0 0 0 0\n")
        (folder / "maps").write_text(MAP.format(inode=inode) if inode else PYTHON)

    def seen(self, pid: int) -> bool:
        return bool(self.table.processes[pid].libraries)

    def until_seen(self, pid: int, step_s: float = 0.05) -> float:
        """Return how long glances took to see a process's library, seconds."""
        began = self.now_s
        while not self.seen(pid):
            self.now_s += step_s
            self.table.glance()
        return self.now_s - began


def test_what_a_process_maps_later_is_seen_after_an_eighth_of_its_age(tmp_path):
    for age_s in (0.5, 3.0, 30.0):
        world = World(tmp_path / str(age_s))
        world.proc.mkdir()
        world.process(5)
        world.table.scan()
        began = world.now_s
        while world.now_s < began + age_s:
            world.now_s += 0.05
            world.table.glance()
        world.process(5, inode=7)
        assert world.until_seen(5) <= age_s / 8 + 0.15


def test_processes_that_were_there_long_before_the_agent_are_no_young_ones(tmp_path):
    world = World(tmp_path)
    world.process(5, began_s=10.0)
    world.process(6, began_s=996.0)
    world.table.scan()
    assert world.table.processes[5].next_scan_s == world.now_s + LATEST_S
    assert world.table.processes[6].next_scan_s == world.now_s + 4.0 / 8


def test_an_old_process_that_starts_another_program_is_young_again(tmp_path):
    world = World(tmp_path)
    world.process(5)
    world.table.scan()
    world.table.processes[5].began_s -= 3600
    world.now_s += LATEST_S
    world.table.scan()
    assert world.table.processes[5].next_scan_s == world.now_s + LATEST_S
    world.table.note(started=[5])
    world.table.scan()  # which forgets what glances were to look at, but not how old the process is
    world.process(5, inode=7)
    assert world.until_seen(5) <= 0.2


def test_a_map_that_kept_its_size_is_read_again_all_the_same_before_long(tmp_path):
    world = World(tmp_path)
    world.process(5)
    world.table.scan()
    world.now_s += 1
    world.table.glance()  # with the second look its size is known
    world.process(5, inode=7)
    (tmp_path / "5" / "statm").write_text("1000 0 0 0 0 0 0\n")
    assert LATEST_S - 1 < world.until_seen(5) < 2 * LATEST_S


def test_a_child_is_seen_at_once_and_a_thread_is_no_process(tmp_path):
    world = World(tmp_path)
    world.process(5, inode=7)
    world.process(6, leader=5)
    world.table.note(forked=[5, 6, 4711])
    changes = world.table.glance()
    assert [process.pid for process in changes.appeared] == [5]
    assert world.table.processes.keys() == {5}


def test_a_process_that_ended_is_gone_at_once(tmp_path):
    world = World(tmp_path)
    world.process(5)
    world.table.scan()
    (tmp_path / "5" / "stat").unlink()
    world.table.note(ended=[5])
    assert [process.pid for process in world.table.glance().gone] == [5]


def test_a_storm_of_programs_is_looked_at_a_few_at_a_time_and_none_is_forgotten(tmp_path):
    world = World(tmp_path)
    pids = range(10, 10 + 2 * GLANCES)
    for pid in pids:
        world.process(pid)
    world.table.note(started=pids)
    world.now_s += 1
    assert len(world.table.glance().appeared) == GLANCES
    world.table.glance()
    assert world.table.processes.keys() == set(pids)


def test_who_may_look_at_others_and_from_where_they_are_seen(tmp_path):
    assert may_trace("CapEff:\t0000000000080000\n")
    assert not may_trace("CapEff:\t000001ffffF7ffff\n".lower().replace("capeff", "CapEff"))
    assert not may_trace("")
    assert seen_from(tmp_path) is None
    (tmp_path / "self" / "ns").mkdir(parents=True)
    link = tmp_path / "self" / "ns" / "pid"
    link.symlink_to(HOST_PID_NAMESPACE)
    assert seen_from(tmp_path) is None
    link.unlink()
    link.symlink_to("pid:[4026532000]")
    assert seen_from(tmp_path).reason == "pid_namespace"
