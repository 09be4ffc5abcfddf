-- Checks of the tokens of a row: mask, turns, versions and logprobs.

-- check: mask_and_spans
-- unit: trajectory
-- needs: tokens
-- says: in {found} of {of:,} rows mask and turns contradict each other
-- The mask says which tokens are trained on, the turns which were sampled.
select trajectory_id, data_set, case
    when not same then 'its token columns differ in length'
    when not inside then 'a turn lies outside of its tokens'
    else masked || ' tokens are in the mask, ' || spoken || ' in turns, ' || agreed || ' in both' end
from (
    select trajectory_id, data_set,
        len(token_ids) = len(action_mask) and len(token_ids) = len(logprobs)
            and len(token_ids) = len(versions) as same,
        coalesce(list_bool_and(list_transform(turns, lambda t:
            0 <= t."start" and t."start" <= t."end" and t."end" <= len(token_ids))), true) as inside,
        coalesce(list_sum(action_mask::tinyint[]), 0) as masked,
        coalesce(list_sum(list_transform(turns, lambda t: t."end"::bigint - t."start")), 0) as spoken,
        coalesce(list_sum(list_transform(turns, lambda t:
            coalesce(list_sum(action_mask[t."start"::bigint + 1:t."end"]::tinyint[]), 0))), 0) as agreed
    from trajectories
) where not same or not inside or masked <> spoken or agreed <> spoken

-- check: bad_logprobs
-- unit: trajectory
-- needs: tokens logprobs
-- says: {found} of {of:,} rows have impossible logprobs
-- They make PPO's ratios infinite, or train on tokens that were never sampled.
select trajectory_id, data_set, case
    when impossible > 0 then impossible || ' logprobs are not finite, above 0 or below those of any sampled token'
    else 'tokens that were not sampled have logprobs' end
from (
    select trajectory_id, data_set,
        len(list_filter(logprobs, lambda p: not isfinite(p) or p > getvariable('highest_logprob')
            or p < getvariable('lowest_logprob'))) as impossible,
        len(list_filter(logprobs, lambda p: p <> 0)) as given,
        coalesce(list_sum(list_transform(turns, lambda t:
            len(list_filter(logprobs[t."start"::bigint + 1:t."end"], lambda p: p <> 0)))), 0) as sampled
    from trajectories
) where impossible > 0 or given <> sampled

-- check: falling_versions
-- unit: trajectory
-- needs: tokens versions
-- says: {found} of {of:,} rows have impossible policy versions
-- Within a turn the version of a token may rise (new weights were swapped in), but never fall.
select trajectory_id, data_set, case
    when unsorted then 'the policy version falls within a turn'
    when oldest < 0 then 'a sampled token has no policy version'
    when newest > newest_allowed then 'a token is of version ' || newest || ', newer than ' || newest_allowed
    else 'tokens that were not sampled have a policy version' end
from (
    select trajectory_id, data_set, d.iteration as newest_allowed,
        coalesce(list_bool_or(list_transform(spans, lambda v: v <> list_sort(v))), false) as unsorted,
        list_min(flatten(spans)) as oldest, list_max(flatten(spans)) as newest,
        len(flatten(spans)) as sampled, len(list_filter(versions, lambda v: v <> -1)) as given
    from (
        select trajectory_id, data_set, versions,
            list_transform(turns, lambda t: versions[t."start"::bigint + 1:t."end"]) as spans
        from trajectories
    ) join data_sets d using (data_set)
) where unsorted or oldest < 0 or newest > newest_allowed or sampled <> given

-- check: broken_prefix
-- unit: trajectory
-- needs: tokens
-- says: in {found} of {of:,} rows a turn does not continue the tokens before it
-- Turns must be in order, each in one sequence, and calls in turns that exist. A group has one prompt: if none of its
-- prompts has a majority, the agent varies prompts on purpose, and the group is not checked. An episode of several
-- conversations has the prompt of its group if one of them has it.
with positions as (
    select *, len(list_filter(starts, lambda b: b >= "start" and b < "end")) > 0 as crossed,
        turn > 0 and len(list_filter(starts, lambda b: b >= after and b <= "start")) = 0 as inside,
        follows not between -1 and turns - 1 or follows = turn as lost
    from (
        select t.trajectory_id, t.data_set, t.turn, t.follows, t."start", t."end", s.starts, s.turns,
            coalesce(lag(t."end") over (partition by t.row order by t.turn), 1) as after
        from turns t join (select row, sequence_starts as starts, len(turns) as turns from trajectories) s using (row)
    )
), begun as (
    select row, trajectory_id, data_set, problem_id, digest from beginnings where len(turns) > 0
), counted as (
    select data_set, problem_id, digest, count(distinct row) as here, any_value(rows) as rows
    from begun join (
        select data_set, problem_id, count(*) as rows from trajectories where len(turns) > 0 group by all
    ) using (data_set, problem_id) group by data_set, problem_id, digest
), usual as (
    select data_set, problem_id, digest from counted where 2 * here > rows and here < rows
)
select trajectory_id, data_set, turn_name(turn) || case
    when "start" < after then ' begins before the end of the tokens before it'
    when crossed then ' lies across two sequences'
    when lost then ' follows a turn that does not exist'
    else ' follows ' || turn_name(follows) || ' and not the one before it in its sequence' end
