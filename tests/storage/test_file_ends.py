from pathlib import Path

from jaxtrain.storage import file_ends


def test_both_ends_and_small_files_count(tmp_path: Path) -> None:
    def of(data: bytes) -> str:
        (tmp_path / "a").write_bytes(data)
        return file_ends.digest(tmp_path / "a")

    large = bytes(300_000)
    different = [large, b"a" + large[1:], large[:-1] + b"a", b"", b"a", b"b", b"ab"]
    assert len({of(data) for data in different}) == len(different)
    assert of(large) == of(large)


def test_a_part_is_as_its_own_file(tmp_path: Path) -> None:
    part = bytes(range(256)) * 1000
    (tmp_path / "part").write_bytes(part)
    (tmp_path / "tar").write_bytes(b"before" + part + b"after")
    assert file_ends.digest(tmp_path / "tar", 6, len(part)) == file_ends.digest(tmp_path / "part")
