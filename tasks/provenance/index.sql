-- The tables that `index.py` describes, into which it puts the words in braces, and after them the queries of `questions.py`.

-- name: problem_ids
select distinct a.key, m.problem_id, s.version
from ({with_ids}) m join problem_contents a using (prompt, solutions, setting) join sets s using (data_set)

-- name: played
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

-- name: update_inputs
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

-- name: uses
select checkpoint, split_part(checkpoint, '/', 2) as run, split_part(checkpoint, '/', 4)::integer - 1 as iteration,
       version as data_set, count(*) as episodes, count(*) filter (entered) as trained
from update_inputs group by all order by checkpoint, data_set

-- name: trajectories
select p.trajectory_id, p.version as data_set, split_part(p.version, '/', 2) as run,
       split_part(p.version, '/', 4)::integer as iteration, p.problem_id,
       case when p.best is null then 'unscored' when p.best > 0 then 'right' else 'wrong' end as outcome,
       coalesce(list(u.checkpoint order by u.checkpoint) filter (u.entered), []) as trained
from played p left join update_inputs u using (version, trajectory_id)
group by p.trajectory_id, p.version, p.problem_id, p.best order by p.version, p.trajectory_id

-- name: trained_problems
with steps as (select unnest(?::varchar[]) as checkpoint, generate_subscripts(?::varchar[], 1) as step),  -- nearest first
stepped as (
    select u.*, step, split_part(version, '/', 2) || '/' || split_part(version, '/', 4) as iteration
    from update_inputs u join steps using (checkpoint)
), by_problem as (
    select key, count(*) as episodes, count(*) filter (entered) as trained,
           count(distinct checkpoint) filter (entered) as updates, arg_max(iteration, step) as first,
           arg_min(iteration, step) as last, min(step) as newest
    from stepped group by key
), ids as (select key, min(problem_id) as problem_id from played group by key)
select b.key, i.problem_id, a.prompt, a.solutions, b.* exclude (key, newest)
from by_problem b join ids i using (key)
join (select distinct on (key) key, prompt, solutions from problem_contents order by solutions) a using (key)
order by b.newest, i.problem_id

-- name: results
with episodes as (
    select key, data_set, sample, problem_id, max(coalesce(best, 0)) as best from played
    where data_set in (select data_set from scores_files)
        and (status <> 'failed' or fault = 'policy') group by all
), iterations as (
    select key, data_set, count(*) as episodes, count(*) filter (best > 0) as solved from episodes group by all
), newest as (
    select *, sum(episodes) over (partition by key order by data_set desc) - episodes as newer from iterations
)
select key, sum(episodes)::bigint as episodes, sum(solved)::bigint as solved from newest where newer < ? group by key
