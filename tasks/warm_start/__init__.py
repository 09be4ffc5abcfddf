"""A tiny policy and its tokenizer, made and taught from nothing on the arithmetic generator."""
