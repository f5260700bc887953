"""What the shop sells."""

from __future__ import annotations

PRICES_CENTS = {
    "penne": 189,
    "rigatoni": 199,
    "orecchiette": 279,
    "pappardelle": 329,
    "pesto": 449,
    "ragu": 529,
    "pecorino": 799,
    "olive-oil": 1199,
    "bronze-die": 4999,
    "drying-rack": 3499,
}


def total_cents(items: list[tuple[str, int]]) -> int:
    """Return what ``items``, pairs of sku and quantity, cost.

    Raises:
        KeyError: A sku is not sold here.
    """
    return sum(PRICES_CENTS[sku] * quantity for sku, quantity in items)
