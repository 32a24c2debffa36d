"""The life of a rank's process: build the recipe, execute orders, and end with an exit code."""

import contextlib
import faulthandler
import gc
import sys
import traceback
from collections.abc import Generator
from typing import TYPE_CHECKING

from holdfast.config import Compute
from holdfast.errors import HoldfastError, RankDied
from holdfast.machine import heartbeats
from holdfast.memory.late_compiler import load_compiler_late
from holdfast.provenance import opened_files as opened
from holdfast.rank.events import Events
from holdfast.rank.failure import describe_failure
from holdfast.rank.first_order import wait_to_proceed
from holdfast.rank.messages import Finished
from holdfast.rank.process import read_environment
from holdfast.rank.record import CodeRecord, read_recorded
from holdfast.rank.service import RankService
from holdfast.rank.survivor import Survivor
from holdfast.training import Training, run_program

if TYPE_CHECKING:
    from holdfast.rank.nodes import Nodes


def main() -> int:
    """Run one rank to its end. Return its exit code, which is 0 if an order ended the rank."""
    events = Events()
    wait_to_proceed()
    load_compiler_late()
    faulthandler.enable(file=2)  # so that a crash in native code writes its stack into the log
    config, commit = read_environment()
    built: list[Training] = []
    nodes = None
    survivor = Survivor()
    before, watching = {*sys.modules}, contextlib.ExitStack()
    files = watching.enter_context(opened.record_opened_files())

    def begin(training: Training) -> Generator[None, None, None]:
        watching.close()
        built.append(training)
        heartbeats.note_device(str(training.accelerator.device))
        is_first = training.accelerator.is_local_main_process
        record = CodeRecord(training, before, files, read_recorded(config, commit)) if is_first else None
        training.record.note_lines = survivor.lived.add
        gc.freeze()  # a garbage collection that includes all existing objects would stall a step by 0.2 s
        gc.enable()
        return RankService(training, events, record, survivor).serve()

    def fail(error: HoldfastError) -> int:
        events.send_error(nodes.share(error) if nodes else error)
        return error.exit_code

    try:
        if config.compute.has_rendezvous:
            nodes = _join_nodes(config.compute, events)
        heartbeats.join()
        run_program(config, begin)
        if built and built[0].progress.step >= built[0].total_steps:
            events.send(Finished())
        heartbeats.stand(heartbeats.RankStanding.LEAVING)
    except Exception as error:
        if survivor.is_shadow:  # the save is durable, and no step of this process will be saved any more
            traceback.print_exc()
            return 0
        failed = describe_failure(built[0] if built else None, error)
        if failed is error:
            heartbeats.stand(heartbeats.RankStanding.REFUSED)
            traceback.print_exc()
        elif isinstance(failed, RankDied):
            # print no traceback, because it would hide the traceback of the rank that died
            print(failed, file=sys.stderr)
            survivor.save()
        else:
            traceback.print_exc()
        return fail(failed)
    finally:
        if nodes is not None:
            nodes.leave()
        events.close()
    return 0


def _join_nodes(compute: Compute, events: Events) -> "Nodes":
    """Set the rank's number, which later calls read. Return the nodes' shared errors."""
    from holdfast.rank.nodes import Nodes  # few runs have several nodes

    return Nodes(compute, events)
