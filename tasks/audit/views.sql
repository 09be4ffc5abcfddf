-- Queries that several checks, the numbers of the report or the reader share, on the tables of `tasks/tables/tables.sql`
-- and on `cases`, which `database.py` makes: one row for each case of a check: check_name, unit, id, data_set (version),
-- detail.

-- Whether a data set, or each of several, lacks what the present check needs.
create macro is_left_out(data_set) as coalesce(list_contains(getvariable('left_out'), data_set), false);
create macro all_left_out(data_sets) as list_has_all(getvariable('left_out'), data_sets);
-- The name of a turn and of a call in the detail of a case.
create macro turn_name(turn) as 'turn ' || (turn + 1);
create macro call_name(turn, number, name) as
    turn_name(turn) || ', call ' || (number + 1) || ' of ' || if(name = '', 'no tool', left(name, 40));

-- The number of the cases of a check that point at things of one kind.
create macro cases_of(name, kind) as (select count(*) from cases where check_name = name and unit = kind);

-- One row for each graded turn that comes after another one in its conversation: row, data_set, trajectory_id, turn,
-- success, before (the graded turn before it), was (the success of that). The query climbs from each graded turn up its
-- branch, past calls of tools, to the graded turn before it.
create table revisions as
    with recursive climbing as (
        select row, turn, follows as before from turns where answer is not null and follows >= 0
        union
        select c.row, c.turn, t.follows from climbing c join turns t on t.row = c.row and t.turn = c.before
        where t.answer is null and t.follows >= 0
    )
    select t.row, t.data_set, t.trajectory_id, t.turn, t.success, c.before, b.success as was
    from climbing c join turns t on t.row = c.row and t.turn = c.turn
    join turns b on b.row = c.row and b.turn = c.before where b.answer is not null;

-- One row for each distinct problem: problem_id, prompt, solutions, data_sets (numbers), math_verify (whether
-- that scores it).
create table problems as
    select problem_id, prompt, solutions, list(distinct data_set) as data_sets,
        bool_or(coalesce(scorers[source], scorers['default']) = 'math-verify') as math_verify
    from trajectories join (select data_set, scorers from data_sets) using (data_set) group by 1, 2, 3;

-- One row for each text: unit, id, data_set, name (in the detail of a case), text.
create view texts as
    select 'problem' as unit, problem_id as id, null::integer as data_set, 'the prompt' as name, prompt as text
    from problems
    union all select 'turn', trajectory_id, data_set, turn_name(turn), text from turns
    union all select 'turn', trajectory_id, data_set, 'the feedback after ' || turn_name(turn), feedback from turns
        where feedback <> '';

-- The cases among these, and the columns of `Measured`, for the checks of `texts.sql`, which make the table `matching`: a
-- text, and what it has (`kind`).
create temp table matching (text varchar, kind varchar);
create temp macro cases_in_texts(of_unit) as table
    select id, data_set, name || ' has ' || kind from texts join matching using (text) where kind <> '' and unit = of_unit;
create temp macro measured_in_texts(name, what) as table
    select found, total, format('{:,} of {:,} prompts, turns and pieces of feedback have ', found, total) || what
    from (
        select cases_of(name, 'turn') + cases_of(name, 'problem') as found, (
            select count(*) from texts where not is_left_out(data_set)) as total
    );

-- One row for each turn with feedback: row, turn, problem_id, text, and the feedback without the outputs of calls.
-- These are taken out once each, the longest first.
create view told as
    select row, turn, problem_id, text, list_reduce(
        coalesce(outputs, []),
        lambda said, output: if(contains(said, output),
            left(said, instr(said, output) - 1) || substr(said, instr(said, output) + length(output)), said),
        feedback
    ) as feedback
    from turns left join (
        select row, turn, list(output order by length(output) desc) as outputs
        from calls where output <> '' group by row, turn
    ) using (row, turn) where feedback <> '';

-- Feedback that contains a gold answer as a substring, and the number of problems with the same feedback.
create temp view feedback_with_gold as
    select problem_id, prompt, solutions, feedback, problems from (
        select *, count(*) over (partition by feedback) as problems from (
            select distinct s.problem_id, prompt, solutions, feedback
            from told s join (select row, prompt, solutions from trajectories) using (row) where feedback <> ''
        )
    ) where len(list_filter(
        solutions, lambda gold: contains(replace(feedback, ',', ''), replace(trim(gold), ',', ''))
    )) > 0;

