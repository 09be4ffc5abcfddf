-- Checks of the calls of tools.

-- check: unanswered_calls
-- title: Calls without an output
-- unit: call
-- share: calls have no output
-- needs: calls
-- The agent gave up, or lost what the tool said.
select trajectory_id, data_set, call_name(turn, number, name) || ' has no output', status = 'unanswered' from calls

-- check: unparsable_calls
-- title: Calls that cannot be read
-- unit: call
-- share: calls cannot be read
-- needs: calls
-- The policy does not know the format, or the renderer does not.
select trajectory_id, data_set, call_name(turn, number, name) || ' cannot be read: ' || left(arguments, 80),
    status = 'unparsable'
from calls

-- check: repeated_calls
-- title: The same call again and again
-- unit: trajectory
-- share: episodes with calls have the same call 3 times or more
-- needs: calls
-- The policy does not read what the tool says. Calls are the same if tool and arguments are, whatever the outputs. Equal
-- calls in branches that do not follow each other are no repetition: several completions may be sampled after one turn.
-- So the query climbs up from each turn with a call that its episode has often enough. Of an episode the most frequent
-- call is a case.
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
