"""The streams and the memory of a device that computes late; `late_kernels` makes torch train on it.

A kernel waits in the queue of its stream until the host waits for the stream: by a blocking read, an event or a
synchronisation. Then the stream's thread computes it. So lateness doesn't depend on time, and a missing wait shows in
every run.

An address of the device can't be read by the host: a read ends in SIGSEGV. The memory behind it is the host's, where
torch's kernels for the CPU compute. Freed memory is used again at once, in the order of its stream, as by CUDA's
caching allocator.
"""

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

SIZE_BYTES = 2**30
ALIGNED = 512  # an allocation's address and size are multiples of it, as CUDA's
NO_ACCESS = 0

Kernel = Callable[[], object]


class Stream:
    """A queue of kernels, and the thread that computes them once the host waits."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.queued = self.done = 0
        self._kernels: deque[Kernel] = deque()
        self._thread = ThreadPoolExecutor(1, "stream")
        backend.add(self)

    def put(self, kernel: Kernel) -> None:
        """Queue a kernel."""
        self._kernels.append(kernel)
        self.queued += 1

    def synchronize(self, until: int | None = None) -> None:
        """Wait until the first ``until`` kernels are computed; by default, all."""
        last = self.queued if until is None else until
        if self.done < last:
            self._thread.submit(self._compute, last).result()

    def _compute(self, last: int) -> None:
        with torch.no_grad():
            while self.done < last:
                kernel = self._kernels.popleft()
                self.done += 1
                kernel()

    def query(self) -> bool:
        """Return whether all kernels are computed."""
        return self.done == self.queued

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event behind the kernels that are queued now, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Let the kernels that are queued from now on wait for an event."""
        stream, last = event.stream, event.last
        if stream is not None:
            self.put(lambda: stream.synchronize(last))

    def wait_stream(self, stream: "Stream") -> None:
        """Let the kernels that are queued from now on wait for those of another stream."""
        self.wait_event(stream.record_event())


class Event:
    """A place in a stream's queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream: Stream | None = None
        self.last = 0

    def record(self, stream: Stream | None = None) -> None:
        """Move to the end of a stream's queue; by default, of the current stream's."""
        self.stream = stream or backend.current_stream()
        self.last = self.stream.queued

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream's next kernels wait for this event."""
        (stream or backend.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Wait for the event."""
        if self.stream is not None:
            self.stream.synchronize(self.last)

    def query(self) -> bool:
        """Return whether the kernels before the event are computed."""
        return self.stream is None or self.stream.done >= self.last


class Backend:
    """The module ``torch.late``: the part of ``torch.cuda`` that programs and torch itself call."""

    Stream, Event = Stream, Event
    default: Stream

    def __init__(self) -> None:
        self._streams: list[weakref.ref[Stream]] = []
        self._local = threading.local()

    def current_stream(self, device: Any = None) -> Stream:
        """Return the stream to which this thread's operations are queued."""
        found: Stream = getattr(self._local, "stream", self.default)
        return found

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Queue the block's operations to a stream."""
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def synchronize(self, device: Any = None) -> None:
        """Wait for all streams. The newest computes first, so that it overtakes a stream for which it doesn't wait."""
        for each in reversed(self._streams):
            if (stream := each()) is not None:
                stream.synchronize()

    def add(self, stream: Stream) -> None:
        """Add a new stream."""
        self._streams.append(weakref.ref(stream))

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def manual_seed_all(self, seed: int) -> None:
        pass  # its random numbers are the CPU's

    def _is_in_bad_fork(self) -> bool:
        return False


backend = Backend()
backend.default = Stream()


class Memory:
    """The device's addresses, which the host can't read, and the host's memory behind them."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._first: int = libc.mmap(None, SIZE_BYTES, NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._host = torch.empty(SIZE_BYTES, dtype=torch.uint8).untyped_storage()
        self._fresh = 0
        self._free: dict[tuple[Stream, int], list[int]] = defaultdict(list)
        self._users: dict[int, set[Stream]] = defaultdict(set)
        self._waiting: list[tuple[list[tuple[Stream, int]], tuple[Stream, int], int]] = []

    def allocate(self, size_bytes: int, device: torch.device) -> Any:
        """Return a storage in the order of the current stream. Each float of new memory is NaN."""
        owner = backend.current_stream(), -(-size_bytes // ALIGNED) * ALIGNED
        self._take_back()
        if found := self._free[owner]:
            place = found.pop()
        else:
            place, self._fresh = self._fresh, self._fresh + owner[1]
            if self._fresh > SIZE_BYTES:
                raise torch.OutOfMemoryError(f"the late device has {SIZE_BYTES:,} bytes")
            self._view(torch.uint8, place, (owner[1],), (1,)).fill_(0xFF)
        storage = torch._C._construct_storage_from_data_pointer(self._first + place, device, size_bytes)
        weakref.finalize(storage, self._release, owner, place).atexit = False
        return storage

    def use(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor's memory, after it is freed, until a stream has computed the kernels that it has then."""
        self._users[self._place_of(tensor)].add(stream)

    def see(self, tensor: Tensor) -> Tensor:
        """Return the host's view of a tensor of the device."""
        offset = self._place_of(tensor) // tensor.itemsize + tensor.storage_offset()
        found = self._view(tensor.dtype, offset, tensor.size(), tensor.stride())
        found = found.conj() if tensor.is_conj() else found
        return torch._neg_view(found) if tensor.is_neg() else found

    def _view(self, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> Tensor:
        return torch.empty(0, dtype=dtype).set_(self._host, offset, size, stride)

    def _place_of(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr() - self._first

    def _release(self, owner: tuple[Stream, int], place: int) -> None:
        users = [(stream, stream.queued) for stream in self._users.pop(place, ())]
        if users:
            self._waiting.append((users, owner, place))
        else:
            self._free[owner].append(place)

    def _take_back(self) -> None:
        for each in [*self._waiting]:
            users, owner, place = each
            if all(stream.done >= last for stream, last in users):
                self._waiting.remove(each)
                self._free[owner].append(place)
