-- Checks of ids, groups, turns and episodes: what can be learned from them.

-- check: duplicate_ids
-- unit: trajectory
-- says: {found} of {of} rows have the id of an earlier row
-- A lookup by id finds only one of them.
select trajectory_id, data_set, 'an earlier row has the same id'
from episodes qualify row_number() over (partition by trajectory_id order by row) > 1

-- check: success_drift
-- unit: data set
-- needs: scores
-- The value is the largest step from one iteration of a run to the next in standard errors, which sampling noise may
-- not explain. Smaller steps than 0.1 raise no alarm, however certain they are.
select version, data_set,
    format('first turn {:.3f} to {:.3f} in {}, {:.1f} standard errors', before, after, version, errors)
from success_steps where errors > getvariable('threshold')
-- measured:
select coalesce(max(errors), 0), count(*), if(
    count(errors) = 0, count(*) || ' steps between data sets, none of 0.1 or more',
    format('the largest of {} steps: first turn {:.3f} to {:.3f} in {}, {:.1f} errors', count(*),
        arg_max(before, errors), arg_max(after, errors), arg_max(version, errors), max(errors)))
from success_steps

-- check: zero_variance
-- unit: group
-- share: groups have no variance
-- needs: scores
-- Their advantages are zero, so they cost a rollout and teach nothing.
select problem_id, data_set, 'all ' || episodes || ' episodes are ' || if(best > 0, 'right', 'wrong'), same
from played_groups

-- check: identical_answers
-- unit: group
-- share: groups gave only one answer
-- Seeds may have no effect, or the policy explores no more. Right answers of fewer than 16 tokens are often the same.
select problem_id, data_set, 'all ' || count(*) || ' first answers are the same',
    count(distinct text) = 1 and (min("end" - "start") >= 16 or coalesce(max(success), 1) = 0)
from first_turns group by problem_id, data_set having count(*) >= 4

-- check: broken_answers
-- unit: turn
-- share: right answers with a next answer were followed by a wrong one
-- needs: scores
-- The policy may only react to the feedback.
select trajectory_id, data_set, turn_name(before) || ' was right, ' || turn_name(turn) || ' is not', success = 0
from revisions where was > 0 and success is not null

-- check: repeated_seeds
-- unit: turn
-- needs: seeds
-- says: {found} of {of:,} turns were sampled with a seed that their group already had
-- among: turns
-- They are one turn, counted twice. Trajectories of one episode have the same sample number and may have turns in
-- common, so they are not compared.
with doubled as (
    select data_set, problem_id, turn, seed, min(sample) as first_sample from turns
    group by 1, 2, 3, 4 having count(distinct sample) > 1
)
select trajectory_id, data_set, turn_name(t.turn) || ' has the seed of another sample, ' || t.seed
from turns t join doubled using (data_set, problem_id, turn, seed) where t.sample > first_sample

-- check: failed
-- unit: trajectory
-- needs: ends
-- share: episodes failed
-- The episodes that remain may be the easier ones.
select trajectory_id, data_set, reason, status = 'failed' from episodes

-- check: truncated
-- unit: trajectory
-- needs: ends
-- share: episodes were cut by a token limit
-- The answer may have come a token later.
select trajectory_id, data_set, reason, status = 'truncated' from episodes

-- check: length_and_reward
-- unit: data set
-- needs: scores tokens
-- If the longer answer of a group is mostly right, answers get longer. The value is the largest absolute correlation
-- among the data sets, of length and success of first turns, both minus their group's mean. Data sets with fewer than
-- 100 turns in groups with right and wrong answers do not count.
select version, data_set, format('length and success of its first turns correlate by {:+.2f}', correlation)
from correlations where abs(correlation) > getvariable('threshold')
-- measured:
select coalesce(max(abs(correlation)), 0), count(*), if(
    count(*) = 0, 'no data set has 100 turns in groups with right and wrong answers to correlate',
    format('length and success of {:,} first turns correlate by at most {:+.2f}, in {}',
        coalesce(sum(turns), 0)::bigint, arg_max(correlation, abs(correlation)), arg_max(version, abs(correlation))))
from correlations
