"""Checks an editable install with a script beside the checkout, which has the package's name.

pip install -e PARENT/jaxtrain && cp PARENT/jaxtrain/tests/wheel/beside.py PARENT
python PARENT/beside.py
"""

from pathlib import Path

import jaxtrain
from jaxtrain.config import files

CHECKOUT = Path(__file__).resolve().parent / "jaxtrain"

assert callable(jaxtrain.train)
assert Path(jaxtrain.__file__) == CHECKOUT / "jaxtrain" / "__init__.py", jaxtrain.__file__
assert files.directory() == CHECKOUT / "configs", files.directory()
print(f"{Path.cwd()}: {CHECKOUT} is imported")
