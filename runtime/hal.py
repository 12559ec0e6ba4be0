"""Devices and buffers: IREE's HAL with the copies that work on every driver."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from runtime.errors import UserError

rt: Any = importlib.import_module("iree.runtime")  # its type stubs lag behind the binding

# The binding's leak report at exit is noise about objects that die with the process.
rt._binding.disable_leak_checker()

Buffer = Any  # a HalBufferView; opaque to callers

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
    "i8": np.dtype(np.int8),
}
_ELEMENTS = {
    DTYPES["f32"]: rt.HalElementType.FLOAT_32,
    DTYPES["bf16"]: rt.HalElementType.BFLOAT_16,
    DTYPES["f16"]: rt.HalElementType.FLOAT_16,
    DTYPES["i32"]: rt.HalElementType.SINT_32,
    DTYPES["i8"]: rt.HalElementType.SINT_8,
}
_DTYPE_OF = {int(element): dtype for dtype, element in _ELEMENTS.items()}
# Signless integers are what compiled functions return.
_DTYPE_OF |= {int(rt.HalElementType.INT_32): DTYPES["i32"]}
_DTYPE_OF |= {int(rt.HalElementType.INT_8): DTYPES["i8"]}

_DEVICE_LOCAL = int(rt.MemoryType.DEVICE_LOCAL)
# Cached, or some drivers give write-combined memory, which the host reads very slowly.
_STAGING_MEMORY = int(rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE)
_STAGING_MEMORY |= int(rt.MemoryType.HOST_CACHED)
_STAGING_USAGE = int(rt.BufferUsage.TRANSFER_TARGET | rt.BufferUsage.MAPPING_SCOPED)
_DEFAULT_USAGE = int(rt.BufferUsage.DEFAULT)
_MAPPED_USAGE = _DEFAULT_USAGE | int(rt.BufferUsage.MAPPING_SCOPED)
_KEPT_STAGING_BYTES = 4 << 20


def _immortal(value: Any) -> Any:
    """Keep `value` until the process ends.

    The binding lets a device be destroyed before its buffers when the interpreter shuts down,
    which crashes; a device that is never destroyed cannot be.
    """
    increase = ctypes.pythonapi.Py_IncRef
    increase.argtypes = [ctypes.py_object]
    increase(value)
    return value


@functools.cache
def instance() -> Any:
    """The process's VM instance."""
    return _immortal(rt.VmInstance())


def driver_of(uri: str) -> str:
    """The driver word of a device URI: `cuda://0` -> `cuda`."""
    return uri.partition("://")[0]


def device_class(uri: str) -> str:
    """The manifest's device word for a URI: `local-task` -> `local`."""
    driver = driver_of(uri)
    return "local" if driver.startswith("local") else driver


def available() -> list[str]:
    """URI and name of every device that opens here: `vulkan://GPU-1 (llvmpipe)`."""
    found = []
    for driver in rt.query_available_drivers():
        try:
            devices = rt.get_driver(driver).query_available_devices()
        except (RuntimeError, ValueError):
            continue
        for device in devices:
            path, name = device.get("path", ""), device.get("name", "")
            uri = f"{driver}://{path}" if path else driver
            found.append(uri if name in ("", "default") else f"{uri} ({name})")
    return found


@functools.cache
def open_device(uri: str) -> Hal:
    """Open a device once a process. Raises UserError listing the devices that are here."""
    try:
        driver = _immortal(rt.get_driver(driver_of(uri)))
        device = _immortal(driver.create_device_by_uri(uri))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"device {uri!r} is not here ({reason(error)}); available:"
            f" {', '.join(available()) or 'none'}; choose one of these with --device, with a"
            " bundle built for it (doit build model=… target=…)"
        ) from error
    return Hal(uri, device)


def reason(error: BaseException) -> str:
    """The first line of an IREE error without its source location and status word."""
    line = (str(error).strip().splitlines() or ["no message"])[0]
    head, found, tail = line.partition("; ")
    text = tail if found and ".c:" in head else line
    return text.split("; stack")[0].rstrip("; ")[:300]


