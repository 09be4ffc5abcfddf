-- Checks of the calls of tools.

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
