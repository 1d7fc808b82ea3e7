"""Makes a checkout importable without installing it, and leaves a GPU's memory to both sides."""

import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
