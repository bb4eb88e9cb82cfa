"""How fast: one folder a product, each with its problem, its reference and its backends; `select` chooses among them."""
