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
