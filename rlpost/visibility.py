"""Which devices a process sees: CUDA's, HIP's and ROCr's visibility variables, read once. Pure functions of them.

ROCr hides devices first; HIP then numbers what is left from 0 and applies its own mask, which HIP_VISIBLE_DEVICES and
CUDA_VISIBLE_DEVICES both name (https://rocm.docs.amd.com/en/latest/reference/env-variables.html).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
MASKS = {"cpu": (), "cuda": (CUDA,), "rocm": (HIP, CUDA)}  # what a child process is given, all alike


@dataclass(slots=True, frozen=True, kw_only=True)
class Device:
    """One visible device.

    Attributes:
        logical: its number in a process that sees all visible devices.
        physical: its number on the host, without any mask; None where the host's devices could not be listed.
        mask: how a visibility variable names it.
        uuid: "" where it could not be read.
    """

    logical: int
    physical: int | None
    mask: str
    uuid: str = ""


@dataclass(slots=True, frozen=True)
class Visibility:
    """The devices that driver, Ray and workers may use, in the order of their logical numbers.

    Masks count on the host: a ROCr mask that led here has to be dropped.
    """

    kind: str
    devices: tuple[Device, ...]

    def env(self, masks: Sequence[str] | None = None) -> dict[str, str]:
        """Variables that show a process the devices `masks` (default: all), HIP and CUDA alike."""
        return mask_env(self.kind, [device.mask for device in self.devices] if masks is None else masks)

    def by_uuid(self, uuid: str) -> Device:
        """The device that another process calls `uuid`, as HIP or as torch writes it.

        Raises:
            ValueError: it is not visible here; lists those that are.
        """
        for device in self.devices:
            if device.uuid and hip_uuid(uuid) == device.uuid.lower():
                return device
        raise ValueError(f"device {uuid} is not visible here; visible: {[d.uuid for d in self.devices]}")


def mask_env(kind: str, masks: Sequence[str]) -> dict[str, str]:
    """Variables that show a process exactly the devices `masks`; none on CPU."""
    return dict.fromkeys(MASKS[kind], ",".join(masks))


def hip_uuid(uuid: str) -> str:
    """HIP's form of a device's uuid, lower case: "gpu-" and 16 hex digits.

    HIP's uuid is those 16 digits as text, and torch prints the bytes of that text in hex. Others pass unchanged.
    """
    try:
        text = bytes.fromhex(uuid.replace("-", "")).decode("ascii")
        int(text, 16)
    except ValueError:  # includes UnicodeDecodeError
        return uuid.lower()
    return f"gpu-{text.lower()}"


def resolve_visibility(
    kind: str, env: Mapping[str, str], num_devices: int | None, uuids: Sequence[str] = ()
) -> Visibility:
    """What `env` leaves visible of a host's devices.

    Args:
        kind: "cpu", "cuda" or "rocm".
        env: of this process, before anything was changed.
        num_devices: on the host, without any mask; None where they could not be counted, and then a mask must be set.
        uuids: theirs, in physical order; may be empty.

    Raises:
        ValueError: variables that contradict each other, or name a device twice or one that does not exist.
    """
    if kind == "cpu":
        return Visibility(kind, ())
    every = [
        Device(logical=i, physical=i, mask=str(i), uuid=uuids[i] if i < len(uuids) else "")
        for i in range(num_devices or 0)
    ]
    if kind == "cuda":
        return Visibility(kind, _select(CUDA, env.get(CUDA), every, num_devices))
    if env.get("GPU_DEVICE_ORDINAL"):
        raise ValueError(
            f"GPU_DEVICE_ORDINAL={env['GPU_DEVICE_ORDINAL']} is one more mask under {HIP}: unset it and name the "
            f"devices in {HIP}"
        )
    if HIP in env and CUDA in env and _tokens(env[HIP]) != _tokens(env[CUDA]):
        raise ValueError(
            f"{HIP}={env[HIP]} and {CUDA}={env[CUDA]} disagree. HIP follows the first, libraries that only know CUDA's "
            f"name the second: unset {CUDA}, rlpost sets both"
        )
    name, mask = (HIP, env[HIP]) if HIP in env else (CUDA, env.get(CUDA))
    if ROCR not in env:
        return Visibility(kind, _select(name, mask, every, num_devices))
    below = _select(ROCR, env[ROCR], every, num_devices)
    left = [Device(logical=i, physical=d.physical, mask=str(i), uuid=d.uuid) for i, d in enumerate(below)]
    if mask is not None and not _agree(name, mask, left):
        raise ValueError(
            f"{ROCR}={env[ROCR]} and {name}={mask} contradict each other: ROCr hides devices first and HIP numbers "
            f"the rest from 0, so {name} counts within {ROCR}, not on the host. Unset {ROCR} and name the host's "
            f"devices in {HIP} alone, for example {HIP}={env[ROCR]}"
        )
    chosen = _select(name, mask, left, len(left))
    return Visibility(kind, tuple(replace(device, mask=_host_number(device, env[ROCR])) for device in chosen))


def _host_number(device: Device, rocr: str) -> str:
    """How HIP's mask alone names `device`, so that children need no ROCr mask."""
    if device.physical is None:
        raise ValueError(f"{ROCR}={rocr} cannot be looked up on this host: name the devices in {HIP} instead")
    return str(device.physical)


def _agree(name: str, mask: str, left: Sequence[Device]) -> bool:
    """Whether `mask` means the same devices when it counts on the host as when it counts within what ROCr leaves."""
    try:
        within = _select(name, mask, left, len(left))
    except ValueError:
        return False
    return all(_is_uuid(t) or t == str(d.physical) for t, d in zip(_tokens(mask), within, strict=True))


def _select(name: str, mask: str | None, devices: Sequence[Device], num_devices: int | None) -> tuple[Device, ...]:
    """The devices that `mask` names, in its order, renumbered; all without a mask."""
    if mask is None:
        if num_devices is None:
            raise ValueError(f"the devices of this host could not be counted: name them in {name}")
        return tuple(devices)
    tokens = _tokens(mask)
    if tokens in ([], ["-1"]):  # how one hides all
        return ()
    found = [_find(name, mask, token, devices, num_devices) for token in tokens]
    if len({device.mask for device in found}) < len(found):
        raise ValueError(f"{name}={mask} names a device twice: the runtime would then show none")
    return tuple(Device(logical=i, physical=d.physical, mask=d.mask, uuid=d.uuid) for i, d in enumerate(found))


def _find(name: str, mask: str, token: str, devices: Sequence[Device], num_devices: int | None) -> Device:
    if num_devices is None or (_is_uuid(token) and not any(device.uuid for device in devices)):
        return Device(logical=0, physical=int(token) if token.isdigit() else None, mask=token)  # cannot be looked up
    found = [d for d in devices if (_matches(token, d) if _is_uuid(token) else token == str(d.logical))]
    if len(found) != 1:
        known = ", ".join(f"{d.logical}{f' ({d.uuid})' if d.uuid else ''}" for d in devices) or "none"
        raise ValueError(
            f"{name}={mask}: {token!r} is {'more than one device' if found else 'no device'} here; there are: {known}"
        )
    return found[0]


def _is_uuid(token: str) -> bool:
    return token.upper().startswith(("GPU-", "MIG-"))


def _matches(token: str, device: Device) -> bool:
    return bool(device.uuid) and device.uuid.lower().startswith(token.lower())  # a prefix is enough for the runtimes


def _tokens(mask: str) -> list[str]:
    return [token.strip() for token in mask.split(",") if token.strip()]
