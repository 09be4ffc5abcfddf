"""Policy version 0: taught on arithmetic (a warm start), or imported.

`task` (Prefect) chooses and commits. For a warm start, `teach` trains a tiny Qwen3 on supervised examples, whose
tokenizer `tokenizer` builds. `importing` checks and copies a policy from elsewhere, and tries out before the commit
whether the configured agent can play the policy. `policy_sizes` finds the sizes of a policy without its weights,
`smollm2` gets the model of `make demo-llm`.
"""
