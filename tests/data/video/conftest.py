"""What tests of videos share."""

import pytest

from jaxtrain.data.video import pieces


@pytest.fixture
def one_shot(monkeypatch: pytest.MonkeyPatch) -> None:
    """All frames are one shot: numbered frames differ as much as shots do."""
    monkeypatch.setattr(pieces, "_CUT_STEP", 256.0)