-- Rows that name another policy or problem set than the parents of their data set: id, data_set, detail.
create temp view other_parents as
    select trajectory_id, data_set, case when other_policy
        then 'names the policy ' || t.policy || ', its data set was made from ' || d.policy
        else 'names the problem set ' || t.problem_set || ', its data set was made from ' || d.problem_set end
    from (
        select t.*, len(policies) > 0 and not list_contains(policies, t.policy) as other_policy,
            d.problem_set not in ('', t.problem_set) as other_set
        from (select trajectory_id, data_set, policy, problem_set from trajectories) t
        join data_sets d using (data_set)
    ) t join data_sets d using (data_set) where other_policy or other_set;

-- Data sets with 100 or more first turns in groups with right and wrong answers: how many, and the correlation of their
-- length with their success, both minus their group's mean.
create view correlations as
    select version, data_set, count(*) as turns, corr(length, success) as correlation from (
        select data_set, "end" - "start" - avg("end" - "start") over grouped as length,
            success - avg(success) over grouped as success, stddev_pop(success) over grouped as spread
        from first_turns where success is not null window grouped as (partition by data_set, problem_id)
    ) join data_sets using (data_set)
    where spread > 0 group by 1, 2 having count(*) >= 100 and isfinite(corr(length, success));

-- Each data set after another one of its run: data_set, version, before and after (success rates of first turns), errors
-- (the step in standard errors; null for steps below 0.1, or if a data set has one problem). The error is that of means
-- over problems, because the episodes of one problem are not independent; a least variance keeps it above 0.
create view success_steps as
    with success as (
        select data_set, avg(mean) as mean, count(*) as problems,
            greatest(coalesce(var_samp(mean), 0), 0.25 / count(*)) / count(*) as variance
        from (
            select data_set, problem_id, avg(success) as mean from first_turns where success is not null group by 1, 2
        ) group by data_set
    ), of_runs as (select * from success join data_sets using (data_set) where not evaluation)
    select a.data_set, a.version, b.mean as before, a.mean as after,
        if(abs(a.mean - b.mean) >= 0.1 and least(a.problems, b.problems) > 1,
            abs(a.mean - b.mean) / sqrt(a.variance + b.variance), null) as errors
    from of_runs a join of_runs b on a.run = b.run and a.iteration = b.iteration + 1;

-- Calls whose output has a word that introduces an answer, which the policy did not write up to the call, nor the gold.
create temp view stating_calls as
    select c.* exclude (word) from (
        select *, regexp_extract(lower(output), 'answer|solution|boxed|####') as word from calls
    ) c join (select row, solutions from trajectories) s using (row)
    where word <> '' and not exists (
        select 1 from turns t where t.row = c.row and t.turn <= c.turn and (
            contains(lower(t.text), c.word) or len(list_filter(s.solutions, lambda gold: contains(t.text, gold))) > 0)
    );

-- First calls of episodes, with arguments that occur in 3 problems or more, and gave 3 outputs or more.
create view first_calls as
    select * from (
        select * from calls qualify row_number() over (partition by row order by turn, number) = 1
    ) join (
        select name, arguments from calls group by all
        having count(distinct problem_id) >= 3 and count(distinct output) >= 3
    ) using (name, arguments) where output <> '';

-- One row for each turn `t`, with its number, its sampled token ids, and how many these should be (`tokens`).
create temp view turn_tokens as
    select *, token_ids[t."start"::bigint + 1 : t."end"] as ids, t."end"::bigint - t."start" as tokens from (
        select data_set, row, trajectory_id, token_ids, unnest(turns) as t, generate_subscripts(turns, 1) - 1 as turn
        from trajectories
    );

