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
