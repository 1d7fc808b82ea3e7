"""Tests the table of supported GPUs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config import files
from jaxtrain.cost import cards
from jaxtrain.errors import InputError
from jaxtrain.formats import GIB


@pytest.mark.parametrize("name", cards.CARDS)
def test_each_card_has_rates_and_a_description_for_xla(name: str) -> None:
    card = cards.card(name)
    assert card.bf16_flops >= 7e13
    assert cards.rates(card.name) == (card.bf16_flops, card.memory_rate)
    assert card.memory_rate >= 3e11
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


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    # Read in November 2026: rates of A40, L4, H100 NVL, and H100 (GH200) in nanochat's
    # get_peak_flops, which has 836 for H200 NVL (half of the datasheet's 1,671); of A10G in other
    # programs; names and memory of A800 PCIe, H100 NVL, GH200, L4, and B200 in outputs of
    # nvidia-smi; A6000, H200, and B200 as XLA describes them (4336d12, 300ec95); A40 in
    # techpowerup's table, and the bandwidth of A10G at baseten.co. Not read anywhere: the memory of
    # A40 in MiB, multiprocessors and clock of A10G, clocks of the NVL cards.
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A800 80GB PCIe", 312),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA L4", 121),
        ("cpu", None),
    ],
)
def test_matmul_peaks(kind: str, teraflops: float | None) -> None:
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert cards.rates(kind)[0] == expected


def test_a_file_describes_a_card(tmp_path: Path) -> None:
    """`plan --gpu FILE`: an L20 has the chip of an L40S, with less of it."""
    path = tmp_path / "l20.json"
    l20 = dataclasses.asdict(cards.CARDS["l40s"]) | {"name": "NVIDIA L20", "bf16_flops": 119.5e12}
    path.write_text(json.dumps(l20))
    card = cards.card(str(path))
    assert (card.name, card.bf16_flops, card.capability) == ("NVIDIA L20", 119.5e12, (8, 9))
    assert "core_count: 142" in cards.target_config(card)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": None}, "missing or unknown: memory"),
        ({"speed": 3}, "missing or unknown: speed"),
        ({"capability": [7, 0]}, r"capability=\[7, 0\] must be one of"),
        ({"cores": -1}, "cores"),
        ({"clock_ghz": "fast"}, "clock_ghz"),
        ({"name": 'a "card"'}, "name must be a text without quotation marks"),
    ],
)
def test_a_file_that_describes_no_card_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "card.json"
    content = dataclasses.asdict(cards.CARDS["l40s"]) | change
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    with pytest.raises(InputError, match=message):
        cards.card(str(path))


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json"):
        cards.card(str(tmp_path / "absent.json"))
    (tmp_path / "text.json").write_text("text")
    with pytest.raises(InputError, match=r"text\.json"):
        cards.card(str(tmp_path / "text.json"))
