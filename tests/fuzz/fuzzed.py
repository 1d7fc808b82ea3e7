"""The fuzzed process: jaxtrain, with a hook that records forbidden acts.

    python tests/fuzz/fuzzed.py REQUEST.json      one case in a fresh process
    python tests/fuzz/fuzzed.py --server          imports everything once, then forks for each case

A request is a JSON object: ``entry`` (module:function), ``arguments``, ``folder`` (the case's
folder and working directory), and ``writable`` (folders that may be written to). The server reads
requests from standard input, one per line, and answers with the child's PID and then with its exit
status.

The hook (``sys.addaudithook``) writes one line of JSON to ``events.jsonl`` for each forbidden act:
opening for writing, creating, renaming or deleting a file outside the writable folders; starting a
program; connecting or looking up a name; running code from the case's folder; and unpickling a
function such as ``os.system``. A hook cannot be removed, and forks inherit it. Processes spawned by
multiprocessing import this file again, and so have the hook too.
"""

import atexit
import gc
import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

_REQUEST = "JAXTRAIN_FUZZ_REQUEST"  # for spawned processes
EVENTS = "events.jsonl"
# Imported by most commands. pyarrow is excluded, as it starts a thread.
PRELOADED = (
    *("jax", "jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "grain", "av", "tokenizers"),
    *("safetensors.numpy", "tensorboardX", "torch", "PIL.Image", "rich.console"),
    *("jaxtrain.training.loop", "jaxtrain.data.text", "jaxtrain.data.video.prepare_clips"),
    *("jaxtrain.models.gpt", "jaxtrain.models.llama", "jaxtrain.models.mlm"),
    *("jaxtrain.models.modern_bert", "jaxtrain.models.video_ae"),
)
_COMMANDS = ("decode", "encode", "evaluate", "export", "fill", "generate", "import")
_COMMANDS += ("prepare.clips", "prepare.tokens", "reconstruct")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_DEVICES = ("/dev/null/", "/dev/tty/", "/dev/shm/")
# Event -> the positions of its paths and of its dir_fd.
_CHANGES = {
    "os.mkdir": ((0,), 2),
    "os.remove": ((0,), 1),
    "os.rmdir": ((0,), 1),
    "os.rename": ((0, 1), None),
    "os.link": ((1,), None),
    "os.symlink": ((1,), 2),
    **{f"os.{name}": ((0,), None) for name in ("truncate", "chmod", "chown", "utime", "setxattr")},
}
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
_PROGRAMS += ("os.spawn", "os.startfile", "pty.spawn", "webbrowser.open")
_LOOK_UPS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
_UNFIT = ("os", "posix", "nt", "pty", "subprocess", "runpy", "importlib", "shutil", "socket", "sys")
_UNFIT_BUILTINS = ("eval", "exec", "compile", "getattr", "__import__", "open", "globals")


class _Recorder:
    """Records forbidden acts."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._folder = os.path.realpath(request["folder"])
        self._writable = tuple(os.path.realpath(path) + "/" for path in request["writable"])
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(os.path.join(self._folder, EVENTS), flags, 0o600)
        self._busy = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            self._judge(event, arguments)
        except Exception as error:  # such as a surrogate in a path; must not stop jaxtrain
            self._write("hook", f"{event}: {error!r}")
        finally:
            self._busy = False

    def _judge(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = (flags or 0) & _WRITING or (isinstance(mode, str) and set(mode) & set("wax+"))
            if writes and isinstance(path, str | bytes | os.PathLike):
                self._check(event, path, -1)
        elif event in _CHANGES:
            places, directory = _CHANGES[event]
            beneath = arguments[directory] if directory is not None else -1
            for place in places:
                if isinstance(arguments[place], str | bytes | os.PathLike):
                    self._check(event, arguments[place], beneath)
        elif event in _PROGRAMS:
            self._write("starts", _program(event, arguments))
        elif event in _LOOK_UPS:
            self._write("connects", f"{event} {arguments[0]!r}")
        elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            if arguments[1] is not None:
                self._write("connects", f"{event} {arguments[1]!r}")
        elif event == "exec":
            path = getattr(arguments[0], "co_filename", "")
            if path[:1] != "<" and os.path.realpath(path).startswith(self._folder):
                self._write("runs", path)
        elif event == "pickle.find_class":
            module, name = arguments
            if module.partition(".")[0] in _UNFIT or (
                module in ("builtins", "__builtin__") and name in _UNFIT_BUILTINS
            ):
                self._write("unpickles", f"{module}.{name}")

    def _check(self, event: str, path: Any, directory: int) -> None:
        text = os.fsdecode(path)
        if not os.path.isabs(text) and isinstance(directory, int) and directory >= 0:
            text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
        # Opening follows a link; renaming and removing affect the link itself.
        full = os.path.realpath(text)
        if event != "open":
            full = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
        if not f"{full}/".startswith((*self._writable, *_DEVICES)):
            self._write("writes", f"{event} {full}")

    def _write(self, what: str, detail: str) -> None:
        os.write(self._file, json.dumps({"what": what, "detail": detail[:500]}).encode() + b"\n")


def _program(event: str, arguments: tuple[Any, ...]) -> str:
    """Returns the name of the started program, without parts that differ between runs."""
    if event == "os.fork":
        return event
    words = arguments[1] if event == "subprocess.Popen" else arguments[0]
    if isinstance(words, str | bytes | os.PathLike):
        return f"{event} {os.path.basename(os.fsdecode(words))}"
    return f"{event} {' '.join(os.path.basename(os.fsdecode(word)) for word in list(words)[:2])}"


def _run_forked(request: dict[str, Any]) -> None:
    """Runs a case like :func:`_run`, and ends without the teardown of all modules.

    The teardown takes longer than most cases; cases in fresh processes include it.
    """
    code: object = 0
    try:
        _run(request)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _redirect(folder: Path) -> None:
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)


def _import_everything() -> None:
    import contextlib

    for name in (*PRELOADED, *(f"jaxtrain.cli.{name}" for name in _COMMANDS)):
        with contextlib.suppress(ImportError):  # torch is optional, and modules may be renamed
            importlib.import_module(name)


def _serve() -> dict[str, Any]:
    """Forks for each request and returns it in the child; the parent exits at the end of input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _import_everything()
    # Otherwise a child's first garbage collection writes to all of the parent's objects, and so
    # copies most of the shared memory: a second per case.
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    answers.write(json.dumps({"threads": threads}) + "\n")
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(answers.fileno())
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return request
        answers.write(json.dumps({"pid": pid}) + "\n")
        _, status, usage = os.wait4(pid, 0)
        answers.write(json.dumps({"status": status, "peak": usage.ru_maxrss * 1024}) + "\n")
    os._exit(0)


def _run(request: dict[str, Any]) -> None:
    """Calls the entry point as the console script does."""
    folder = Path(request["folder"])
    os.chdir(folder)
    _redirect(folder)
    module, _, function = request["entry"].partition(":")
    entry = getattr(importlib.import_module(module), function)
    sys.argv = ["jaxtrain", *request["arguments"]]
    os.environ[_REQUEST] = json.dumps(request)
    sys.addaudithook(_Recorder(request))
    sys.exit(entry())


# jaxtrain.main is imported first, as the console script does: in a worker, it blocks jax.
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import jaxtrain.main  # noqa: E402, F401

if __name__ == "__main__":
    if sys.argv[1:] == ["--server"]:
        _run_forked(_serve())
    else:
        _run(json.loads(Path(sys.argv[1]).read_text()))
elif os.environ.get(_REQUEST):
    sys.addaudithook(_Recorder(json.loads(os.environ[_REQUEST])))