class Hal:
    """One open device and how its memory is read and written.

    Local devices share the host's memory: buffers are mapped. Others are read through a host
    staging buffer, because the binding's own read imports unaligned host memory and fails.
    """

    def __init__(self, uri: str, device: Any) -> None:
        self.uri = uri
        self.device = device
        self.local = device_class(uri) == "local"
        self._usage = _MAPPED_USAGE if self.local else _DEFAULT_USAGE
        self._allocator = _immortal(device.allocator)
        self._semaphore: Any = None
        self._time = 0
        self._staging: dict[int, Any] = {}

    def to_device(self, array: np.ndarray[Any, Any]) -> Buffer:
        """Copy an array to the device; dtypes are those of the manifest. Shape is kept."""
        element = _ELEMENTS[array.dtype]
        if array.dtype.kind == "V":  # bfloat16 has no buffer protocol of its own
            raw = np.ascontiguousarray(array).view(np.uint16)
            view = self._copy(raw, rt.HalElementType.UINT_16)
            return rt.HalBufferView(view.get_buffer(), array.shape, element)
        return self._copy(np.asarray(array, order="C"), element)

    def _copy(self, array: np.ndarray[Any, Any], element: Any) -> Buffer:
        return self._allocator.allocate_buffer_copy(
            memory_type=_DEVICE_LOCAL,
            allowed_usage=self._usage,
            device=self.device,
            buffer=array,
            element_type=element,
        )

    def to_host(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        """A host copy of a buffer, in its own shape and dtype."""
        dtype = _DTYPE_OF[int(buffer.element_type)]
        raw = np.dtype(np.uint16) if dtype.kind == "V" else dtype
        mapped = buffer.map() if self.local else self._staged(buffer)
        return np.array(mapped.asarray(buffer.shape, raw)).view(dtype)

    def rows(self, buffer: Buffer, indices: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """Some rows (along the first axis) of a buffer, to be read while `buffer` is kept: where
        its memory is the host's they are no copies."""
        if not self.local:
            whole = self.to_host(buffer)
            return [whole[i] for i in indices]
        mapped = buffer.map().asarray(buffer.shape, _DTYPE_OF[int(buffer.element_type)])
        return [mapped[i] for i in indices]

    def _staged(self, buffer: Buffer) -> Any:
        """Copy the device buffer into host-visible memory and map that."""
        source = buffer.get_buffer()
        size = source.byte_length()
        staging = self._staging.get(size)
        if staging is None:
            staging = self._allocator.allocate_buffer(
                memory_type=_STAGING_MEMORY, allowed_usage=_STAGING_USAGE, allocation_size=size
            )
            if size <= _KEPT_STAGING_BYTES:
                self._staging[size] = staging
        wait, signal = self._timeline()
        self.device.queue_copy(source, staging, wait_semaphores=wait, signal_semaphores=signal)
        signal.wait()
        return staging.map()

    def _timeline(self) -> tuple[Any, Any]:
        """(wait, signal) fences of the next piece of work on this device's own timeline."""
        if self._semaphore is None:
            self._semaphore = _immortal(self.device.create_semaphore(0))
        self._time += 1
        at = rt.HalFence.create_at
        return at(self._semaphore, self._time - 1), at(self._semaphore, self._time)

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """See Device.empty."""
        kind = DTYPES[dtype]
        buffer = self._allocator.allocate_buffer(
            memory_type=_DEVICE_LOCAL,
            allowed_usage=self._usage,
            allocation_size=int(np.prod(shape, dtype=np.int64)) * kind.itemsize,
        )
        return rt.HalBufferView(buffer, shape, _ELEMENTS[kind])

    def zeros(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """A zero-filled buffer, filled on the device where that is not the host."""
        view = self.empty(dtype, shape)
        buffer = view.get_buffer()
        size = buffer.byte_length()
        if self.local:
            buffer.fill_zero(0, size)
        else:
            commands = rt.HalCommandBuffer(self.device)
            commands.fill(buffer, np.zeros(1, np.uint8), 0, size, end=True)
            wait, signal = self._timeline()
            self.device.queue_execute(commands, wait_semaphores=wait, signal_semaphores=signal)
            signal.wait()
        return view
