"""Messages of errors."""

import pytest

from jaxtrain import errors


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\u2028b\x85c\x0cd.mp4 is broken\nmore", "a\u2028b\x85c\x0cd.mp4 is broken"),
        (" one\r\ntwo ", "one"),
        ("", "ValueError"),
    ],
)
def test_the_first_line_of_a_message_has_the_complete_name_of_a_file(text: str, line: str) -> None:
    assert errors.first_line(ValueError(text)) == line
