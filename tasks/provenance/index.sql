-- The tables that `index.py` describes. It puts in the words in braces.

-- table: problem_ids
select distinct a.key, m.problem_id, s.version
from ({with_ids}) m join problem_contents a using (prompt, solutions, setting) join sets s using (data_set)

-- table: played
with found as (
    select t.data_set, t.row, s.version, t.trajectory_id, t.problem_id, t.sample, a.key, t.status,
           coalesce(t.fault, '') as fault,
           sampled_tokens(t.action_mask) as tokens,
           coalesce(t.status = 'truncated' and misses_answers(-1, t.reason), false)
               and coalesce(t.unplayed_turns, -1) < 0 as cut,
           oldest_version(t.versions) as oldest
    from (select *, {setting} as setting from trajectories) t
    join problem_contents a using (prompt, solutions, setting) join sets s using (data_set)
    where {condition}
), scored as (
    select data_set, trajectory_id, any_turn(success) as best, bool_or(has_failed(verdict, reason)) as failed
    from scores semi join found using (data_set, trajectory_id) where verdict <> 'none' group by all
)
select f.*, j.best, coalesce(j.failed, false) as failed
from found f left join scored j using (data_set, trajectory_id)

-- table: update_inputs
select o.checkpoint, p.data_set, p.version, p.trajectory_id, p.key, p.tokens,
       is_trainable(p.status, p.fault, p.tokens, o.unfinished_too) and not is_stale(coalesce(p.oldest, 0), o.trained, o.allowed)
       and not o.idle
       and (o.checkpoint not in (select checkpoint from chosen) or (o.checkpoint, p.row) in (from chosen))
       and (o.cut_too or o.unfinished_too or not p.cut) and (o.failed_too or not p.failed)
       and not exists (from honoured h join excluded_trajectories e using (exclusions)
                       where (h.checkpoint, e.version, e.trajectory_id)
                           = (o.checkpoint, p.version, p.trajectory_id))
       and not exists (from honoured h join excluded_problems e using (exclusions)
                       where (h.checkpoint, e.key) = (o.checkpoint, p.key)) as entered
from played p join updates o using (version)
