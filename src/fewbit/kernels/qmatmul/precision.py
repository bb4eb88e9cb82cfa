"""The precision of products that the Pallas and Triton kernels compute in float32."""

import jax


def float32_precision(precision: object) -> jax.lax.Precision:
    """The precision of float32 products: HIGHEST unless DEFAULT (one bfloat16 pass) is named.

    Args:
        precision: as in `lax.dot_general`: None, a `jax.lax.Precision`, its name, or one for each operand.

    Raises:
        ValueError: for anything else, a `jax.lax.DotAlgorithm` among others.

    >>> float32_precision(None).name, float32_precision("default").name
    ('HIGHEST', 'DEFAULT')
    """
    if not isinstance(precision, tuple):
        precision = (precision,)
    named = {None if side is None else jax.lax.Precision(side) for side in precision}
    if named == {jax.lax.Precision.DEFAULT}:
        return jax.lax.Precision.DEFAULT
    return jax.lax.Precision.HIGHEST


def refused_float32_precision(precision: object) -> str | None:
    """Why `float32_precision` does not take a precision, or None.

    >>> refused_float32_precision("F64_F64_F64")
    "precision is 'F64_F64_F64'; None or a name of jax.lax.Precision is expected"
    """
    try:
        float32_precision(precision)
    except ValueError:
        return f"precision is {precision!r}; None or a name of jax.lax.Precision is expected"
    return None
