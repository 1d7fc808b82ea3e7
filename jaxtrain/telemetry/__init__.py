"""Reports a run: one stream of events, and sinks that print or store them.

``events`` defines the events, the stream, and what a sink is. The sinks are ``console``,
``line_files`` (``log.txt``, ``metrics.jsonl``), ``tensorboard``, ``history``, and ``samples``,
which uses ``images`` and ``labels``. ``tracker`` starts a process for each of W&B, Trackio, and
MLflow, and ``tracker_process`` is that process. ``metrics`` describes every metric; ``phases``,
``throughput``, and ``hardware`` measure some of them. ``progress_bar`` is for long tasks before a
run.
"""
