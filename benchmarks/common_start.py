"""Makes a checkout importable without installing it.

Comparisons also set ``SHARED_GPU``; otherwise jax would allocate most of a GPU's memory at once.
"""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))
SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
