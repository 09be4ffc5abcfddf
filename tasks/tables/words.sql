-- The words about stored episodes, each defined once. `words.py` has the same for rows in memory, and a test compares
-- both on random rows. A graded turn is one that answers; calls of tools and others with the verdict `none` are not.

-- Whether a grader failed by itself, so that its verdict says nothing about the answer.
create macro has_failed(verdict, reason) as
    coalesce(verdict in ('timeout', 'error') and not starts_with(reason, 'needs more than'), false);

-- The number of tokens that the policy sampled, and the lowest version among the policies that sampled them; null if
-- the versions are not known.
create macro sampled_tokens(action_mask) as list_count(list_filter(action_mask, lambda m: m))::integer;
create macro oldest_version(versions) as list_min(list_filter(versions::integer[], lambda v: v >= 0));

-- Whether an episode is trainable: the policy sampled tokens, and the end is one that is trained on. An episode that
-- failed is trained on if the policy is at fault; older programs could leave these out (counts_unfinished is false).
create macro is_trainable(status, fault, sampled, counts_unfinished) as
    sampled > 0 and not (counts_unfinished and fault = 'set-up')
    and (status in ('completed', 'truncated') or (counts_unfinished and status = 'failed' and fault = 'policy'));

-- Whether an episode ended before its last answer. Older programs did not count unplayed turns, and wrote -1.
create macro misses_answers(unplayed, reason) as
    unplayed > 0 or (unplayed < 0 and reason <> 'the last turn reached sampling.max_new_tokens');

-- Whether a trajectory is stale: its oldest token is more versions behind the policy in training than are allowed.
create macro is_stale(oldest, version, allowed) as coalesce(version - oldest > allowed, false);

-- The success of the first graded turn and of the best one, of the turns of an episode: null without a score.
create macro first_turn(success, answer) as max(success) filter (answer = 0);
create macro any_turn(success) as max(success);

-- Whether a group has no variance at a turn: all its episodes earned the same.
create macro has_no_variance(earned) as min(earned) = max(earned);
