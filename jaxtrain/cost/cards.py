"""NVIDIA's GPUs: their rates, and their descriptions for XLA, with the source of every figure.

Sources: [D] NVIDIA's datasheet of the card; [W] NVIDIA's architecture white paper (Ampere GA100,
GA102, Ada AD102, Hopper GH100, Blackwell RTX); [X] the descriptions that XLA itself ships
(xla/backends/gpu/target_config/specs: a6000, a100_sxm_40, a100_sxm_80, h100_pcie, h200, b200), in
place of [W] for these cards; [P] CUDA C++ programming guide, table of technical specifications by
compute capability; [S] total memory as nvidia-smi prints it; [A] an assumption, labeled as such
wherever it is used.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from jaxtrain.config import bounds, field_values
from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import expanded

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Card:
    """One kind of GPU.

    Attributes:
        bf16_flops: dense matmul peak with float32 accumulation, FLOP/s [D]; most datasheets print
            the rate with sparsity, twice as high.
        memory_rate: memory-bandwidth peak, bytes/s [D].
        memory: total bytes [S].
        cores: streaming multiprocessors [W].
        clock_ghz: boost clock [D].
        l2: second-level cache, bytes [W].
        link_rate: one-way bytes/s to another GPU of the same node.
        node_rate: one-way bytes/s per GPU to another node [A].
    """

    name: str
    bf16_flops: float
    memory_rate: float
    memory: int
    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    l2: int
    link_rate: float
    node_rate: float
    link: str


# One-way bytes/s to another GPU of the node and, per GPU, to another node; and their description.
_ADAPTER = "one 400 Gb/s adapter per GPU between nodes [A]"
_SHARED = "one 100 Gb/s adapter for 8 GPUs between nodes [A]"
_HDR = "one 200 Gb/s adapter per GPU between nodes [A]"
_NVLINK_3 = (300e9, 25e9, f"NVLink 3, 600 GB/s both ways [D]; {_HDR}")
_NVLINK_3_A800 = (200e9, 25e9, f"NVLink 3, 400 GB/s both ways [D]; {_HDR}")
_NVLINK_4 = (450e9, 50e9, f"NVLink 4, 900 GB/s both ways [D]; {_ADAPTER}")
_NVLINK_5 = (900e9, 50e9, f"NVLink 5, 1,800 GB/s both ways [D]; {_ADAPTER}")
_PCIE_4 = (31.5e9, 1.56e9, f"PCIe 4 x16, no NVLink [D]; {_SHARED}")
_PCIE_4_ALONE = (31.5e9, 1.56e9, f"PCIe 4 x16, no NVLink bridge [A]; {_SHARED}")
_PCIE_5 = (63e9, 1.56e9, f"PCIe 5 x16 [D]; {_SHARED}")
_PCIE_5_ALONE = (
    63e9,
    6.25e9,
    "PCIe 5 x16, no NVLink bridge [A]; one 400 Gb/s adapter for 8 GPUs between nodes [A]",
)


# Name, TFLOP/s, TB/s, MiB, capability, multiprocessors, GHz, MiB of cache, links. If the name of a
# device has all words of several short names, the first counts.
_TABLE: dict[str, tuple[Any, ...]] = {
    "a10": ("NVIDIA A10", 125, 0.6, 23028, (8, 6), 72, 1.695, 6, _PCIE_4),
    "a10g": ("NVIDIA A10G", 70, 0.6, 23028, (8, 6), 80, 1.71, 6, _PCIE_4),
    "a40": ("NVIDIA A40", 149.7, 0.696, 46068, (8, 6), 84, 1.74, 6, _PCIE_4_ALONE),
    "a6000": ("NVIDIA RTX A6000", 154.8, 0.768, 49140, (8, 6), 84, 1.8, 6, _PCIE_4_ALONE),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 312, 1.555, 40960, (8, 0), 108, 1.41, 40, _NVLINK_3),
    "a100-pcie": ("NVIDIA A100 80GB PCIe", 312, 1.935, 81920, (8, 0), 108, 1.41, 40, _PCIE_4_ALONE),
    "a100": ("NVIDIA A100-SXM4-80GB", 312, 2.039, 81920, (8, 0), 108, 1.41, 40, _NVLINK_3),
    "a800-pcie": ("NVIDIA A800 80GB PCIe", 312, 1.935, 81920, (8, 0), 108, 1.41, 40, _PCIE_4_ALONE),
    "a800": ("NVIDIA A800-SXM4-80GB", 312, 2.039, 81920, (8, 0), 108, 1.41, 40, _NVLINK_3_A800),
    "h100-pcie": ("NVIDIA H100 PCIe", 756, 2.0, 81559, (9, 0), 114, 1.755, 50, _PCIE_5_ALONE),
    "h100-nvl": ("NVIDIA H100 NVL", 835, 3.9, 95830, (9, 0), 132, 1.785, 50, _PCIE_5_ALONE),
    "h100": ("NVIDIA H100 80GB HBM3", 989, 3.35, 81559, (9, 0), 132, 1.98, 50, _NVLINK_4),
    "h200-nvl": ("NVIDIA H200 NVL", 835, 4.8, 143771, (9, 0), 132, 1.785, 50, _PCIE_5_ALONE),
    "h200": ("NVIDIA H200", 989, 4.8, 143771, (9, 0), 132, 1.98, 50, _NVLINK_4),
    "gh200": ("NVIDIA GH200 480GB", 989, 4.0, 97871, (9, 0), 132, 1.98, 50, _NVLINK_4),
    "b200": ("NVIDIA B200", 2250, 8.0, 183359, (10, 0), 148, 1.965, 126.5, _NVLINK_5),
    "l4": ("NVIDIA L4", 121, 0.3, 23034, (8, 9), 58, 2.04, 48, _PCIE_4),
    "l40s": ("NVIDIA L40S", 362, 0.864, 46068, (8, 9), 142, 2.52, 96, _PCIE_4),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 165.2, 1.008, 24564, (8, 9), 128, 2.52, 72, _PCIE_4),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 209.5, 1.792, 32607, (12, 0), 170, 2.407, 96, _PCIE_5),
}
CARDS = {
    short: Card(
        *(name, flops * 1e12, rate * 1e12, memory * MIB, capability, cores, clock),
        *(int(l2 * MIB), *links),
    )
    for short, (name, flops, rate, memory, capability, cores, clock, l2, links) in _TABLE.items()
}

# Words that tell a card from others in the name of a device, if they are not those of the short
# name. Names vary: an A10 is also "A10-24Q", and an H100 also "H100 80GB HBM3 MIG 3g.40gb".
_WORDS = {"rtx4090": "RTX 4090", "rtx5090": "RTX 5090"}

# By compute capability [P]: threads, bytes of shared memory, maximum bytes of shared memory per
# block, and float32 units; of a multiprocessor.
_LIMITS = {
    (8, 0): (2048, 164 * 1024, 163 * 1024, 64),
    (8, 6): (1536, 100 * 1024, 99 * 1024, 128),
    (8, 9): (1536, 100 * 1024, 99 * 1024, 128),
    (9, 0): (2048, 228 * 1024, 227 * 1024, 128),
    (10, 0): (2048, 228 * 1024, 227 * 1024, 128),
    (12, 0): (1536, 100 * 1024, 99 * 1024, 128),
}


def card(name: str) -> Card:
    """Looks up a card by its short name, or reads a JSON file that describes one."""
    if name in CARDS:
        return CARDS[name]
    if not name.endswith(".json"):
        near = field_values.did_you_mean(name, CARDS)
        raise InputError(f"--gpu {name} is unknown; {near}, or pass a .json file that describes it")
    return _read(expanded(name))


def _read(path: Path) -> Card:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--gpu {path}: {error}") from error
    fields = [field.name for field in dataclasses.fields(Card)]
    present = set(content) if isinstance(content, dict) else set[str]()
    if present != set(fields):
        differing = sorted(present ^ set(fields))
        raise InputError(
            f"--gpu {path} must be an object with {', '.join(fields)} (docs/guides/plan.md); "
            f"missing or unknown: {', '.join(differing)}"
        )
    values: dict[str, Any] = dict(content)
    for name in ("name", "link"):
        if not isinstance(values[name], str) or '"' in values[name]:
            raise InputError(f"--gpu {path}: {name} must be a text without quotation marks")
    for name in ("memory", "cores", "l2"):
        bounds.check(f"--gpu {path}: {name}", values[name], bounds.Bounds(least=1))
    for name in ("bf16_flops", "memory_rate", "clock_ghz", "link_rate", "node_rate"):
        bounds.check(f"--gpu {path}: {name}", values[name], bounds.Bounds(above=0), float)
        values[name] = float(values[name])
    capability = values["capability"]
    known = [list(limited) for limited in _LIMITS]
    if capability not in known:
        raise InputError(f"--gpu {path}: capability={capability} must be one of {known}")
    return Card(**(values | {"capability": tuple(capability)}))


def card_of_config(name: str) -> str | None:
    """Returns the card in a config's name, such as "h100" in "gpt_h100_8"."""
    return next((short for short in CARDS if short in name.split("_")), None)


