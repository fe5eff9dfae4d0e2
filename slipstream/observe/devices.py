"""Holds the data sheet values of GPUs. Plans use them, and a run computes its MFU from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceKind:
    name: str
    memory: float
    """Memory in bytes."""
    flops: float
    """FLOPs per second in fp32 without tensor cores."""
    memory_bandwidth: float
    """Memory bandwidth in bytes per second."""
    link_bandwidth: float
    """Bandwidth in bytes per second and in one direction, to another device in the same machine."""
    bf16_flops: float | None = None
    """Dense FLOPs per second in bf16, on tensor cores if the device has them. None means the same as in fp32."""
    node_size: int | None = 8
    """Number of devices in one machine. None means that all devices are in one machine."""
    node_bandwidth: float = 50e9
    """Bandwidth in bytes per second of every device's link to other machines. The default is InfiniBand NDR, 400
    Gb/s."""

    def flops_in(self, dtype: torch.dtype) -> float:
        return self.bf16_flops or self.flops if dtype == torch.bfloat16 else self.flops


DEVICE_KINDS = {
    # Values from NVIDIA's data sheets for the SXM forms. They give the NVLink bandwidth as the sum of both directions;
    # here it is the bandwidth of one.
    "h200": DeviceKind("h200", 141e9, 67e12, 4.8e12, 450e9, 989e12),
    "h100": DeviceKind("h100", 80e9, 67e12, 3.35e12, 450e9, 989e12),
    "a100": DeviceKind("a100", 80e9, 19.5e12, 2.039e12, 300e9, 312e12),
    "b200": DeviceKind("b200", 180e9, 75e12, 7.7e12, 900e9, 2250e12),
    # These devices are connected by PCIe 4.0.
    "l40s": DeviceKind("l40s", 48e9, 91.6e12, 0.864e12, 32e9, 362e12),
    "rtx4090": DeviceKind("rtx4090", 24e9, 82.6e12, 1.008e12, 32e9, 165e12),
}


def kind_of(name: str) -> DeviceKind | None:
    """Returns the kind of device for a name that torch reports, such as "NVIDIA H100 80GB HBM3".

    Returns None if the kind is unknown. PCIe and NVL forms of a chip are different kinds, which are not in the table.
    """
    plain = name.lower().replace(" ", "")
    if "pcie" in plain or "nvl" in plain:
        return None
    return next((kind for key, kind in DEVICE_KINDS.items() if key in plain), None)


def flops_of(device: torch.device, num_devices: int, dtype: torch.dtype) -> float | None:
    """Returns the FLOPs per second of `num_devices` such devices, or None if they are unknown."""
    kind = kind_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if kind is None else num_devices * kind.flops_in(dtype)
