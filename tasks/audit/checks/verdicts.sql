-- Checks of verdicts that need no second opinion.

-- check: unparsable
-- title: Turns without an answer
-- unit: turn
-- share: turns have no answer
-- needs: scores
-- The policy ignores the format, or the verifier does not know it.
select trajectory_id, data_set, turn_name(turn) || ' has no answer', verdict = 'unparsable'
from turns where verdict <> 'none'

-- check: verdict_failures
-- title: Verdicts that failed
-- unit: turn
-- share: verdicts are timeouts or errors
-- needs: scores
-- These answers earn no reward, even if right.
select trajectory_id, data_set, turn_name(turn) || ': ' || verdict || ' ' || verdict_reason,
    verdict in ('timeout', 'error')
from turns where verdict <> 'none'

-- check: repeated_question
-- title: Right answers that repeat the question
-- unit: turn
-- share: right answers hold no number beyond the question's
-- needs: scores
-- A verifier that computes what it reads takes `12 + 7` for 19, and pays the policy for writing the problem down again.
-- Only turns count whose gold answer is a number that the question does not name: the result can only stand in an answer
-- that holds another number, or says it in words.
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