from positions where "start" < after or crossed or lost or (inside and follows <> turn - 1)
union all
select c.trajectory_id, c.data_set, 'it has a call in ' || turn_name(c.turn) || ', which does not exist'
from calls c left join turns t on t.row = c.row and t.turn = c.turn where t.row is null
union all
select any_value(b.trajectory_id), b.data_set, 'its prompt has other tokens than most of its group'
from begun b join usual u using (data_set, problem_id)
group by b.row, b.data_set having not bool_or(b.digest = u.digest)

-- check: text_differs
-- unit: turn
-- needs: tokens tokenizer
-- says: {found} of {of:,} turns have tokens that differ from their text
-- among: turns
-- The graded text is then not the trained one. Tokens are decoded without special tokens, like the rollout decodes
-- them. Five million take a second.
select trajectory_id, data_set,
    turn_name(turn) || ': its tokens say "' || left(decoded, 80) || '", its text "' || left(text, 80) || '"'
from (
    select *, decoded(data_set, ids) as decoded
    from (select trajectory_id, data_set, turn, t.text as text, ids from turn_tokens)
) where decoded <> text and without_tags(text) <> without_tags(unended(data_set, ids))

-- check: template_drift
-- unit: trajectory
-- needs: tokens tokenizer
-- The form of a prompt is its decoded text with a mark instead of the problem's text. The value is the number of forms
-- besides the most frequent one of a run, and of turns whose feedback is not in the tokens that follow. Each member of a
-- mixture has its own form, because it may have its own agent. The prompts of agents that begin several conversations in
-- an episode are not compared: the agent wrote them. Nor are those of runs with more than 8 forms and no majority,
-- because they vary their prompts on purpose.
-- before:
-- Kept for both checks that read it, whichever comes first.
create temp table if not exists kept_prompts as from distinct_prompts;
create or replace temp table prompt_forms as
    select p.* exclude (ids), p.run || coalesce('/' || m.name, '') as player,
        form(data_set, decoded_whole(data_set, ids), prompt) as form
    from kept_prompts p
    left join members m on m.run = p.run and m.name = split_part(p.problem_id, '/', 1);
create or replace temp table usual_forms as
    select * from (
        select player, form, min(number) as number, sum(episodes) as episodes,
            count(*) over of_player as forms, sum(sum(episodes)) over of_player as total
        from prompt_forms where form is not null group by player, form window of_player as (partition by player)
    )
    qualify row_number() over (partition by player order by episodes desc, number) = 1
        and (forms <= 8 or 2 * episodes > total);
create or replace temp table given_feedback as
    select run, feedback, digest, shows(data_set, decoded_whole(data_set, ids), feedback) as shown from (
        select run, feedback, digest, any_value(data_set) as data_set, any_value(ids) as ids
        from between_turns join (select data_set, run from data_sets) using (data_set)
        where trim(feedback) <> '' group by run, feedback, digest
    );
-- cases:
select t.trajectory_id, t.data_set, o.detail
from prompts_given t join data_sets d using (data_set) join (
    select run, prompt, digest, min(difference(p.form, u.form)) as detail
    from prompt_forms p join usual_forms u using (player) where p.form <> u.form group by all
) o on o.run = d.run and o.prompt = t.prompt and o.digest = t.digest
-- also turn:
-- Turns whose feedback none of the turns that follow them was given: branches are given other texts.
select any_value(p.trajectory_id), p.data_set,
    'the tokens after ' || turn_name(p.turn) || ' do not contain its feedback: "' || left(p.feedback, 80) || '"'
from between_turns p join data_sets d using (data_set)
join given_feedback f on f.run = d.run and f.feedback = p.feedback and f.digest = p.digest
group by p.row, p.data_set, p.turn, p.feedback having not bool_or(f.shown)
-- measured:
select beyond + turns, prompts, format(
    '{} forms of the prompt besides the usual one, in {:,} trajectories; {:,} distinct prompts were checked. '
    || 'The feedback after {:,} turns is not in the tokens that follow; {:,} distinct pieces were checked',
    beyond, cases_of('template_drift', 'trajectory'), prompts, turns, pieces)
from (
    select coalesce(sum(forms - 1), 0)::bigint as beyond, cases_of('template_drift', 'turn') as turns,
        (select count(*) from prompt_forms semi join usual_forms using (player)) as prompts,
        (select count(shown) from given_feedback) as pieces
    from usual_forms
)

-- check: loops
-- unit: turn
-- needs: tokens
-- share: turns of 32 tokens or more repeat themselves
-- The policy finds no end or has collapsed. Shorter turns have too few 4-grams.
select trajectory_id, data_set,
    turn_name(turn) || ': ' || round(100 * repeated)::integer || ' % of its 4-grams are repetitions', repeated > 0.5
from (
    select *, if(length >= 32, 1 - list_unique(grams) / len(grams), 0) as repeated from (
        select data_set, trajectory_id, turn, len(ids) as length, list_transform(
            range(1, len(ids) - 2), lambda i: hash(ids[i], ids[i + 1], ids[i + 2], ids[i + 3])
        ) as grams
        from turn_tokens where tokens >= 32
    )
)

-- check: staleness
-- unit: trajectory
-- needs: versions
-- The value is by how many versions the stalest row exceeds the `rollout.max_head_offpolicyness` of its data set.
-- Evaluations are not checked.
select trajectory_id, data_set, 'it is ' || behind || ' versions behind, ' || allowed || ' are allowed'
from staleness where behind > allowed
-- measured:
select greatest(0, coalesce(max(behind - allowed), 0)) as beyond, count(behind),
    format('the stalest of {:,} rows is {} versions behind, {} more than allowed',
        count(behind), coalesce(max(behind), 0), beyond)
from staleness
