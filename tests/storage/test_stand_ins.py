from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.data.text import tokenizer_file
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic, stand_ins, tensor_files

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064x\nsize 123\n" % 7


@pytest.mark.parametrize(
    ("head", "cure"),
    [
        (POINTER, "git lfs pull"),
        (POINTER.replace(b"git-lfs", b"hawser"), "git lfs pull"),
        (b"../.git/annex/objects/xK/9f/SHA256E-s9--aa.txt/SHA256E-s9--aa.txt\n", "git annex get"),
        (b"/annex/objects/SHA256E-s9--aa.txt\n", "git annex get"),
        (b"<!DOCTYPE html>\n<html><head><title>404", "download the file again"),
        (b"\xef\xbb\xbf\r\n <!doctype HTML PUBLIC '-//W3C//DTD'>", "download the file again"),
        (b"<html lang='en'>", "download the file again"),
        (b"<?xml version='1.0'?>\n<!-- a -->\n<html xmlns='x'>", "download the file again"),
        (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code>', "download the file again"),
        (b"404: Not Found", "download the file again"),
        (b"Entry not found\n", "download the file again"),
    ],
)
def test_what_stands_for_a_file_is_named_with_the_fix(head: bytes, cure: str) -> None:
    assert cure in stand_ins.reason(head)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"version https is a word here",
        b'<p align="center">\n# A project',
        b"Not found was the answer, and the story begins.",
        b"<htmlish words",
        b"The page begins with <!doctype html>, as all pages do.",
        b"PAR1",
        b"404: Not Found" + b" " * stand_ins.HEAD_BYTES,
    ],
)
def test_text_is_text(head: bytes) -> None:
    assert not stand_ins.reason(head)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", tensor_files.read),
        ("model.pth", tensor_files.read),  # also where PyTorch is not installed
        ("tokenizer.json", tokenizer_file.read),
        ("config.json", atomic.read_json),
    ],
)
def test_readers_of_other_files_name_it(
    tmp_path: Path, name: str, read: Callable[[Path], Any]
) -> None:
    for content, cure in ((POINTER, "git lfs pull"), (b"<html>", "download the file again")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises((InputError, ValueError), match=cure):
            read(tmp_path / name)
