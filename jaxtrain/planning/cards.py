"""The GPUs that a run can be planned for, with the source of every figure.

Sources: [D] NVIDIA's datasheet of the card; [W] NVIDIA's architecture white paper (Ampere GA100,
GA102, Ada AD102, Hopper GH100, Blackwell RTX); [X] the descriptions that XLA itself ships
(xla/backends/gpu/target_config/specs: a100_sxm_40, a100_sxm_80, h100_pcie, b200), in place of [W]
for these cards; [P] CUDA C++ programming guide, table of technical specifications by compute
capability; [S] total memory as nvidia-smi prints it; [A] an assumption, labeled as such wherever it
is used.
"""

import dataclasses

from jaxtrain.config import field_values
from jaxtrain.errors import InputError
from jaxtrain.telemetry import hardware

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Card:
    """One kind of GPU.

    Attributes:
        name: as printed by jax and nvidia-smi.
        memory: total bytes [S].
        capability: compute capability.
        cores: streaming multiprocessors [W].
        clock_ghz: boost clock [D].
        l2: second-level cache, bytes [W].
        link_rate: one-way bytes/s to another GPU of the same node.
        node_rate: one-way bytes/s per GPU to another node [A].
        link: describes the links behind both rates.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    l2: int
    link_rate: float
    node_rate: float
    link: str

    @property
    def bf16_flops(self) -> float:
        """Dense matmul peak with float32 accumulation, FLOP/s [D]."""
        return _known(hardware.peak_bf16_flops(self.name))

    @property
    def memory_rate(self) -> float:
        """Memory-bandwidth peak, bytes/s [D]."""
        return _known(hardware.memory_bytes_per_second(self.name))


def _known(rate: float | None) -> float:
    assert rate is not None, "telemetry/hardware.py lists every card"
    return rate


# One-way bytes/s to another GPU of the node and, per GPU, to another node; and their description.
_ADAPTER = "one 400 Gb/s adapter per GPU between nodes [A]"
_SHARED = "one 100 Gb/s adapter for 8 GPUs between nodes [A]"
_HDR = "one 200 Gb/s adapter per GPU between nodes [A]"
_NVLINK_3 = (300e9, 25e9, f"NVLink 3, 600 GB/s both ways [D]; {_HDR}")
_NVLINK_3_A800 = (200e9, 25e9, f"NVLink 3, 400 GB/s both ways [D]; {_HDR}")
_NVLINK_4 = (450e9, 50e9, f"NVLink 4, 900 GB/s both ways [D]; {_ADAPTER}")
_NVLINK_5 = (900e9, 50e9, f"NVLink 5, 1,800 GB/s both ways [D]; {_ADAPTER}")
_PCIE_4 = (31.5e9, 1.56e9, f"PCIe 4 x16, no NVLink [D]; {_SHARED}")
_PCIE_4_BRIDGE = (31.5e9, 1.56e9, f"PCIe 4 x16, no NVLink bridge [A]; {_SHARED}")
_PCIE_5 = (63e9, 1.56e9, f"PCIe 5 x16 [D]; {_SHARED}")
_PCIE_5_BRIDGE = (
    63e9,
    6.25e9,
    "PCIe 5 x16, no NVLink bridge [A]; one 400 Gb/s adapter for 8 GPUs between nodes [A]",
)

# Short name: name, memory, compute capability, multiprocessors, GHz, second-level cache, links.
CARDS = {
    "a10": Card("NVIDIA A10", 23028 * MIB, (8, 6), 72, 1.695, 6 * MIB, *_PCIE_4),
    "a6000": Card("NVIDIA RTX A6000", 49140 * MIB, (8, 6), 84, 1.8, 6 * MIB, *_PCIE_4_BRIDGE),
    "a100-40gb": Card(
        "NVIDIA A100-SXM4-40GB", 40960 * MIB, (8, 0), 108, 1.41, 40 * MIB, *_NVLINK_3
    ),
    "a100": Card("NVIDIA A100-SXM4-80GB", 81920 * MIB, (8, 0), 108, 1.41, 40 * MIB, *_NVLINK_3),
    "a800": Card(
        "NVIDIA A800-SXM4-80GB", 81920 * MIB, (8, 0), 108, 1.41, 40 * MIB, *_NVLINK_3_A800
    ),
    "h100": Card("NVIDIA H100 80GB HBM3", 81559 * MIB, (9, 0), 132, 1.98, 50 * MIB, *_NVLINK_4),
    "h200": Card("NVIDIA H200", 143771 * MIB, (9, 0), 132, 1.98, 50 * MIB, *_NVLINK_4),
    "h100-pcie": Card(
        "NVIDIA H100 PCIe", 81559 * MIB, (9, 0), 114, 1.755, 50 * MIB, *_PCIE_5_BRIDGE
    ),
    "h100-nvl": Card("NVIDIA H100 NVL", 95830 * MIB, (9, 0), 132, 1.785, 50 * MIB, *_PCIE_5_BRIDGE),
    "b200": Card("NVIDIA B200", 183359 * MIB, (10, 0), 148, 1.965, 132644864, *_NVLINK_5),
    "l40s": Card("NVIDIA L40S", 46068 * MIB, (8, 9), 142, 2.52, 96 * MIB, *_PCIE_4),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", 24564 * MIB, (8, 9), 128, 2.52, 72 * MIB, *_PCIE_4),
    "rtx5090": Card(
        "NVIDIA GeForce RTX 5090", 32607 * MIB, (12, 0), 170, 2.407, 96 * MIB, *_PCIE_5
    ),
}

_OF_MEMORY = {"32gb": "rtx5090"}

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
    """Looks up a card by its short name.

    Raises:
        InputError: there is no such card; the message suggests others.
    """
    if name not in CARDS:
        raise InputError(f"--gpu {name} is unknown; {field_values.did_you_mean(name, CARDS)}")
    return CARDS[name]


def card_of_config(name: str) -> str | None:
    """Returns the card in a config's name, such as "h100" in "mlm_h100_8"."""
    return next((short for short in CARDS if short in name.split("_")), None)


def usual_card(name: str) -> str:
    """The default card for a config named after none: by the memory in its name, else h100."""
    return next((card for memory, card in _OF_MEMORY.items() if memory in name.split("_")), "h100")


def of_device(kind: str) -> Card | None:
    """Returns the card that jax and nvidia-smi print as ``kind``; None if it is not listed."""
    return next((card for card in CARDS.values() if card.name == kind), None)


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
