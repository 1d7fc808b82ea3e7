"""The files at a path, and their split."""

import csv
import json
import tarfile
from pathlib import Path

import pytest

from jaxtrain.data.video import files
from jaxtrain.errors import InputError
from jaxtrain.jobs import resumable
from jaxtrain.storage import record


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def _find(path: Path) -> list[files.VideoFile]:
    cache = path.parent / ".cache"
    return files.find(str(path), "--data.path", cache, lambda line: None)


def _names(path: Path) -> list[str]:
    return [one.name for one in _find(path)]


def test_a_folder_is_read_recursively_by_suffix(tmp_path: Path) -> None:
    _touch(tmp_path, "b.mp4", "a/c.MKV", "a/d.webm", "notes.txt", ".hidden.mp4", ".git/e.mp4")
    _touch(tmp_path, "a/g.TXT", "h.txt", "a/e.json", "i.json", "f")
    (tmp_path / "a" / "again").symlink_to(tmp_path, target_is_directory=True)
    lines: list[str] = []
    found = files.find(str(tmp_path), "--data.path", tmp_path, lines.append)
    assert [video.name for video in found] == ["a/c.MKV", "a/d.webm", "b.mp4"]
    assert lines[-1].endswith(": ignored 6 other files (.txt 3, .json 2, without a suffix 1)")


def test_images_are_read_where_no_videos_are(tmp_path: Path) -> None:
    """Beside videos, they are posters; a camera's small copies are so, too."""
    _touch(tmp_path, "with/a.mp4", "with/a.jpg", "with/A.LRV", "images/b.JPG", "images/c/d.png")
    _touch(tmp_path, "camera/a.lrv")
    lines: list[str] = []
    found = files.find(str(tmp_path / "with"), "--data.path", tmp_path, lines.append)
    assert [video.name for video in found] == ["a.mp4"]
    assert ": ignored 2 other files (" in lines[-1]
    assert ".jpg 1" in lines[-1]
    assert _names(tmp_path / "images") == ["b.JPG", "c/d.png"]
    assert _names(tmp_path / "camera") == ["a.lrv"]
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(tmp_path / "images", "images")
    assert _names(tmp_path / "images.tar") == [
        "images.tar/images/b.JPG",
        "images.tar/images/c/d.png",
    ]


def test_a_name_in_a_list_may_begin_with_a_number_sign(tmp_path: Path) -> None:
    _touch(tmp_path, "#shorts 1.mp4", "a.mp4")
    text = "# a comment\n#shorts 1.mp4\n#gone.mp4\na.mp4\n"
    (tmp_path / "list.txt").write_text(text, encoding="utf-8")
    assert _names(tmp_path / "list.txt") == ["#shorts 1.mp4", "a.mp4"]


def test_files_that_jaxtrain_writes_beside_videos_are_not_counted(tmp_path: Path) -> None:
    _touch(tmp_path, "a.mp4", "notes.txt", resumable.REPORT, record.NAME)
    lines: list[str] = []
    files.find(str(tmp_path), "--data.path", tmp_path, lines.append)
    assert lines == [f"--data.path {tmp_path}: ignored 1 other file (.txt 1)"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.jsonl", '"a.mp4"\n\n{"path": "sub/b.mp4", "text": "x"}\n'),
        ("l.csv", "caption,path\nx,a.mp4\ny,sub/b.mp4\n"),
        ("l.csv", "\ufeffpath,caption\na.mp4,x\nsub/b.mp4,y\n"),
        ("l.txt", "# clips\na.mp4\n\nsub/b.mp4\na.mp4\n"),
    ],
)
def test_paths_in_lists_are_relative_to_the_list(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = _find(tmp_path / name)
    assert [(one.name, one.path) for one in found] == [
        ("a.mp4", str(tmp_path / "a.mp4")),
        ("sub/b.mp4", str(tmp_path / "sub/b.mp4")),
    ]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_names_in_lists_may_have_any_character_but_a_line_feed(kind: str, tmp_path: Path) -> None:
    """str.splitlines() ends lines at eight further characters."""
    names = [f"{c}a{c}b{c}.mp4" for c in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\u00a0"]
    names += ['with "quotes", commas.mp4', "tab\there.mp4"]
    with open(tmp_path / f"l.{kind}", "w", encoding="utf-8", newline="") as file:
        if kind == "txt":
            file.write("\r\n".join(names))
        elif kind == "jsonl":
            file.writelines(json.dumps({"path": n}, ensure_ascii=False) + "\n" for n in names)
        else:
            writer = csv.writer(file)
            writer.writerows([["caption", "path"], *(["two\nlines", name] for name in names)])
    assert sorted(one.name for one in _find(tmp_path / f"l.{kind}")) == sorted(names)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("l.json", '["a.mp4"]', ".jsonl"),
        ("l.jsonl", '"a.mp4"\n1', "entry 2"),
        ("l.jsonl", "[", "cannot be read"),
        ("l.csv", "file,caption\na.mp4,x\n", "caption"),
        ("l.txt", "# nothing\n", "no video files found"),
        ("l.docx", "", ".docx"),
    ],
)
def test_errors_about_lists_give_the_reason(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=r"--data\.path") as error:
        _find(tmp_path / name)
    assert told in str(error.value)
    assert name in str(error.value)


def test_shards_in_numbered_folders_have_distinct_names(tmp_path: Path) -> None:
    for number in range(2):
        tar = tmp_path / f"d{number}" / "s.tar"
        tar.parent.mkdir()
        with tarfile.open(tar, "w") as made:
            made.addfile(tarfile.TarInfo("a.mp4"))
    found = _find(tmp_path / "d{0..1}/s.tar")
    assert [one.name for one in found] == ["d0/s.tar/a.mp4", "d1/s.tar/a.mp4"]
    assert [one.file for one in found] == [str(tmp_path / f"d{n}/s.tar") for n in range(2)]


def test_two_files_with_the_same_name_are_rejected(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as made:
        made.addfile(tarfile.TarInfo("a.mp4"))
        made.addfile(tarfile.TarInfo("./a.mp4"))
    assert _names(tmp_path / "s.tar") == ["s.tar/a.mp4"]  # the last one, as tar does
    (tmp_path / "l.txt").write_text("gs://bucket/a.mp4\ngcs://bucket/a.mp4\n")
    with pytest.raises(InputError, match=r"gs://bucket/a.mp4 and gcs://.* same name bucket/a\.mp4"):
        list(files._distinct(files._listed(tmp_path / "l.txt", "--data.path"), "--data.path", "l"))


def test_missing_and_empty_folders_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file .*; pass a folder of .*\.txt\)$"):
        _find(tmp_path / "gone")
    with pytest.raises(InputError, match=r"no video files found.*\.mp4"):
        _find(tmp_path)


@pytest.mark.parametrize(
    "entry",
    ['"a\\u0000b.mp4"', "9" * 6000, f"[{'9' * 4000}]", '{"path": 7}', '""'],
)
def test_invalid_entries_give_one_short_line(tmp_path: Path, entry: str) -> None:
    (tmp_path / "list.jsonl").write_text(entry)
    with pytest.raises(InputError, match=r"list\.jsonl") as refused:
        _find(tmp_path / "list.jsonl")
    assert len(str(refused.value)) < 300 + len(str(tmp_path))


def test_lists_at_urls_are_refused(tmp_path: Path) -> None:
    for name in ("l.txt", "l.json"):
        with pytest.raises(InputError, match=rf"https://host/{name}: lists are read from a disk"):
            files.find(f"https://host/{name}", "--data.path", tmp_path, print)
