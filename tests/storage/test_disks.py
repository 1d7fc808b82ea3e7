"""What is said of a disk that fails, as of a checkpoint that cannot be written or read."""

import pytest

from jaxtrain.storage import disks

# As TensorStore 0.1 says that a disk is full; its notes at the end come in either order.
FULL = (
    'RESOURCE_EXHAUSTED: Error opening "zarr" driver: Error writing local file "/disk/x/.zarray": '
    'Failed writing: "/disk/x/.zarray.__lock": Failed to write 209 bytes to file 3: No space left '
    "on device"
)
CODE = " [os_error_code='28']"
SPEC = (
    """ [tensorstore_spec='{\\"create\\":true,\\"input_exclusive_max\\":[[10]],\\"zarr\\":true}']"""
)


@pytest.mark.parametrize("notes", [CODE, CODE + SPEC, SPEC + CODE], ids=["code", "first", "last"])
def test_the_words_of_the_system_are_the_reason(notes: str) -> None:
    error = RuntimeError("save failed")
    error.__cause__ = ValueError(FULL + notes)
    assert disks.reason(error) == "No space left on device"


def test_other_reasons_are_said_in_one_line() -> None:
    assert disks.reason(OSError(5, "Input/output error")) == "Input/output error"
    assert disks.reason(ValueError("bad\nworse")) == "ValueError: bad"
    assert disks.reason(KeyError()) == "KeyError"
