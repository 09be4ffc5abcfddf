-- One row for each distinct prompt: number, text.
create table prompts as
select row_number() over () as number, prompt as text from (select distinct prompt from trajectories);

-- One row for each line of the list; `position` is their order.
create table listing as
with answers as (
    select row, list(coalesce(verdict, environment_verdict) order by turn) as verdicts, arg_max(left(text, 400), turn) as answer
    from turns group by row
)
select row_number() over (order by e.data_set, e.problem_id, e.sample, e.row) as position, e.row, e.data_set, e.run,
       e.iteration, e.trajectory_id, e.problem_id, e.sample, e.status, e.turns, e.calls, e.sampled as tokens,
       e.earned, s.verdicts, s.answer, p.number as prompt
from episodes e join (select row, prompt from trajectories) t using (row)
left join prompts p on p.text = t.prompt left join answers s using (row)
order by position;

-- What the list shows of a trajectory, without `prompt`: also version, the data set's. `tokens` are those that were
-- sampled; `earned` is the return, from the score, or from the environment without one; so are `verdicts` of the turns;
-- `answer` is the beginning of the last turn.
create temp view list_items as
select l.* exclude (data_set, prompt), version from listing l join (select data_set, version from data_sets) using (data_set);

-- The rows whose prompt, completions or feedback contain a text, in upper or lower case.
create temp macro rows_with_text(words) as table
select row from listing join prompts on prompt = number where contains(lower(text), lower(words))
union all
select row from turns where contains(lower(text), lower(words)) or contains(lower(feedback), lower(words));

-- The rows for which a check has a case: of the trajectory, of its group or problem, or of its data set.
create temp macro rows_with_case(name) as table
with found as (
    from cases where check_name = name
), placed as (
    select row, trajectory_id, problem_id, version from listing join (select data_set, version from data_sets) using (data_set)
)
select l.row from placed l join found c on c.id = l.trajectory_id
where c.unit in ('trajectory', 'turn', 'call') and c.data_set in ('', l.version)
union all
select l.row from placed l join found c on c.id = l.problem_id
where c.unit in ('group', 'problem') and c.data_set in ('', l.version)
union all
select l.row from placed l join found c on c.id = l.version where c.unit = 'data set';

-- The first cases of a trajectory in a data set: check and detail.
create temp macro cases_of_trajectory(name, version) as table
select check_name, detail from cases
where unit in ('trajectory', 'turn', 'call') and id = name and data_set in ('', version) order by all limit 100;

-- The scores of turns, with the columns of `storage.records.Score` and row.
create temp view stored_scores as
select row, trajectory_id, turn, verdict, coalesce(success, 0) as success, extracted, solution, verdict_reason, scored_reward
from turns where verdict is not null;

-- The least reward that each scorer gave in a data set.
create temp view least_rewards as
select data_set, scorer, min(scored_reward) as least from turns
semi join (select row from episodes where status in ('completed', 'truncated')) using (row)
where verdict <> 'none' group by data_set, scorer;
