# shellcheck shell=bash
# Sourced by the launchers: starts the processes of a run, watches them, and restarts them.
#
# Exit codes of a run (jaxtrain/errors.py): 0 done, 2 wrong use or input, and 130 Ctrl-C or
# loop.max_hours end the launcher. After 75 (temporary failure) and all others (a crash, a SIGKILL)
# the launcher ends all processes and runs the same command again with `--resume latest`.
#
# Settings, from the environment:
#   PYTHON            the interpreter (default: .venv/bin/python if it exists, else python)
#   MAX_RESTARTS      restarts in a row without a new checkpoint before giving up (default: 5)
#   RESTART_DELAY_S   seconds before a restart (default: 2); four times as long before each next
#                     one in a row, up to five minutes: a full disk or a lost mount may take a while
#   SAVE_S            seconds that the other processes may take after one has ended with 0, 75 or
#                     130, because they may still be saving (default: 300)
#   GRACE_S           the same after one has crashed (default: 10)
#   KILL_S            seconds between SIGTERM and SIGKILL after that (default: 20)
#
# With `--doctor` among its arguments, a launcher does not train. It runs `doctor` once on every host
# and ends with the highest exit code: 0 if a run can start, 1 if there are problems.
#
# A launcher defines `start_process INDEX ARGUMENT...`, which starts one process in the background
# and sets `started_pid`; it may redefine signal_process, sweep_process and newest_checkpoint.

python_is_given=${PYTHON:-}
if [[ -z $python_is_given ]]; then
    PYTHON=python
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
MAX_RESTARTS=${MAX_RESTARTS:-5}
RESTART_DELAY_S=${RESTART_DELAY_S:-2}
SAVE_S=${SAVE_S:-300}
GRACE_S=${GRACE_S:-10}
KILL_S=${KILL_S:-20}

launcher=$(basename "$0")
pids=()           # of running processes, by index; empty after a process has been waited for
codes=()          # exit codes of ended processes, by index
wanted_signal=''  # received but not yet forwarded
stopped_by=''     # the first signal that the launcher received
doctor=''         # set by --doctor
in_bucket=''      # whether --output-dir is a bucket, so that hosts share no disk
arguments=()      # for jaxtrain
made=()           # folders that make_directory has created, the deepest first
checks=0          # how often await_disk has checked again

say() { # say MESSAGE: in one line, without control characters, which names of files may contain
    local message=$*
    printf '%s: %s\n' "$launcher" "${message//[[:cntrl:]]/?}" >&2
}

refuse() { # refuse MESSAGE: wrong use
    local launcher=error
    say "$@"
    exit 2
}

is_count() { [[ $1 =~ ^[1-9][0-9]*$ ]]; }

check_settings() {
    check_numbers
    command -v "$PYTHON" >/dev/null ||
        refuse "'$PYTHON' was not found: activate the environment of jaxtrain, or set PYTHON"
    [[ -n $python_is_given ]] || check_default_python
}

check_default_python() { # otherwise a crash at each start would look like a bad host
    local lacking
    # Finds the packages without importing them, which takes seconds.
    lacking=$("$PYTHON" -c 'import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' \
        jax flax optax orbax grain tokenizers) || refuse "'$PYTHON' does not run: set PYTHON"
    [[ -z $lacking ]] || refuse "'$PYTHON' has no $lacking: activate the environment of jaxtrain," \
        "or set PYTHON to its interpreter, for example PYTHON=.venv/bin/python"
}

check_numbers() {
    local name
    for name in MAX_RESTARTS RESTART_DELAY_S SAVE_S GRACE_S KILL_S; do
        [[ ${!name} =~ ^[0-9]+$ ]] || refuse "$name is '${!name}': set it to a whole number"
    done
}

read_arguments() { # read_arguments ARGUMENT...: sets doctor, in_bucket and arguments
    local argument
    arguments=("$@")
    ! is_bucket "$(option --output-dir "$@")" || in_bucket=yes
    for argument in "$@"; do
        [[ $argument != --doctor ]] || doctor=yes
    done
    [[ -n $doctor ]] || return 0
    arguments=(doctor)
    while (($#)); do
        case $1 in
            --doctor) ;;
            *) arguments+=("$1") ;;
        esac
        shift
    done
}