-- Each trajectory with the ids and the digest of the tokens before its first turn, where they begin and end, and the
-- number of its conversations; several rows if an agent began several, for helpers or to shorten one. A turn that
-- follows none begins a conversation; in rows without `follows` that is the first turn. Turns are numbered from 1 on.
create temp view beginnings as
    select *, token_ids[begin + 1 : until] as ids, (hash(token_ids[begin + 1 : until]) >> 1)::bigint as digest from (
        select *, coalesce(list_max(list_filter(sequence_starts, lambda s: s <= until)), 0) as begin from (
            select *, coalesce(turns[first]."start"::bigint, len(token_ids)) as until from (
                select *, unnest(if(len(firsts) = 0, [0], firsts)) as first, len(firsts) as conversations
                from (
                    select *,
                        list_filter(range(1, len(turns) + 1), lambda k: coalesce(follows[k], k - 2) = -1) as firsts
                    from trajectories
                )
            )
        )
    );

-- For each trajectory the ids and the digest of the tokens before its first turn. Rows without tokens are left out,
-- because their episodes never began; those with several conversations, too, because their prompts are the agent's; and
-- those whose turns do not fit their mask, here and below, because the check `mask_and_spans` reports them.
create temp view prompts_given as
    select data_set, row, trajectory_id, problem_id, prompt, solutions, ids, digest from beginnings
    where conversations < 2 and len(ids) > 0 and coalesce(action_mask[until + 1], true)
        and not coalesce(list_bool_or(action_mask[begin + 1 : until]), false);

