"""Doctor's checks of the host and its disk, with real shortages where root can cause them."""

import resource
from pathlib import Path

import pytest
from examined import all_ok, only_problem, only_warning, small_disk, subject, tiny

from jaxtrain import config
from jaxtrain.data import worker_count
from jaxtrain.doctor import system


@pytest.fixture(scope="module")
def video() -> config.Run:
    """Returns a config with two workers, each with two batches of 4 clips of 8x64x64: 3.4 MiB."""
    return config.load("demo", ["--data.workers", "2"])


def test_shared_memory_of_dockers_default_size_and_less(tmp_path: Path, video: config.Run) -> None:
    with small_disk(tmp_path / "shm", "64m") as folder:
        assert "64.0 MiB free" in all_ok(system.shared_memory(video, 4, folder))
        found = only_problem(system.shared_memory(video, 100, folder))
        assert "2 workers, data.prefetch 2 and batches of 9.4 MiB" in found.seen
        assert "need up to 84.4 MiB" in found.seen
        assert "docker run --shm-size=2g" in found.cure
        assert "--data.workers 1 --data.prefetch 1" in found.cure
    with small_disk(tmp_path / "tiny", "1m") as folder:
        assert "--data.workers" not in only_problem(system.shared_memory(video, 4, folder)).cure


def test_no_workers_and_small_batches_need_no_shared_memory(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", "4k") as folder:
        assert "no workers" in all_ok(system.shared_memory(tiny(), 8, folder))
        piped = tiny("--data.workers", "2")
        assert "through pipes" in all_ok(system.shared_memory(piped, 8, folder))


def test_workers_need_open_files_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process, however many devices the run has; the soft limit is raised."""

    def limit(files: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, files))

    limit(1024)
    monkeypatch.setattr(worker_count, "memory", lambda: (64.0 * 2**30, False))
    assert all_ok(system.workers(16, gpus=8)).endswith("for 16 workers")
    limit(500)
    found = only_problem(system.workers(16, gpus=8))
    assert found.seen == worker_count.too_many(16, 8)
    assert "about 712 open files" in found.seen
    limit(1024)
    monkeypatch.setattr(worker_count, "memory", lambda: (0.1 * 2**30, True))
    assert "the container's limit leaves" in only_problem(system.workers(16, gpus=8)).seen


def test_a_directory_that_can_be_created_or_written(tmp_path: Path) -> None:
    there = subject(tmp_path)
    assert all_ok(system.writable(there)) == f"{tmp_path} is writable"
    new = subject(tmp_path, output=tmp_path / "a" / "b")
    assert all_ok(system.writable(new)) == f"{tmp_path / 'a' / 'b'} can be created in {tmp_path}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["temporary"]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    found = only_problem(system.writable(subject(tmp_path, output=tmp_path / "taken" / "run")))
    assert f"cannot be created: {tmp_path / 'taken'} is a file" in found.seen
    assert "--output-dir" in found.cure


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m", "ro") as folder:
        found = only_problem(system.writable(subject(tmp_path, output=folder)))
    assert "Read-only file system" in found.seen
    assert "--output-dir" in found.cure


def test_a_full_disk(tmp_path: Path) -> None:
    """It has room for the folder, but not for a byte."""
    with small_disk(tmp_path / "disk", "64k") as folder:
        (folder / "all").write_bytes(b"x" * 65536)
        found = only_problem(system.writable(subject(tmp_path, output=folder)))
    assert "No space left on device" in found.seen


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    run = tiny("--checkpoint.keep", "5")
    with small_disk(tmp_path / "disk", "4m") as folder:
        found = only_problem(system.free_disk(run, folder, 2**20))
        assert "4.0 MiB free" in found.seen
        # The newest multiple of checkpoint.every may be older than the newest five.
        assert "7 checkpoints of 1.0 MiB need 7.0 MiB (6 kept + 1 being written)" in found.seen
        assert found.cure.startswith("--checkpoint.keep 2, free 3.0 MiB there")
        certifies = tiny("--checkpoint.keep", "5", "--loop.replay_every", "2")
        assert "8 checkpoints" in only_problem(system.free_disk(certifies, folder, 2**20)).seen
        best = tiny("--checkpoint.best_metric", "val/loss", "--loop.eval_every", "1")
        assert "+ the best +" in only_problem(system.free_disk(best, folder, 2**21)).seen
        assert "keep" not in only_problem(system.free_disk(run, folder, 2**22)).cure
        assert all_ok(system.free_disk(run, folder, 2**19))


def test_memory_and_a_containers_layer_are_warnings(tmp_path: Path) -> None:
    with small_disk(tmp_path / "a disk", "1m") as folder:
        kind = system.kind_of_file_system(folder)
        found = only_warning(system.file_system(kind))
    assert found.seen.startswith("the output directory is on tmpfs: this is memory")
    assert "on a disk" in found.cure
    found = only_warning(system.file_system("overlayfs"))
    assert "this is the container's own layer" in found.seen
    assert "docker run -v" in found.cure
    assert "ext2/ext3" in all_ok(system.file_system("ext2/ext3"))
    gone = system.kind_of_file_system(tmp_path / "missing")
    assert all_ok(system.file_system(gone)) == "the output directory is on an unknown file system"
