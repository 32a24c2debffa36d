"""The loader processes of a rank: their start, their data, and their end."""

import atexit
import functools
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from holdfast.data.content import digest_content
from holdfast.data.stateful import StatefulDataLoader
from holdfast.errors import RecipeError
from holdfast.terminal.interrupt import LIKE_SIGTERM

# The longest folder for the sockets of workers: a socket's path has at most 107 bytes, and multiprocessing adds
# /pymp-12345678/listener-12345678 to the folder. Source: unix(7).
SOCKET_FOLDER_BYTES = 107 - 32
SHORT_FOLDER = "/tmp"


def make_loader(data: Any, requests: Any, workers: int, seed: int, *, like: "DataLoader[Any] | None" = None) -> Any:
    """Return a loader whose iterator yields the data's items unchanged, and draws no global random numbers.

    Args:
        data: a map-style dataset whose ``__getitems__`` takes a request, or a stream.
        requests: an iterable of requests; None for a stream.
        workers: the number of loader processes.
        like: the loader from which to take ``worker_init_fn``, ``persistent_workers`` and ``prefetch_factor``.
    """
    from holdfast.state import includes_gpus  # imported late, because loader processes import this module, too

    if workers:
        shorten_socket_paths()
    begin = getattr(like, "worker_init_fn", None)
    return StatefulDataLoader(
        data,
        batch_size=None if requests is None else 1,
        batch_sampler=requests,
        collate_fn=_return_unchanged,
        num_workers=workers,
        worker_init_fn=functools.partial(_begin_worker, begin),
        persistent_workers=bool(workers and like is not None and like.persistent_workers),
        prefetch_factor=getattr(like, "prefetch_factor", None) if workers else None,
        # Without a generator, the loader's iterator would draw its base seed from the global generator.
        generator=torch.Generator().manual_seed(seed),
        multiprocessing_context="spawn" if workers else None,
        # Pinned memory would be useless on a CPU, and pinning starts a context on a GPU that other processes use.
        pin_memory=includes_gpus(),
    )


class StayingWorkers:
    """The workers of a user's own loader. With ``persistent_workers`` they stay alive for the next pass.

    If the dataset has changed since the workers were started, for example by a curriculum, new workers are started
    with the changed dataset. The workers of a resumed run would get the changed dataset, too.
    """

    def __init__(self, like: "DataLoader[Any]", workers: int) -> None:
        self._like, self._stays = like, bool(workers and like.persistent_workers)
        self._loader: Any = None
        self._data = ""  # a digest of the dataset as the workers got it

    def find(self, make: Callable[[], Any]) -> Any:
        """Return the loader of the last pass if its workers may stay; otherwise return a new loader from ``make``."""
        if not self._stays:
            return make()
        data = digest_content(self._like.dataset)
        if self._loader is None or data != self._data:
            self._loader, self._data = make(), data
        return self._loader


def start_loading(loader: Any) -> Iterator[Any]:
    """Return the iterator of a loader from `make_loader`.

    Raises:
        RecipeError: the data, or a function that the workers call, can't be sent to them.
    """
    others = {*multiprocessing.active_children()}
    try:
        found: Iterator[Any] = iter(loader)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        if "pickle" not in str(error):
            raise
        raise RecipeError(
            f"the dataset and its functions can't be sent to loader workers: {error}",
            hint="define the named function or class at the top of a module, or set compute.loader_workers = 0",
        ) from error
    started = {*multiprocessing.active_children()} - others
    _workers.intersection_update(others)  # drop the workers that have ended
    _workers.update(started)
    return found


# The workers of all loaders of this process.
_workers: set[Any] = set()


@atexit.register  # this exit function is registered after multiprocessing's own, and therefore runs before it
def _kill_workers() -> None:
    """Kill the workers, because they ignore the SIGTERM that multiprocessing would send before it waits for them."""
    if _workers:
        # Reset the handler of SIGCHLD, because torch's handler would raise an error for a killed worker.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in _workers:
        each.kill()


def shorten_socket_paths() -> None:
    """Put the sockets of loader workers into a short folder if TMPDIR is too long for their paths.

    If a path is too long, a worker can't send its first batch, and the rank waits for ever. multiprocessing uses the
    short folder in this process and its children, and removes it at the end. Other temporary files stay in TMPDIR.
    """
    usual = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > SOCKET_FOLDER_BYTES:
        tempfile.tempdir = SHORT_FOLDER
        try:
            multiprocessing.util.get_temp_dir()
        finally:
            tempfile.tempdir = usual


def _return_unchanged(batch: Any) -> Any:
    return batch


def _begin_worker(begin: Callable[[int], object] | None, worker: int) -> None:
    # A signal to the process group is meant for the rank, which still needs its workers to finish the current step.
    for each in (signal.SIGTERM, signal.SIGINT, *LIKE_SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    if begin is not None:
        info: Any = get_worker_info()
        # The user's function expects the user's dataset in `info`, whose attributes can't be assigned directly.
        object.__setattr__(info, "dataset", info.dataset.data)
        begin(worker)
