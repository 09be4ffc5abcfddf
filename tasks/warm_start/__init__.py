"""Policy version 0: taught on arithmetic (a warm start), or imported.

`task` (Prefect) chooses and commits. For a warm start, `teach` trains a tiny Qwen3 on supervised examples: `tokenizer`
builds its tokenizer, `examples` encodes conversations, `batches` draws from them. `importing` copies a policy from
elsewhere after `soundness` has checked its weights and tokenizer. `tryout` checks that the configured agent can play
the policy before it is committed. `policy_sizes` finds the sizes of a policy without its weights.
"""
