"""The container of llm-compressor and vLLM."""
