"""Large whole numbers as people write them: 500k, 2.5M, 1B."""

import re

_FACTORS = {"k": 10**3, "M": 10**6, "B": 10**9}
_WRITTEN = re.compile(r"([+-]?\d+)(?:\.(\d+))?([kMB])")


def whole(text: str) -> int | None:
    """The number that a text with a factor means; None for any other text, and for part numbers."""
    match = _WRITTEN.fullmatch(text.replace("_", ""))
    if match is None:
        return None
    digits, decimals, factor = match[1], match[2] or "", _FACTORS[match[3]]
    value, rest = divmod(int(digits + decimals) * factor, 10 ** len(decimals))
    return None if rest else value


def readable(number: int) -> str:
    """The shortest form with a factor that means exactly this number: 2500000 is 2.5M."""
    for name, factor in reversed(_FACTORS.items()):
        if abs(number) >= factor:
            text = f"{number / factor:.3f}".rstrip("0").rstrip(".") + name
            return text if whole(text) == number else f"{number:,}"
    return f"{number:,}"
