"""Finds the GPUs that this machine's workers may use. Asks the driver's own program; never loads CUDA."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
QUERY_TIMEOUT_S = 10.0


def visible(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices as `CUDA_VISIBLE_DEVICES` writes them; none: CPU only.

    An existing `CUDA_VISIBLE_DEVICES` is the whole truth; as in CUDA, what follows an invalid entry (-1) is hidden.
    """
    if VISIBLE in environment:
        devices = [device.strip() for device in environment[VISIBLE].split(",")]
        end = next((n for n, device in enumerate(devices) if device in ("", "-1", "NoDevFiles", "none")), len(devices))
        return tuple(devices[:end])
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return ()
    try:
        answer = subprocess.run(
            [program, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip().isdigit())


def environment_of(device: str | None) -> dict[str, str]:
    """Return the variables of a worker that has this device for itself; none where the machine has no GPU."""
    # nvidia-smi counts by PCI bus, CUDA by speed unless told otherwise.
    return {} if device is None else {VISIBLE: device, ORDER: "PCI_BUS_ID"}
