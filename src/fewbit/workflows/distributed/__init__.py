"""Work divided over the processes of a JAX cluster."""
