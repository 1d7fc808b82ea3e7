"""Commands of the ``jaxtrain`` program by what they work on; their flags are in one table.

`commands.py` is that table, `flags.py` parses what is typed, and `help.py` describes it.
"""

COMMAND_GROUPS = {
    "Use a model": {
        "generate": "generate text with a causal language model",
        "fill": "predict the token at each [MASK] of a text",
        "encode": "encode a video to latents",
        "decode": "decode latents to a video",
        "reconstruct": "encode and decode a video of any length",
        "evaluate": "measure the quality of one or more models",
        "export": "write weights for PyTorch or transformers",
        "import": "convert published weights to a weights file",
    },
    "Prepare data": {"prepare": "cut videos, tokenize text, compute latents"},
    "Check and plan": {
        "plan": "predict memory, time, and cost without GPUs",
        "doctor": "check machine, cluster, and data for a config",
        "compare": "tell whether a change is better, by pairs of runs",
        "bench": "measure speed and memory on this machine",
        "configs": "list, show, or compare configs",
        "checkpoints": "list and verify the checkpoints of a run",
        "find-nan": "find where the NaN/Inf that ended a run began",
        "report": "write an HTML report of one or more runs",
    },
}
COMMANDS = {name: text for commands in COMMAND_GROUPS.values() for name, text in commands.items()}
