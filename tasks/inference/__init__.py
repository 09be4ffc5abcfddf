"""vLLM as a service: token ids in, token ids out, over HTTP."""
