"""Policy version 0 from elsewhere.

`importing` checks and copies a policy, and tries out before the commit whether the configured agent can play it.
`policy_sizes` finds the sizes of a policy without its weights, `smollm2` gets the model of `make demo-llm`.
"""
