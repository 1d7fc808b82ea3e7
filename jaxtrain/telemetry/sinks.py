"""The sinks of a run directory."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.telemetry.events import Sink
from jaxtrain.telemetry.history import History
from jaxtrain.telemetry.line_files import LogFile, list_files, metrics_file
from jaxtrain.telemetry.samples import SampleFiles
from jaxtrain.telemetry.tracker import Tracker


def file_sinks(
    directory: Path,
    process: int,
    process_count: int,
    track: Sequence[str] = (),
    say: Callable[[str], None] = terminal.warn,
) -> list[Sink]:
    """Opens the sinks of a run directory, in the order in which they receive each event.

    Args:
        process: number of this process. Every process has a log and lists; only process 0 has the
            other sinks.
        process_count: of the run.
    """
    of_process: list[Sink] = [
        LogFile(directory, process),
        *list_files(directory, process, process_count),
    ]
    if process:
        return of_process
    from jaxtrain.telemetry.tensorboard import TensorBoard  # importing it takes 0.1 s

    return [
        *of_process,
        metrics_file(directory),
        SampleFiles(directory),
        TensorBoard(directory),
        History(directory),
        *(Tracker(name, directory, say) for name in track),  # after the files that they read
    ]
