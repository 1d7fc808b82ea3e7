"""Runs command lines, one per line of the input, as JSON; prints exit code, output, and errors."""

import contextlib
import io
import json
import sys

from jaxtrain import main

for line in sys.stdin:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main.main(json.loads(line))
    print(json.dumps([code, out.getvalue(), errors.getvalue()]), flush=True)
