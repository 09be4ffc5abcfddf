"""vLLM as a service: token ids in, token ids out, over HTTP.

An `Engine` starts one `Server` per replica, a child that ends with this process. It loads a checkpoint through a
`Client` and demands a `Proof` that each replica serves it: `weight_sums.py` compares the checkpoint's files with what
`worker.py`, inside of vLLM, finds there. A rollout sends its requests through a `Connection`.
"""