option() { # option NAME ARGUMENT...: prints the value of the last --NAME; fails without one
    local name=$1 found='' value='' argument
    shift
    while (($#)); do
        argument=$1
        shift
        case $argument in
            "$name"=*) value=${argument#*=} found=yes ;;
            "$name") value=${1:-} found=yes ;;
        esac
    done
    [[ -n $found ]] && printf '%s\n' "$value"
}

output_dir() { # output_dir ARGUMENT...: prints the run directory, which a restart needs
    local directory
    if ! directory=$(option --output-dir "$@") || [[ -z $directory ]]; then
        refuse "--output-dir is missing: a restart resumes from the checkpoints in it"
    fi
    if is_bucket "$directory"; then
        stage "$directory" "$@"
    else
        printf '%s\n' "$directory"
    fi
}

is_bucket() { [[ $1 =~ ^(s3|gs|gcs):/ ]]; }

stage() { # stage URL ARGUMENT...: prints the folder in this host's cache for a run in a bucket
    local url=$1 cache name
    shift
    url=$(sed -E 's|^gcs:|gs:|; s|/+|/|g; s|:/|://|; s|/$||' <<<"$url")
    cache=$(option --data.cache_dir "$@") || cache=$(default_cache)
    name=$(printf '%s' "${url##*/}" | LC_ALL=C tr -cd 'A-Za-z0-9_.-')
    printf '%s/buckets/%s-%s/run\n' "$cache" "${name:0:40}" \
        "$(printf '%s' "$url" | sha256sum | cut -c 1-12)"
}

default_cache() {
    local cache=${JAXTRAIN_CACHE:-~/.cache/jaxtrain}
    printf '%s\n' "$cache"
}

missing_directories() { # missing_directories DIR: prints it and its missing parents, the deepest first
    local path=$1
    while [[ -n $path && ! -e $path ]]; do
        printf '%s\n' "$path"
        path=$(dirname -- "$path")
    done
}

remove_empty() { # remove_empty DIR...: stops at the first that is not empty
    local path
    for path in "$@"; do
        rmdir -- "$path" 2>/dev/null || [[ ! -e $path ]] || return 0
    done
}

# Only for launchers that start all processes: otherwise another node may be about to write there.
leave() { # on exit: removes the empty folders of a rejected start or of a check
    local status=$?
    abandon
    if ((status == 2)) || [[ -n $doctor ]]; then
        remove_empty "${made[@]}"
    fi
}

make_directory() { # make_directory DIR: sets made
    local reason
    mapfile -t made < <(missing_directories "$1")
    reason=$(mkdir -p -- "$1" 2>&1) ||
        refuse "cannot create the run directory ($reason): pass another --output-dir"
    local file # in an untrusted run directory these could point outside it, or never open
    for file in "$1"/*.txt "$1"/.*-restarts; do
        [[ ! -L $file && ! -p $file ]] ||
            refuse "$file is a symbolic link or a pipe: remove it, or pass another --output-dir"
    done
}

# Bash runs a command in a text with which it computes, and the run directory may be a stranger's.
read_restarts() { # read_restarts FILE: sets before and in_vain, unless the file has something else
    local found count
    if read -r found count <"$1" && [[ "$found $count" =~ ^[[:alnum:]]+\ [0-9]{1,9}$ ]]; then
        before=$found in_vain=$((10#$count))
    fi
}

free_port() {
    "$PYTHON" -c 'import socket
with socket.socket() as probe:
    probe.bind(("", 0))
    print(probe.getsockname()[1])'
}

newest_checkpoint() { local_newest_checkpoint "$@"; }

# Prints the step of the newest checkpoint, or else one word: "unusable" if a resume has moved all of
# them aside, "none" if there are no checkpoints, "nothing" if the run directory does not exist.
# ssh.sh adds "unreachable": the host with the run does not respond.
local_newest_checkpoint() { # local_newest_checkpoint DIR
    local pointer step newest=''
    for pointer in "$1"/checkpoints/*.json; do
        step=$(basename "$pointer" .json)
        if [[ -e $pointer && $step =~ ^[0-9]+$ ]] && ((step > ${newest:--1})); then
            newest=$step
        fi
    done
    if [[ -n $newest ]]; then
        echo "$newest"
    elif [[ -d $1/damaged || -d $1/suspect ]]; then
        echo unusable
    elif [[ -d $1 ]]; then
        echo none
    else
        echo nothing
    fi
}

is_step() { [[ $1 =~ ^[0-9]+$ ]]; }

is_newer() { # is_newer NEWEST BEFORE: only a later step is progress, not any change
    is_step "$1" && { ! is_step "$2" || (($1 > $2)); }
}

is_lost() { # is_lost NEWEST BEFORE: the checkpoints are gone; their disk or host may be unavailable
    [[ -z $in_bucket ]] || return 1 # a resume fetches them
    case $1 in
        unreachable) true ;;
        nothing) [[ $2 != nothing && $2 != unreachable ]] ;;
        none) is_step "$2" ;;
        *) false ;;
    esac
}

in_background() { # in_background COMMAND...: in its own process group; sets started_pid
    # Job control creates the group and keeps the default action of SIGINT: without it a background
    # process ignores Ctrl-C, and in the launcher's group it would receive each Ctrl-C twice.
    set -m
    "$@" </dev/null &
    started_pid=$!
    set +m
}

signal_process() { kill -s "$2" -- "$1" 2>/dev/null || true; } # signal_process PID SIGNAL

sweep_process() { # sweep_process PID: ends the remaining processes in an ended process's group
    local tries
    for tries in {1..25}; do # its workers notice that it is gone, and free their shared memory
        kill -0 -- "-$1" 2>/dev/null || return 0
        ((tries == 25)) || sleep 0.2
    done
    kill -s KILL -- "-$1" 2>/dev/null || true
}

described() { # described CODE
    if (($1 > 128 && $1 <= 192)); then
        printf '%s (SIG%s)' "$1" "$(kill -l $(($1 - 128)))"
    else
        printf '%s' "$1"
    fi
}

on_signal() {
    wanted_signal=$1
    stopped_by=${stopped_by:-$1}
}

forward_signal() { # sends the received signal to every running process
    local pid signal=$wanted_signal
    wanted_signal=''
    [[ $signal != HUP ]] || signal=TERM
    for pid in "${pids[@]}"; do
        [[ -z $pid ]] || signal_process "$pid" "$signal"
    done
}

nap() { # nap SECONDS: sleeps, but not beyond the arrival of a signal
    local sleeper
    sleep "$1" >/dev/null 2>&1 &
    sleeper=$!
    wait "$sleeper" || kill "$sleeper" 2>/dev/null || true
}

weight() { # weight CODE: its priority among processes that ended first, at the same moment
    if (($1 == 0)); then
        echo 0
    elif (($1 == 2 || $1 == 130)); then
        echo 2 # a restart cannot help, and the others failed because of it
    elif (($1 > 128)); then
        echo 3 # a signal comes from outside, and the others failed because of it
    else
        echo 1
    fi
}

collect() { # waits for ended processes; sets running, and code from those that ended first
    local index pid one decided=$code
    running=0
    for index in "${!pids[@]}"; do
        pid=${pids[index]}
        [[ -n $pid ]] || continue
        if kill -0 "$pid" 2>/dev/null; then
            running=$((running + 1))
            continue
        fi
        one=0
        wait "$pid" 2>/dev/null || one=$?
        pids[index]=''
        codes[index]=$one
        ((one == 0)) || say "process $index ended with $(described "$one")"
        if ((!${decided:-0})) && (($(weight "$one") >= $(weight "${code:-0}"))); then
            code=$one
        fi
        sweep_process "$pid"
    done
}

end_the_others() { # end_the_others WAITED_S: SIGTERM after a while, then SIGKILL
    local waited_s=$1 pid patience_s=$GRACE_S signal=''
    case $code in 0 | 75 | 130) patience_s=$SAVE_S ;; esac
    [[ -z $doctor ]] || patience_s=$SAVE_S
    ((waited_s < patience_s)) || signal=TERM
    ((waited_s < patience_s + KILL_S)) || signal=KILL
    [[ $signal != "$sent" ]] || return 0
    sent=$signal
    for pid in "${pids[@]}"; do
        [[ -z $pid ]] || signal_process "$pid" "$signal"
    done
    say "the other processes are still running after $waited_s s: sending SIG$signal"
}

wait_for_all() { # until every process has ended; after the first, the others have limited time
    local running ended_at='' sent=''
    while :; do
        [[ -z $wanted_signal ]] || forward_signal
        collect
        ((running)) || return 0
        if [[ -n $code ]]; then
            ended_at=${ended_at:-$SECONDS}
            end_the_others $((SECONDS - ended_at))
        fi
        nap 0.2 2>/dev/null # hides bash's own message about a killed process
    done
}

abandon() { # the launcher itself has failed: no process may remain
    local pid
    for pid in "${pids[@]}"; do
        [[ -z $pid ]] || signal_process "$pid" KILL
    done
}

run_once() { # run_once COUNT ARGUMENT...: sets code to that of the first process that failed, or 0
    local count=$1 index
    shift
    pids=() codes=() code=''
    for ((index = 0; index < count; index++)); do
        [[ -z $stopped_by ]] || break
        start_process "$index" "$@"
        pids[index]=$started_pid
    done
    wait_for_all
    code=${code:-0}
}

restart_delay_s() { # restart_delay_s NUMBER: seconds before this restart in a row
    awk -v first="$RESTART_DELAY_S" -v number="$1" \
        'BEGIN {delay = first * 4 ^ (number - 1); printf "%d", delay < 300 ? delay : 300}'
}

await_restart() { # await_restart SECONDS: in short naps, as a signal just before a nap does not end it
    local end=$((SECONDS + $1))
    while ((SECONDS < end)) && [[ -z $stopped_by ]]; do nap 0.5; done
}

# If the run's disk is unavailable, a restart would create its directory below the empty mount point and
# train from scratch. So if there was something before, a restart waits until it is there again.
await_disk() { # await_disk DIR CODE: while is_lost; counts in in_vain, sets newest and checks
    local was='' now
    checks=0
    ! is_step "$before" || was=" (before: checkpoint $before)"
    while is_lost "$newest" "$before" && ((in_vain <= MAX_RESTARTS)) && [[ -z $stopped_by ]]; do
        now="$1 $(state_of "$newest") now$was: is its disk mounted?"
        [[ $newest != unreachable ]] || now="$(checkpoint_host) cannot be reached now."
        say "ended with $(described "$2"), and $now Not starting from scratch; checking again," \
            "$in_vain of at most $MAX_RESTARTS times"
        await_restart "$(restart_delay_s "$in_vain")"
        newest=$(newest_checkpoint "$1")
        checks=$((checks + 1))
        ! is_lost "$newest" "$before" || in_vain=$((in_vain + 1))
    done
}

checkpoint_host() { echo "the host of the checkpoints"; }

state_of() { # state_of NEWEST: prints the state of a run directory without a checkpoint
    case $1 in
        nothing) echo "does not exist" ;;
        *) echo "has no checkpoint" ;;
    esac
}

why_in_vain() { # why_in_vain DIR: prints the reason for giving up after MAX_RESTARTS
    local times="$checks checks"
    ((checks != 1)) || times='one check'
    if ((checks == 0)) || ! is_lost "$newest" "$before"; then
        echo "$MAX_RESTARTS restarts in a row produced no new checkpoint (newest: $newest)"
    elif [[ $newest == unreachable ]]; then
        echo "after $times $(checkpoint_host) still cannot be reached"
    else
        echo "after $times $1 still $(state_of "$newest")"
    fi
}

# await_directory RESTARTS DIR: waits for the directory that the first start created; fails without it
await_directory() {
    local try
    (($1)) && [[ -z $in_bucket ]] || { make_directory "$2" && return; }
    for ((try = 1; try <= MAX_RESTARTS; try++)); do
        [[ ! -d $2 ]] || return 0
        say "this is restart $1, and $2 does not exist now: is its disk mounted? Not starting from" \
            "scratch; checking again, $try of at most $MAX_RESTARTS times"
        await_restart "$(restart_delay_s "$try")"
    done
    [[ -d $2 ]] && return
    say "this is restart $1, and $2 still does not exist: giving up"
    return 1
}

examine() { # examine COUNT ARGUMENT...: runs doctor once, and exits with the highest code
    local code one highest=0
    run_once "$@"
    for one in "${codes[@]}"; do
        ((one <= highest)) || highest=$one
    done
    exit "$highest"
}

run_until_done() { # run_until_done COUNT DIR ARGUMENT...: exits with the run's code
    local count=$1 directory=$2 code newest before in_vain=0 resume
    shift 2
    trap 'on_signal TERM' TERM
    trap 'on_signal INT' INT
    trap 'on_signal HUP' HUP
    [[ -n $(trap -p EXIT) ]] || trap abandon EXIT
    [[ -z $doctor ]] || examine "$count" "$@"
    resume=(--resume latest)
    ! option --resume "$@" >/dev/null || resume=() # the first start uses the user's --resume
    before=$(newest_checkpoint "$directory")
    while :; do
        run_once "$count" "$@" "${resume[@]}"
        case $code in
            0) ((${#codes[@]} < count)) || exit 0 ;;
            2) exit 2 ;;
        esac
        case $stopped_by in
            INT) exit 130 ;;
            TERM | HUP) exit 75 ;;
        esac
        ((code != 130)) || exit 130
        newest=$(newest_checkpoint "$directory")
        ! is_newer "$newest" "$before" || in_vain=0
        in_vain=$((in_vain + 1)) checks=0
        if is_lost "$newest" "$before"; then
            await_disk "$directory" "$code"
        elif ((in_vain <= MAX_RESTARTS)); then
            say "ended with $(described "$code"): restart $in_vain of at most $MAX_RESTARTS without a" \
                "new checkpoint (newest: $newest)"
            await_restart "$(restart_delay_s "$in_vain")"
        fi
        if ((in_vain > MAX_RESTARTS)); then
            say "ended with $(described "$code"), and $(why_in_vain "$directory"): giving up; see the" \
                "log in $(option --output-dir "$@")"
            ((code != 75)) || code=1 # 75 would ask an outer launcher for a restart
            exit "$code"
        fi
        before=$newest
        case $stopped_by in
            INT) exit 130 ;;
            TERM | HUP) exit 75 ;;
        esac
        resume=(--resume latest) # overrides the user's --resume: the last one counts
    done
}
