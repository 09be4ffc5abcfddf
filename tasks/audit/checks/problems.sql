-- Checks of problems that need no Python.

-- check: never_solved
-- unit: problem
-- needs: scores golds
-- Problems with many episodes and no right turn, for which at least half of the last answers are the same.
with played as (
    select t.row, problem_id, prompt, solutions, best
    from episodes join (select row, prompt, solutions from trajectories) t using (row) where best is not null
), unsolved as (
    select problem_id, prompt, solutions, count(*) as episodes from played
    group by problem_id, prompt, solutions having count(*) >= getvariable('least_episodes') and max(best) = 0
), answers as (
    select problem_id, prompt, solutions, extracted, count(*) as votes
    from played join (select row, arg_max(extracted, answer) as extracted from turns group by row) using (row)
    where extracted <> '' group by all
)
select h.problem_id, null::integer,
    votes || ' of ' || episodes || ' episodes ended in ' || extracted || ', none in the gold answer '
        || coalesce(h.solutions[1], '')
from unsolved h join answers a using (problem_id, prompt, solutions)
where votes * 2 >= episodes
qualify row_number() over (partition by h.problem_id, prompt, h.solutions order by votes desc, extracted) = 1
-- measured:
with checked as (
    select 1 from episodes join (select row, prompt, solutions from trajectories) using (row)
    where best is not null
    group by problem_id, prompt, solutions having count(*) >= getvariable('least_episodes')
), counted as (
    select (select count(*) from cases where check_name = 'never_solved') as found, (select count(*) from checked) as of
)
select found, of, format(
    '{:,} of {:,} problems with {} episodes or more were never solved, while at least half of the episodes ended in '
    || 'one other answer', found, of, getvariable('least_episodes'))
from counted
