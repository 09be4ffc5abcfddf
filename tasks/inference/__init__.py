"""vLLM as a service: token ids in, token ids out, over HTTP.

An `Engine` starts one `Server` per replica, each `Supervised` by a process `supervisor`. It loads a checkpoint through
a `Client` and demands a `Proof` that each replica serves it. A rollout sends its requests through a `Connection`.
"""
