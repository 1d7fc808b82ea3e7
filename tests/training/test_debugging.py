"""``--debug`` reports the arrays with NaN/Inf at any step."""

import numpy as np
import pytest
import toy

from jaxtrain.errors import InputError
from jaxtrain.training import debugging


def test_a_checked_step_reports_the_arrays_with_nan_or_inf() -> None:
    stepper = toy.stepper(toy.Config(), fsdp=8)
    stepper.compiled = debugging.checked(stepper.compiled)  # type: ignore[assignment]
    batch = toy.random_batch(stepper.spec)
    stepper(batch)
    stepper(batch)
    batch["x"][3] = np.nan
    with pytest.raises(InputError, match=r"step 3 \(examples from 32 on\).*train/loss"):
        stepper(batch)
