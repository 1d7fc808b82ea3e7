# shellcheck shell=bash
# Sourced by the launchers: runs jaxtrain/supervisor.py, which describes the settings.

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python
    [[ ! -x .venv/bin/python ]] || PYTHON=.venv/bin/python
fi
export PYTHON

supervise() { # supervise KIND ARGUMENT...
    start "$PYTHON" "activate the environment of jaxtrain, or set PYTHON to its interpreter" "$@"
}

start() { # start INTERPRETER FIX KIND ARGUMENT...
    local python=$1 fix=$2 wrong=''
    shift 2
    command -v "$python" >/dev/null || wrong="was not found"
    [[ -n $wrong ]] || "$python" -c "import jaxtrain.supervisor" 2>/dev/null ||
        wrong="cannot import jaxtrain"
    if [[ -n $wrong ]]; then
        echo "error: '$python' $wrong: $fix" >&2
        exit 2
    fi
    exec "$python" -m jaxtrain.supervisor "$@"
}
