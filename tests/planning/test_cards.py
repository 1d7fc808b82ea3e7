"""Tests the table of supported GPUs."""

import pytest

from jaxtrain.config import files
from jaxtrain.errors import InputError
from jaxtrain.planning import cards
from jaxtrain.telemetry.hardware import GIB


@pytest.mark.parametrize("name", cards.CARDS)
def test_each_card_has_rates_and_a_description_for_xla(name: str) -> None:
    card = cards.card(name)
    assert card.bf16_flops > 1e14
    assert card.memory_rate > 5e11
    text = cards.target_config(card)
    assert f'device_description_str: "{card.name}"' in text
    assert f"device_memory_size: {card.memory}" in text


def test_an_unknown_card_suggests_the_closest() -> None:
    with pytest.raises(InputError, match="did you mean h100"):
        cards.card("h10")


def test_the_names_of_shipped_configs_contain_their_card() -> None:
    found = {name: cards.card_of_config(name) for name in files.names()}
    assert found["h100_16"] == "h100"
    assert found["mlm_a10_8"] == "a10"
    assert found["a800_8"] == "a800"
    assert found["bert_base_h200_8"] == "h200"
    assert found["demo"] is None
    assert found["gpt_32gb_high"] is None
    assert cards.card(cards.usual_card("gpt_32gb_high")).memory <= 32 * GIB
    assert cards.usual_card("demo") == "h100"
