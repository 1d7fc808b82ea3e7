# shellcheck shell=bash
# Sourced by the launchers: runs jaxtrain/supervisor.py, which describes the settings.

find_python() { # sets PYTHON, the interpreter, to .venv/bin/python if it exists and else to python
    if [[ -z ${PYTHON:-} ]]; then
        PYTHON=python
        [[ ! -x .venv/bin/python ]] || PYTHON=.venv/bin/python
    fi
    export PYTHON
}

supervise() { # supervise KIND ARGUMENT...
    local fix="activate the environment of jaxtrain, or set PYTHON to its interpreter"
    find_python
    if ! command -v "$PYTHON" >/dev/null; then
        echo "error: '$PYTHON' was not found: $fix" >&2
        exit 2
    fi
    if ! "$PYTHON" -c 'import jaxtrain.supervisor' 2>/dev/null; then
        echo "error: '$PYTHON' cannot import jaxtrain: $fix" >&2
        exit 2
    fi
    exec "$PYTHON" -m jaxtrain.supervisor "$@"
}
