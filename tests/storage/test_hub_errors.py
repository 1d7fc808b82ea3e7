"""Errors of the Hub."""

import pytest

from jaxtrain.errors import RunAgain
from jaxtrain.storage import hub_errors


def test_an_unknown_error_is_raised_unchanged_and_not_from_itself() -> None:
    """Who follows the causes of an error that causes itself never ends."""
    error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError) as raised:
        hub_errors.fail(error, "hf:org/name", kind="model", page="org/name", absent="no such model")
    assert raised.value is error
    assert error.__cause__ is None


def test_an_error_of_the_network_keeps_its_cause() -> None:
    error = ConnectionError("reset")
    with pytest.raises(RunAgain, match=r"hf:org/name: .* cannot be reached") as raised:
        hub_errors.fail(error, "hf:org/name", kind="model", page="org/name", absent="no such model")
    assert raised.value.__cause__ is error
