-- Checks of the calls of tools.

-- check: tool_output_in_loss
-- unit: call
-- needs: calls tokens tokenizer
-- says: the outputs of {found:,} of {of:,} calls with outputs that were checked stand among the sampled tokens
-- among: answered
-- Calls whose output is in no tokens that a following turn was given, but stands alone among action tokens. The policy
-- is then trained to invent what tools say. This pipeline cannot write such rows. Other writers do if they take all
-- tokens after the prompt for one completion, make each message a turn, or forget the outputs in the mask. An output
-- that is nowhere in the tokens is the matter of `template_drift`. What the policy itself wrote in the form of an output
-- is no case: then the true one was given, too.
-- before:
create or replace temp table given_outputs as
    select data_set, output, digest, shows(data_set, decoded_whole(data_set, ids), output) as shown from (
        select data_set, output, digest, any_value(given) as ids from calls_given group by data_set, output, digest
    );
-- cases:
-- Searched are the action tokens from a call's turn to the end of the turn after it in the sequence, or of the sequence.
with shown as (
    select distinct row, turn, number from calls_given join given_outputs using (data_set, output, digest) where shown
), placed as (
    select c.*, token_ids, action_mask, turns, turns[c.turn + 1]."start"::bigint as begin, coalesce(
        list_min(list_filter(sequence_starts, lambda s: s > turns[c.turn + 1]."start")), len(token_ids)) as rest
    from (answered anti join shown using (row, turn, number)) c
    join (select row, token_ids, action_mask, turns, sequence_starts from trajectories) using (row)
), actions as (
    select trajectory_id, data_set, turn, number, name, output, list_where(
        token_ids[begin + 1 : until], list_transform(action_mask[begin + 1 : until], lambda m: coalesce(m, false))
    ) as ids
    from (select *, if(turns[turn + 2]."end" <= rest, turns[turn + 2]."end", rest) as until from placed)
    where begin >= 0
)
select trajectory_id, data_set, call_name(turn, number, name) || ': its output is among the sampled tokens: "'
    || left(output, 80) || '"'
from actions where has_alone(data_set, decoded_whole(data_set, ids), output)

-- check: leaked_by_tool
-- unit: call
-- needs: calls golds
-- The policy learns to fetch the answer, not to compute it. A calculator puts out answers rightly, so an output with
-- the gold answer alone is no case. It is one if
-- - it states the gold as an answer ("the answer is 19"), while nothing that the policy wrote before has the gold, or
--   speaks of an answer as code does that prints one; or
-- - the episode's first call, with the same arguments in 3 problems or more, gives most of these their own gold answers
--   and not that of another one: such an output follows from the problem, not from the arguments.
-- So a tool that returns the bare answer for arguments which differ from problem to problem is taken for a calculator.
-- before:
create or replace temp table leaking as
    with stating as (
        select *, unnest(stated_answers(output, solutions), recursive := true) from (
            select distinct problem_id, name, output, prompt, solutions
            from stating_calls join (select row, prompt, solutions from trajectories) using (row)
        )
    ), by_words as (
        select words, problem_id, bool_or(is_gold) as has_gold from stating group by words, problem_id
    ), usual as (
        select words from by_words group by words having avg(has_gold::integer) > 0.5
    ), asked as (
        select distinct name, arguments, c.problem_id, prompt, solutions, output
        from first_calls c join (select row, prompt, solutions from trajectories) using (row)
    ), others as (
        select name, arguments, solutions, coalesce(lead(solutions) over same, first(solutions) over same) as other
        from (select distinct name, arguments, solutions from asked)
        window same as (partition by name, arguments order by solutions)
    ), fetched as (
        select *, count(distinct problem_id) over same as problems,
            contains_gold(output, solutions) and not contains_gold(output, other)
                and not contains_gold(prompt || chr(10) || arguments, solutions) as is_own
        from asked join others using (name, arguments, solutions) window same as (partition by name, arguments)
    )
    select distinct 'stating' as kind, problem_id, name, output
    from stating semi join usual using (words) where is_gold and not contains_gold(prompt, solutions)
    union all
    select distinct 'fetching', problem_id, name, output from (
        select *, count(distinct problem_id) filter (is_own) over (partition by name, arguments) as own from fetched
    ) where is_own and own >= 3 and own > 0.5 * problems;
