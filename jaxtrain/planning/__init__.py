"""What a run needs, found out without the GPUs that it needs.

`cards.py` describes the GPUs to the compiler; `traffic.py` sums what a compiled step
(`jaxtrain.program`) sends, against what its sharding sends by formula.
"""
