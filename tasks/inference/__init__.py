"""vLLM as a service: token ids in, token ids out, over HTTP.

An `Engine` starts one `Server` per replica, a child that ends with this process. It loads a checkpoint through
a `Client` and demands a `Proof` that each replica serves it. A rollout sends its requests through a `Connection`.
"""
