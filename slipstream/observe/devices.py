"""What the data sheets say of devices, and what this one has done: for plans, and for what a run says of itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceKind:
    name: str
    memory: float
    """Bytes."""
    flops: float
    """Per second, in fp32 without tensor cores, which is what the trainer computes in unless told otherwise."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second in one direction, to a neighbour in the same machine."""
    bf16_flops: float | None = None
    """Per second, dense, on tensor cores where it has them. None: as in fp32."""
    node_size: int | None = 8
    """Devices of a machine; None: all there are."""
    node_bandwidth: float = 50e9
    """Bytes per second of every device's link to other machines: InfiniBand NDR, 400 Gb/s."""

    def flops_in(self, dtype: torch.dtype) -> float:
        return self.bf16_flops or self.flops if dtype == torch.bfloat16 else self.flops


DEVICE_KINDS = {
    # NVIDIA's data sheets, SXM forms; NVLink is sold by the sum of both directions, here is one.
    "h200": DeviceKind("h200", 141e9, 67e12, 4.8e12, 450e9, 989e12),
    "h100": DeviceKind("h100", 80e9, 67e12, 3.35e12, 450e9, 989e12),
    "a100": DeviceKind("a100", 80e9, 19.5e12, 2.039e12, 300e9, 312e12),
    "b200": DeviceKind("b200", 180e9, 75e12, 7.7e12, 900e9, 2250e12),
    # PCIe 4.0 between them.
    "l40s": DeviceKind("l40s", 48e9, 91.6e12, 0.864e12, 32e9, 362e12),
    "rtx4090": DeviceKind("rtx4090", 24e9, 82.6e12, 1.008e12, 32e9, 165e12),
}


def kind_of(name: str) -> DeviceKind | None:
    """By what torch calls it, such as "NVIDIA H100 80GB HBM3". None: unknown; other forms of a chip are other kinds."""
    plain = name.lower().replace(" ", "")
    if "pcie" in plain or "nvl" in plain:
        return None
    return next((kind for key, kind in DEVICE_KINDS.items() if key in plain), None)


def flops_of(device: torch.device, num_devices: int, dtype: torch.dtype) -> float | None:
    """What so many of them could do in a second. None: nobody knows."""
    kind = kind_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if kind is None else num_devices * kind.flops_in(dtype)
