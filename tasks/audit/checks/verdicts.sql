-- Checks of verdicts that need no second opinion.

-- check: unscored_turns
-- unit: turn
-- They cannot be trained on, and no rate has them. Turns of data sets that were not read whole, or whose run is still
-- working on them, are not checked.
select trajectory_id, data_set, turn_name(turn) || ' has no score'
from turns where verdict is null and list_contains(getvariable('complete'), data_set)
-- measured:
with never as (
    select version from turns join data_sets using (data_set) group by version having count(verdict) = 0
), found as (select count(*) as cases from cases where check_name = 'unscored_turns')
select cases, turns, format('{:,} of {:,} turns have no score', cases, turns) || if(
    sets = 0, '', format('; without any score: {} of {} data sets, such as {}', sets, whole, first))
from found, (select count(*) as turns from turns), (select count(*) as sets, min(version) as first from never),
    (select count(*) as whole from data_sets)

-- check: orphan_scores
-- unit: turn
-- needs: scored
select s.trajectory_id, s.data_set, 'a score of ' || turn_name(s.turn) || ', which does not exist'
from scores s anti join turns t using (data_set, trajectory_id, turn)
where list_contains(getvariable('complete'), s.data_set)
union all
select trajectory_id, data_set, turn_name(turn) || ' has ' || count(*) || ' scores'
from scores group by trajectory_id, data_set, turn having count(*) > 1
-- measured:
with found as (
    select count(*) as cases, count(*) filter (detail not like 'a score of %') as repeated
    from cases where check_name = 'orphan_scores'
)
select cases, scores, format(
    '{} of {:,} scores belong to no turn; {} turns have several scores', cases - repeated, scores, repeated)
from found, (select count(*) as scores from scores)

-- check: unparsable
-- unit: turn
-- share: turns have no answer
-- needs: scores
-- The policy ignores the format, or the verifier does not know it.
select trajectory_id, data_set, turn_name(turn) || ' has no answer', verdict = 'unparsable'
from turns where verdict <> 'none'

-- check: verdict_failures
-- unit: turn
-- share: verdicts are timeouts or errors
-- needs: scores
-- Training leaves these trajectories out. But an answer that met a limit earns the least reward, even if right.
select trajectory_id, data_set, turn_name(turn) || ': ' || verdict || ' ' || verdict_reason,
    verdict in ('timeout', 'error')
from turns where verdict <> 'none'

-- check: repeated_question
-- unit: turn
-- share: right answers hold no number beyond the question's
-- needs: scores golds
-- A verifier that computes what it reads takes `12 + 7` for 19, and pays the policy for writing the problem down again.
-- Only turns count whose gold answer is a number that the question does not name: the result can only stand in an
-- answer that holds another number, or says it in words.
select trajectory_id, data_set,
    turn_name(turn) || ': ''' || left(given, 60) || ''' was judged correct for ' || solutions[1],
    list_has_all(asked, said)
from (
    select t.trajectory_id, t.data_set, t.turn, t.given, p.solutions,
        regexp_extract_all(regexp_replace(t.given, '(\d),(\d\d\d)', '\1\2', 'g'), '\d+(?:\.\d+)?') as said,
        regexp_extract_all(regexp_replace(p.prompt, '(\d),(\d\d\d)', '\1\2', 'g'), '\d+(?:\.\d+)?') as asked
    from turns t join (select row, prompt, solutions from trajectories) p using (row)
    where t.verdict = 'correct' and t.scorer = 'math-verify'
)
where list_bool_and([regexp_full_match(s, '-?\d+(?:\.\d+)?') and not list_contains(asked, ltrim(s, '-'))
    for s in solutions])

-- check: verdicts_disagree
-- unit: turn
-- needs: scores
-- Turns that environment and score judge differently, and turns judged unlike the same answer elsewhere. If an answer
-- was judged correct and wrong equally often, the turns that were judged correct are counted. Verdicts with other
-- names, which a custom environment may use, are not compared, and neither are those of scorers other than math-verify:
-- their rules need not be the environment's. What an environment says depends on what happened before: with the scorer
-- `environment` the same answer elsewhere is no other opinion.
select trajectory_id, data_set,
    turn_name(turn) || ': the environment said ' || environment_verdict || ', the score ' || verdict
from turns where environment_verdict in ('correct', 'wrong', 'unparsable')
and verdict in ('correct', 'wrong', 'unparsable') and scorer = 'math-verify'
and (environment_verdict = 'correct') <> (verdict = 'correct')
union all
select t.trajectory_id, t.data_set, turn_name(t.turn) || ': elsewhere this answer was judged the other way'
from turns t join (
    select problem_id, prompt, solutions, given, count(*) filter (verdict = 'correct') * 2 > count(*) as usual
    from turns join (select row, prompt, solutions from trajectories) using (row)
    where verdict in ('correct', 'wrong') and scorer <> 'environment' group by 1, 2, 3, 4
    having count(distinct verdict = 'correct') > 1
) b using (problem_id, given)
join (select row, prompt, solutions from trajectories) p on p.row = t.row
where p.prompt = b.prompt and p.solutions = b.solutions and t.scorer <> 'environment'
and t.verdict in ('correct', 'wrong') and (t.verdict = 'correct') <> b.usual
-- measured:
with found as (
    select count(*) as cases,
        count(*) filter (detail like '%: elsewhere this answer was judged the other way') as elsewhere
    from cases where check_name = 'verdicts_disagree'
)
select cases, turns,
    format('environment and score differ about {} of {:,} turns; {} were judged differently elsewhere',
        cases - elsewhere, turns, elsewhere)
from found, (select count(*) as turns from turns where verdict is not null)
