"""Readings of every NVIDIA GPU of this host, by a thread of its own; without a driver, one line that says so."""

import threading
from pathlib import Path
from types import ModuleType

from dflash_train.monitor.state import RunState

_DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


class GpuSampler:
    """Reads utilisation, memory, power and temperature into `state` every `every_s` seconds, from `with` to its end.

    nvml: the NVML binding; None looks for it. Whatever NVML says, the run goes on: an error ends up as the note.
    """

    def __init__(self, state: RunState, every_s: float = 2.0, nvml: ModuleType | None = None):
        self.state, self.every_s, self._nvml = state, every_s, nvml
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "GpuSampler":
        if self._nvml is None:
            if not driver_present():
                self.state.gpus([], "no NVIDIA driver on this host")
                return self
            try:
                import pynvml
            except ImportError:
                self.state.gpus([], "not read: nvidia-ml-py is not installed")
                return self
            self._nvml = pynvml
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpu-sampler")
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)  # a hung driver call is left behind: the thread is a daemon

    def _run(self) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self.state.gpus([], f"NVML: {error}")
            return
        try:
            while not self._stop.is_set():
                self._sample()
                self._stop.wait(self.every_s)
        finally:
            self._nvml.nvmlShutdown()

    def _sample(self) -> None:
        try:
            self.state.gpus([read_gpu(self._nvml, i) for i in range(self._nvml.nvmlDeviceGetCount())])
        except self._nvml.NVMLError as error:  # a GPU that fell off the bus
            self.state.gpus([], f"NVML: {error}")


def driver_present() -> bool:
    """Whether the kernel side of an NVIDIA driver is visible here (a container without it has none of these)."""
    return any(Path(path).exists() for path in _DRIVER)


def read_gpu(nvml: ModuleType, index: int) -> dict:
    """One GPU's figures; null for each that it does not report (power on some cards, utilisation under MIG)."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments, scale: float | None = None):
        try:
            value = getattr(nvml, function)(handle, *arguments)
        except nvml.NVMLError:
            return None
        return value if scale is None else value * scale

    name, rates, memory = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
    return {
        "index": index,
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "utilisation": rates and rates.gpu / 100,
        "memory_used_bytes": memory and memory.used,
        "memory_total_bytes": memory and memory.total,
        "power_w": ask("nvmlDeviceGetPowerUsage", scale=1e-3),
        "power_limit_w": ask("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
        "temperature_c": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
    }