def usual_card(name: str) -> str:
    """The default card for a config named after none: by the memory in its name, else h100."""
    return "rtx5090" if "32gb" in name.split("_") else "h100"


def of_device(kind: str) -> Card | None:
    """Returns the card that jax and nvidia-smi print as ``kind``; None if it is not listed."""
    return next((card for card in CARDS.values() if card.name == kind), None)


def rates(kind: str) -> tuple[float | None, float | None]:
    """Returns a device's peaks of bfloat16 matmuls, FLOP/s, and of memory, bytes/s.

    Returns:
        None for both if the device is of no card in the table, or a slice of one (MIG).
    """
    words = set(re.split(r"[^A-Z0-9]+", kind.upper()))
    if "MIG" in words:  # a slice of a card has a part of its rates
        return None, None
    for short, card in CARDS.items():
        if words.issuperset(_WORDS.get(short, short.replace("-", " ")).upper().split()):
            return card.bf16_flops, card.memory_rate
    return None, None


def target_config(card: Card) -> str:
    """Describes the card to XLA (``GpuTargetConfigProto``, text form)."""
    threads, shared, shared_of_block, units = _LIMITS[card.capability]
    major, minor = card.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: {threads} core_count: {card.cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(card.memory_rate)} l2_cache_size: {card.l2}
  clock_rate_ghz: {card.clock_ghz} device_memory_size: {card.memory}
  shared_memory_per_block_optin: {shared_of_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{card.name}"
"""
