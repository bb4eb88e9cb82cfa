"""The CPU backend of attention, in C++."""