-- Each distinct prompt of a problem in a run: number, run, data_set (the first), problem_id, prompt, solutions (the
-- problem's), digest, ids (token ids before the first turn), episodes (with this prompt).
create temp view distinct_prompts as
    select row_number() over (order by data_set, problem_id, prompt, digest) as number, * from (
        select run, min(data_set) as data_set, problem_id, prompt, solutions, digest, arg_min(ids, row) as ids,
            count(*) as episodes
        from prompts_given p join (select data_set, run from data_sets) using (data_set)
        group by run, problem_id, prompt, solutions, digest
    );

-- A sixteenth of the trajectories with several sequences, whose pieces are long and all different, and all others, if
-- their masks have the right length.
create temp view compared as
    select * from trajectories
    where len(action_mask) = len(token_ids) and (len(sequence_starts) < 2 or hash(row) % 16 = 0);

-- For each turn of these and each that follows it: the feedback, the ids and digest of the tokens between them, and the
-- ids among these that are no action tokens (`given`). Between two sequences these are the tokens before the second
-- turn.
create temp view between_turns as
    select data_set, row, trajectory_id, parent - 1 as turn, turns[parent].feedback as feedback,
        ids, (hash(ids) >> 1)::bigint as digest,
        list_where(ids, list_transform(masked, lambda m: coalesce(not m, true))) as given
    from (
        select *, token_ids[begin + 1 : turns[child]."start"] as ids,
            action_mask[begin + 1 : turns[child]."start"] as masked
        from (
            select *, if(turns[parent]."end" between sequence and turns[child]."start", turns[parent]."end", sequence)
                as begin
            from (
                select *, coalesce(follows[child], child - 2) + 1 as parent,
                    coalesce(list_max(list_filter(sequence_starts, lambda s: s <= turns[child]."start")), 0) as sequence
                from (select *, unnest(range(1, len(turns) + 1)) as child from compared)
            )
        ) where parent > 0
            and (turns[parent]."end" <= turns[child]."start" or turns[parent]."start" >= turns[child]."end")
            and action_mask[turns[parent]."end"] and action_mask[turns[child]."start"::bigint + 1]
    );

-- Calls with an output that is checked.
create temp view answered as
    select * from calls where regexp_matches(output, '\S') and row in (select row from compared);

-- Each of these with the ids that a following turn was given between both turns (`given`), and their digest.
create temp view calls_given as
    select c.data_set, c.row, c.turn, c.number, c.output, b.given, (hash(b.given) >> 1)::bigint as digest
    from answered c join between_turns b on b.row = c.row and b.turn = c.turn;

-- The numbers of each data set: the columns of `tasks.audit.results.SetNumbers`, and data_set. Where all rewards are
-- successes without parts, there is nothing to say about them.
create temp view set_numbers as
    with episode_numbers as (
        select data_set, count(*) as trajectories, sum(turns)::bigint as turns, avg(best) as any_turn,
            avg((status = 'truncated')::integer) as truncated, avg((status = 'failed')::integer) as failed,
            if((select max(calls) from episodes) > 0, avg((calls > 0)::integer), null) as with_calls,
            if((select max(branches) from episodes) > 0, avg((branches > 0)::integer), null) as branched
        from episodes group by data_set
    ), turn_numbers as (
        select data_set, nullif(avg("end" - "start"), 0) as answer_tokens,  -- 0: imported without tokens
            avg((verdict = 'unparsable')::integer) filter (verdict <> 'none') as unparsable
        from turns group by data_set
    ), revision_numbers as (
        select data_set, avg(success) filter (was = 0) as fixed, avg(1 - success) filter (was > 0) as broken
        from revisions group by data_set
    ), group_numbers as (
        select data_set, avg(same::integer) as zero_variance from played_groups group by data_set
    ), token_numbers as (
        select data_set, coalesce(sum(count), 0)::bigint as tokens, sum(stale) / nullif(sum(count), 0) as staleness,
            sum(logprob) filter (isfinite(logprob)) / nullif(sum(count) filter (isfinite(logprob)), 0) as logprob
        from (
            select data_set, len(known) as count, list_sum(logprobs) as logprob,
                len(known) * d.iteration - coalesce(list_sum(known), 0) as stale
            from (
                select data_set, logprobs, list_filter(versions, lambda v: v >= 0) as known from trajectories
            ) join data_sets d using (data_set)
        ) group by data_set
    ), success_numbers as (
        select data_set, list(rate order by answer) as success from (
            select data_set, answer, avg(success) as rate from turns where answer is not null group by data_set, answer
        ) group by data_set
    ), reward_numbers as (
        select data_set, map_from_entries(list((name, mean) order by name desc)) as rewards from (
            select data_set, unnest(['return', 'reward']) as name, unnest([earned, reward]) as mean from (
                select data_set, avg(coalesce(scored_reward, reward)) as reward from turns where answer is not null
                group by data_set having bool_or(scored_reward <> success) or bool_or(cardinality(parts) > 0)
            ) join (select data_set, avg(earned) as earned from episodes group by data_set) using (data_set)
            union all
            select data_set, 'part ' || part.key, avg(part.value) from (
                select data_set, unnest(map_entries(parts)) as part from turns
            ) group by data_set, part.key
        ) group by data_set
    ), call_numbers as (
        select data_set, map_from_entries(list((name, statuses) order by name)) as calls from (
            select data_set, name, map_from_entries(list((status, count) order by status)) as statuses from (
                select data_set, name, status, count(*) as count from calls group by all
            ) group by data_set, name
        ) group by data_set
    )
    select data_set, version, run, iteration, trajectories, turns, coalesce(tokens, 0) as tokens,
        coalesce(success, []) as success, any_turn, fixed, broken, answer_tokens, truncated, failed, unparsable,
        zero_variance, staleness, logprob, coalesce(rewards, map {}) as rewards, coalesce(calls, map {}) as calls,
        with_calls, branched
    from episode_numbers join data_sets using (data_set) left join turn_numbers using (data_set)
    left join revision_numbers using (data_set) left join group_numbers using (data_set)
    left join token_numbers using (data_set) left join success_numbers using (data_set)
    left join reward_numbers using (data_set) left join call_numbers using (data_set);

-- The trajectories with these row numbers, without tokens: row, trajectory_id, data_set (version), problem_id, sample,
-- status, reason, policy_version, prompt, solutions, turns. A turn has its number, text, given (what the environment got
-- as the answer), tokens (number), finish_reason, follows (the turn that it follows; -1: none), graded (false: it answers
-- nothing), earned (the reward of the score stage, or that of the environment without a score), parts (of the reward),
-- calls (name, arguments, output, status), feedback (of the environment), beyond_calls (the feedback; empty if it is no
-- more than the outputs of the calls); environment_verdict and reward of the environment; verdict, extracted and
-- verdict_reason of the score stage, null without a score.
create temp macro conversations(chosen) as table
    with called as (
        select row, turn, list(struct_pack(name, arguments, output, status) order by number) as calls,
            string_agg(output, chr(10) order by number) filter (status in ('answered', 'failed')) as outputs
        from calls where list_contains(chosen, row) group by row, turn
    ), spoken as (
        select row, list(struct_pack(
            turn, text, given, tokens := "end" - "start", finish_reason, follows, graded := answer is not null,
            earned := coalesce(scored_reward, reward), parts, calls := coalesce(c.calls, []), feedback,
            beyond_calls := if(feedback = outputs, '', feedback), environment_verdict, reward, verdict, extracted,
            verdict_reason
        ) order by turn) as turns
        from turns left join called c using (row, turn) where list_contains(chosen, row) group by row
    )
    select row, trajectory_id, version as data_set, problem_id, sample, status, reason, policy_version, prompt,
        solutions, coalesce(turns, []) as turns
    from (
        select row, trajectory_id, data_set, problem_id, sample, status, reason, policy_version, prompt, solutions
        from trajectories where list_contains(chosen, row)
    ) join (select data_set, version from data_sets) using (data_set) left join spoken using (row);

-- The values of each histogram of the report: title, unit, v.
create temp view histogram_values as
    select 1 as number, 'Length of a turn' as title, 'tokens' as unit, ("end" - "start")::double as v
    from turns where "end" > "start"
    union all
    select 2, 'Success of a group, first turn', 'share of its episodes', avg(success)
    from first_turns where success is not null group by data_set, problem_id
    union all
    select 3, 'Reward of a turn', 'reward, if not all are 0 or 1', coalesce(scored_reward, reward)
    from turns where answer is not null and exists (
        select * from turns where answer is not null and coalesce(scored_reward, reward) not in (0, 1))
    union all
    select 4, 'Staleness of an episode''s oldest token', 'versions', behind from staleness;

-- Each data set with the policy and the sampling of most of its trajectories, in the order of iterations: data_set,
-- version, policy, policy_version, sampling (JSON), temperature, whole (whether every token could be sampled: neither
-- `top_p`, `top_k` nor a JSON schema left one out).
create temp view played_sets as
    select data_set, version, policy, policy_version, sampling,
        -- Engines return logprobs of temperature 1 after greedy sampling.
        coalesce(nullif(try_cast(known ->> '$.temperature' as double), 0), 1) as temperature,
        coalesce(try_cast(known ->> '$.top_p' as double), 1) = 1
            and coalesce(try_cast(known ->> '$.top_k' as double), 0) <= 0
            and coalesce(known ->> '$.json_schema', '0') = '0' and json_valid(sampling) as whole
    from (
        select *, if(json_valid(sampling), sampling, '{}')::json as known from (
            select data_set, policy, policy_version, sampling, count(*) as rows from trajectories group by all
        ) qualify row_number() over (partition by data_set order by rows desc, policy, sampling) = 1
    ) join (select data_set, version, run, evaluation, iteration from data_sets) using (data_set)
    order by run, evaluation, iteration, data_set;

-- A sample of the turns on which math-verify gave a verdict: trajectory_id, version, turn, given, solutions.
create temp macro judged_turns(of_verdict, most) as table
    select trajectory_id, version, turn, given, solutions
    from (
        select row, data_set, turn, given, trajectory_id from turns
        where verdict = of_verdict and scorer = 'math-verify' and not is_left_out(data_set)
        order by hash(row, turn), row, turn limit most
    ) join (select row, solutions from trajectories) using (row)
    join (select data_set, version from data_sets) using (data_set) order by row, turn;

-- The gold answers that math-verify compares, of each problem: problem_id, gold; empty for a problem without any.
create temp view distinct_golds as
    select problem_id, unnest(if(len(solutions) = 0, [''], solutions)) as gold from problems
    where math_verify and not all_left_out(data_sets) order by all;

-- The problem of each trajectory that is no evaluation's.
create temp view training_rows as
    select d.run, problem_id, prompt, solutions, metadata
    from trajectories join (select data_set, run, evaluation from data_sets) d using (data_set) where not evaluation;

-- Some rows of a data set by one policy with one sampling, which have whole token columns and tokens of the policy's
-- version: trajectory_id, token_ids, action_mask, sequence_starts, experts, logprobs, versions.
create temp macro recomputed_rows(of_set, of_policy, of_sampling, of_version, most) as table
    select trajectory_id, token_ids, action_mask, sequence_starts, experts, logprobs, versions from trajectories
    where data_set = of_set and policy = of_policy and sampling = of_sampling and list_contains(versions, of_version)
        and len(logprobs) = len(token_ids) and len(versions) = len(token_ids) and len(action_mask) = len(token_ids)
    order by hash(trajectory_id), row limit most;