-- cases:
select trajectory_id, data_set,
    call_name(turn, number, name) || ' gives the gold answer away: "' || left(output, 80) || '"'
from stating_calls semi join (from leaking where kind = 'stating') using (problem_id, name, output)
union
select trajectory_id, data_set,
    call_name(turn, number, name) || ' gives the gold answer away: "' || left(output, 80) || '"'
from first_calls semi join (from leaking where kind = 'fetching') using (problem_id, name, output)
-- measured:
select found, calls, format(
    'the outputs of {:,} of {:,} calls give the gold answer away: they state it, or have it, although the same '
    || 'arguments gave other problems theirs', found, calls)
from (select cases_of('leaked_by_tool', 'call') as found, (select count(*) from calls where not is_left_out(data_set)) as calls)

-- check: unanswered_calls
-- unit: call
-- share: calls have no output
-- needs: calls
-- The agent gave up, or lost what the tool said.
select trajectory_id, data_set, call_name(turn, number, name) || ' has no output', status = 'unanswered' from calls

-- check: unparsable_calls
-- unit: call
-- share: calls cannot be read
-- needs: calls
-- The policy does not know the format, or the renderer does not.
select trajectory_id, data_set, call_name(turn, number, name) || ' cannot be read: ' || left(arguments, 80),
    status = 'unparsable'
from calls

-- check: repeated_calls
-- unit: trajectory
-- share: episodes with calls have the same call 3 times or more
-- needs: calls
-- The policy does not read what the tool says. Calls are the same if tool and arguments are, whatever the outputs.
-- Equal calls in branches that do not follow each other are no repetition: several completions may be sampled after one
-- turn. So the query climbs up from each turn with a call that its episode has often enough. Of an episode the most
-- frequent call is a case.
with recursive often as (
    select row, name, arguments from calls group by all having count(*) >= 3
), same as (
    select row, turn, name, arguments, count(*) as count
    from calls join often using (row, name, arguments) group by row, turn, name, arguments
), climbing as (
    select distinct row, turn, turn as above from same
    union
    select c.row, c.turn, t.follows from climbing c join turns t on t.row = c.row and t.turn = c.above
    where t.follows >= 0
), repeated as (
    select row, name, arguments, times from (
        select s.row, s.name, s.arguments, sum(b.count)::integer as times
        from same s join climbing c on c.row = s.row and c.turn = s.turn
        join same b on b.row = s.row and b.turn = c.above and b.name = s.name and b.arguments = s.arguments
        group by s.row, s.turn, s.name, s.arguments
    ) where times >= 3
    qualify row_number() over (partition by row order by times desc, name, arguments) = 1
)
select trajectory_id, data_set,
    'it calls ' || left(name, 40) || ' ' || times || ' times with the arguments ' || left(arguments, 80),
    times is not null
from (select row, trajectory_id, data_set from episodes where calls > 0) left join repeated using (row)

-- check: tool_errors
-- unit: call
-- needs: calls
-- The tool is broken, or its description misleads the policy. The value is the highest share of failed calls, among
-- those with an output, of a tool in a data set. Tools with fewer than 20 such calls do not count, since their shares
-- say little.
select trajectory_id, data_set, call_name(turn, number, name) || ' failed: ' || left(output, 80)
from calls where status = 'failed'
-- measured:
with by_tool as (
    select version, name, count(*) filter (status = 'failed') as failed, count(*) as ran
    from calls join data_sets using (data_set) where status in ('answered', 'failed') group by all
), total as (
    select coalesce(sum(failed), 0)::bigint as failed, coalesce(sum(ran), 0)::bigint as ran from by_tool
), worst as (
    select *, failed / ran as share from by_tool where ran >= 20 order by share desc, version, name limit 1
)
select coalesce(w.share, 0), t.ran,
    format('{:,} of {:,} calls failed ({:.1f}%)', t.failed, t.ran, if(t.ran > 0, 100 * t.failed / t.ran, 0)) || case
        when w.share is null then '; no tool has 20 calls in a data set, fewer raise no alarm'
        when w.failed = 0 then ''
        else format('; the highest share, {:.1f}% of {:,} calls, is that of {} in {}',
            100 * w.share, w.ran, left(w.name, 40), w.version) end,
    1, coalesce(w.ran, 0)
from total t left join worst w on true
