"""Tokenizers of GGUF, Hugging Face and glassllm checkpoints."""
