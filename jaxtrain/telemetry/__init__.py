"""Reports a run: one stream of events, and sinks that print or store them.

``events`` defines the events, the stream, and what a sink is; ``sinks`` opens those of a run. They
are ``console``, ``line_files`` (``log.txt``, ``metrics.jsonl``), ``tensorboard``, ``history``, and
``samples``, which uses ``images``. ``tracker`` has a thread for each of W&B, Trackio, and MLflow,
which reads ``metrics.jsonl``; ``recorder`` is what these implement. ``phases``, ``throughput``, and
``hardware`` measure some of the metrics.
"""
