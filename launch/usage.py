"""What a run uses beside time: memory of the process, and how busy the accelerator is."""

import os
import sys
import threading
from pathlib import Path

__all__ = ["Usage"]

_GIB = 2.0**30
_EVERY = 1.0  # seconds between two looks at the accelerator


class Usage:
    """Samples this process and, where torch has a CUDA device, that device.

    Memory is read when asked for. How busy the device is changes faster than a log is written, so
    a thread looks every second; without a device there is no thread.
    """

    def __init__(self) -> None:
        self._busy: list[float] = []
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> dict[str, float]:
        """Return what was used since the last call, by metric name.

        Returns:
            `memory_host`: resident memory in GiB. On a CUDA device `memory_allocated` and
            `memory_reserved` in GiB, and `device_utilization`: the mean share of time in which it
            worked, in [0, 1], if nvidia-ml-py is installed.
        """
        found: dict[str, float] = {}
        if (resident := _resident()) is not None:
            found["memory_host"] = resident
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return found
        found["memory_allocated"] = torch.cuda.memory_allocated() / _GIB
        found["memory_reserved"] = torch.cuda.memory_reserved() / _GIB
        if self._thread is None:
            # Each thread has a current device of its own, which is the first one at the start.
            device = torch.cuda.current_device()
            self._thread = threading.Thread(
                target=self._look, args=(device,), name="usage", daemon=True
            )
            self._thread.start()
        with self._lock:
            if self._busy:
                found["device_utilization"] = sum(self._busy) / len(self._busy)
            self._busy.clear()
        return found

    def close(self) -> None:
        """End the thread, if there is one."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _EVERY)

    def _look(self, device: int) -> None:
        import torch

        while not self._closed.wait(_EVERY):
            try:
                share = torch.cuda.utilization(device) / 100.0
            except Exception:  # no nvidia-ml-py, no driver, or a part of a GPU, which does not tell
                return
            with self._lock:
                self._busy.append(share)


def _resident() -> float | None:
    """Return the resident memory of this process in GiB, None where /proc does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / _GIB
