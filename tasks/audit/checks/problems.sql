-- Checks of problems: gold answers where they should not be, and those that may be wrong.

-- check: leaked_answers
-- unit: problem
-- needs: golds
-- The policy would learn to copy. Each distinct prompt is searched, as text and as decoded tokens, and each feedback in
-- a problem's episodes. The same words about many problems may be an example or a fixed phrase: they count as a leak
-- only if they contain the gold answers of more than half of these problems. What tools put out is the matter of
-- `leaked_by_tool`, because a calculator puts out answers rightly.
-- before:
-- Kept for both checks that read it, whichever comes first.
create temp table if not exists kept_prompts as from distinct_prompts;
create or replace temp table stated_in_prompts as
    select run, problem_id, words, min(data_set) as data_set, bool_or(is_gold) as is_gold from (
        select '' as run, null::integer as data_set, problem_id,
            unnest(stated_answers(prompt, solutions), recursive := true)
        from problems where not all_left_out(data_sets)
        union all
        select run, data_set, problem_id, unnest(stated_answers(decoded(data_set, ids), solutions), recursive := true)
        from kept_prompts
    ) group by run, problem_id, words;
-- cases:
select problem_id, data_set, 'its prompt states the gold answer: "' || left(words, 80) || '"'
from (select *, avg(is_gold::integer) over (partition by run, words) as share from stated_in_prompts)
where is_gold and share > 0.5
qualify row_number() over (partition by problem_id, words order by data_set nulls last) = 1
-- also turn:
-- Feedback that contains the gold answer, while neither the prompt nor a turn before it does.
with leaking as (
    select problem_id, feedback from (
        select *, count(*) over (partition by feedback) as own from feedback_with_gold
        where contains_gold(feedback, solutions) and not contains_gold(prompt, solutions)
    ) where own > 0.5 * problems
)
select trajectory_id, data_set,
    'the feedback after ' || turn_name(turn) || ' gives the gold away: "' || left(feedback, 80) || '"'
from told s semi join leaking using (problem_id, feedback)
join (select row, trajectory_id, data_set, solutions from trajectories) using (row)
where not contains_gold(
    (select string_agg(text, chr(10)) from turns b where b.row = s.row and b.turn <= s.turn), solutions)
-- measured:
select prompts + turns, problems, format(
    'the prompts of {:,} of {:,} problems state the gold answer, and the feedback after {:,} turns gives it away',
    prompts, problems, turns)
from (
    select cases_of('leaked_answers', 'problem') as prompts, cases_of('leaked_answers', 'turn') as turns,
        (select count(*) from problems where not all_left_out(data_sets)) as problems
)

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
