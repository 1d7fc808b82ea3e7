"""What Orbax leaves behind after a failed read is not printed."""

import subprocess
import sys
import textwrap

import pytest

# What Orbax does when one of several reads fails: it closes the loop in which the others wait.
ABANDONED = {
    "a task that waits": """
        async def read():
            tasks.append(asyncio.get_running_loop().create_task(asyncio.sleep(60)))
            await asyncio.sleep(0)
            raise OSError
    """,
    "a read that has not begun": """
        async def read():
            asyncio.sleep(60)
            raise OSError
    """,
    "a generator that cleans up": """
        async def held():
            try:
                yield
            finally:
                await asyncio.sleep(60)

        async def hold():
            async for _ in held():
                await asyncio.sleep(60)

        async def read():
            tasks.append(asyncio.get_running_loop().create_task(hold()))
            await asyncio.sleep(0)
            raise OSError
    """,
}
PROGRAM = """
import asyncio, gc, sys
if {quiet}:
    from jaxtrain.checkpoint import orbax_compat
    orbax_compat.quiet_orbax()
tasks = []
exec(compile({code!r}, "/x/orbax/checkpoint/reading.py", "exec"), globals())
loop = asyncio.new_event_loop()
try:
    loop.run_until_complete(read())
except OSError:
    pass
loop.close()
tasks.clear()
del loop
gc.collect()
print("failed", file=sys.stderr)
"""


@pytest.mark.long
@pytest.mark.parametrize("code", ABANDONED.values(), ids=ABANDONED)
def test_abandoned_reads_are_silent(code: str) -> None:
    def printed(quiet: bool) -> str:
        program = PROGRAM.format(quiet=quiet, code=textwrap.dedent(code))
        command = [sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    assert len(printed(quiet=False).splitlines()) > 1
    assert printed(quiet=True) == "failed\n"
