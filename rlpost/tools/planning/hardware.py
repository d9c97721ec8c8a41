"""What accelerators can do, by name: makers' data sheets, and the memory that torch reports."""

from dataclasses import dataclass

from rlpost.registry import near

GIB = 1024**3
GPUS_PER_NODE = 8


@dataclass(slots=True, frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: as the command line says it.
        memory_bytes: what torch reports as total, or the data sheet's figure in GiB where no report was at hand.
        memory_bytes_s: peak bandwidth of its memory.
        flops_s: peak of dense bfloat16 matrix products.
        link_bytes_s: to all other devices of its host together, one direction.
        network_bytes_s: to other hosts, one direction; a 400 Gb/s card a device is assumed throughout.
        host_bytes_s: to its host's memory, one direction; PCIe 5 x16 in practice.
        groups_keys: whether torch's varlen attention takes key heads as they are; on ROCm not up to torch 2.11.
        source: of the figures.
    """

    name: str
    memory_bytes: float
    memory_bytes_s: float
    flops_s: float
    link_bytes_s: float
    network_bytes_s: float = 50e9
    host_bytes_s: float = 50e9
    groups_keys: bool = True
    source: str


def _nvidia(name: str, gib: float, memory: float, flops: float, link: float) -> Device:
    source = "NVIDIA data sheet (dense is half of the figure with sparsity); memory as torch reports it"
    return Device(
        name=name, memory_bytes=gib * GIB, memory_bytes_s=memory, flops_s=flops, link_bytes_s=link, source=source
    )


def _amd(name: str, gib: float, memory: float, flops: float, link: float) -> Device:
    source = "AMD Instinct data sheet (dense bfloat16; seven Infinity Fabric links)"
    return Device(
        name=name, memory_bytes=gib * GIB, memory_bytes_s=memory, flops_s=flops, link_bytes_s=link, source=source,
        groups_keys=False,
    )  # fmt: skip


DEVICES = {
    device.name: device
    for device in (
        _nvidia("a100", 79.2, 2.04e12, 312e12, 300e9),
        _nvidia("h100", 79.1, 3.35e12, 989e12, 450e9),
        _nvidia("h200", 139.8, 4.8e12, 989e12, 450e9),
        _nvidia("b200", 178.0, 8.0e12, 2250e12, 900e9),
        _amd("mi300a", 128.0, 5.3e12, 981e12, 384e9),
        _amd("mi300x", 192.0, 5.3e12, 1307e12, 448e9),
        _amd("mi325x", 256.0, 6.0e12, 1307e12, 448e9),
        _amd("mi350x", 288.0, 8.0e12, 2307e12, 537e9),
        _amd("mi355x", 288.0, 8.0e12, 2517e12, 537e9),
    )
}
ALIASES = {"mi300": "mi300x", "mi350": "mi350x", "mi355": "mi355x", "mi325": "mi325x"}


def device_of(name: str) -> Device:
    """The device that `name` means, in any case.

    Raises:
        ValueError: an unknown name.
    """
    key = ALIASES.get(name.lower(), name.lower())
    if key not in DEVICES:
        raise ValueError(f"hardware={name}: not in the table; {near(key, DEVICES)}. Known: {', '.join(DEVICES)}")
    return DEVICES[key]
