-- Stored data sets as tables of DuckDB, besides those that `db.py` makes (the words are in `words.sql`):
--
-- data_sets      data_set (number), version, run, iteration, evaluation, allowed (staleness), policies (those among its
--                parents), policy (the first of them), problem_set, tries (`score.tries`), scorers (a map from sources of
--                problems to scorers)
-- trajectories   a view of the Parquet files: all columns of `storage.records.Trajectory`, data_set, row
-- scores         a view of the Parquet files: all columns of `storage.records.Score`, data_set
--
-- `row` is a number that is unique to each trajectory row, even if two rows have the same id.

-- One row for each call of a tool: row, data_set, trajectory_id, problem_id, turn, number (among the calls of its turn,
-- from 0 on), id, name, arguments, output, status.
create table calls as
    select row, data_set, trajectory_id, problem_id, call.turn,
        (row_number() over (partition by row, call.turn order by position) - 1)::integer as number,
        call.id, call.name, call.arguments, call.output, call.status
    from (
        select row, data_set, trajectory_id, problem_id, unnest(calls) as call,
            generate_subscripts(calls, 1) as position
        from trajectories
    );

-- One row for each turn: row, data_set, run, iteration, trajectory_id, problem_id, sample, turn, "last", "start",
-- "end", text, given (what the environment got as the answer), environment_verdict, reward, finish_reason, feedback,
-- seed; follows (the turn that it follows, -1: none); calls (number); answer (its number among the graded turns, null
-- for calls of tools and others that answer nothing); parts (a map of its reward's parts, those of the score if it has
-- any); scorer (its name in `score.type`); from its score, null without one: verdict, success (null, too, if it answers
-- nothing), extracted, solution, verdict_reason, scored_reward. If a turn has several scores, the first is used; the
-- check `orphan_scores` reports the others.
create table turns as
    with spoken as (
        select row, data_set, run, iteration, trajectory_id, problem_id, sample, unnest(turns) as t,
            generate_subscripts(turns, 1) - 1 as turn, len(turns) as turns, ungraded, reward_parts, answers,
            follows, coalesce(scorers[source], scorers['default']) as scorer
        from trajectories join (select data_set, scorers from data_sets) using (data_set)
    ), scored as (
        select distinct on (data_set, trajectory_id, turn) data_set, trajectory_id, turn, verdict, success, extracted,
            solution, reason, coalesce(reward, success) as scored_reward, parts
        from scores order by row
    ), joined as (
        select s.*, scored.* exclude (data_set, trajectory_id, turn),
            coalesce(verdict = 'none', list_contains(ungraded, s.turn) or t.verdict = 'none', false) as silent
        from spoken s left join scored using (data_set, trajectory_id, turn)
    )
    select s.row, s.data_set, s.run, s.iteration, s.trajectory_id, s.problem_id, s.sample, s.turn::integer as turn,
        s.turn = s.turns - 1 as "last", s.t."start"::bigint as "start", s.t."end"::bigint as "end", s.t.text as text,
        coalesce(s.answers[s.turn + 1], s.t.text) as given,
        s.t.verdict as environment_verdict, s.t.reward as reward, s.t.finish_reason as finish_reason,
        s.t.feedback as feedback, s.t.seed as seed,
        coalesce(s.follows[s.turn + 1], s.turn - 1)::integer as follows, coalesce(c.calls, 0)::integer as calls,
        if(silent, null, row_number() over (partition by s.row, silent order by s.turn) - 1)::integer as answer,
        if(cardinality(parts) > 0, parts, reward_parts[s.turn + 1]) as parts, scorer, verdict,
        if(silent, null, success) as success, extracted, solution, s.reason as verdict_reason, scored_reward
    from joined s left join (select row, turn, count(*) as calls from calls group by 1, 2) c using (row, turn);

-- What each episode earned, in the units of its scorer (a right answer is 1, a wrong one 0): row, earned. It is
-- `tasks.train.samples.Sample.earned` without discount and penalties: the sum of the rewards of its graded turns (from
-- the score, or from the environment without one) or, where only that is paid, of its last answer; and where the policy
-- ended it, the least reward for each missing answer, by the rules of `tasks.train.returns` and `samples.bounded`. Null
-- if nothing was graded and nothing is missing.
create macro is_verdicts(scorer) as scorer in ('math-verify', 'code');
create table earnings as
    with placed as materialized (
        -- position: of the turn among the completions that the agent got, or would have got next; moment: how many it
        -- had when the turn's reward was given.
        select t.row, t.data_set, t.problem_id, t.scorer, t.success, coalesce(t.scored_reward, t.reward) as reward,
            coalesce(if(r.received[t.turn + 1] >= 0, r.received[t.turn + 1], r.asked[t.turn + 1]), t.turn) as position,
            coalesce(
                nullif(r.paid[t.turn + 1], 0), nullif(len(list_filter(r.received, lambda k: k >= 0)), 0), t.turn + 1
            ) as moment,
            t.answer is not null and coalesce(r.received[t.turn + 1], 0) >= 0 as graded,
            coalesce(d.tries = 'last', not is_verdicts(t.scorer) and t.scorer <> 'environment') as last,
            coalesce(r.unplayed_turns, -1) as unplayed, coalesce(r.fault, '') as fault,
            -- Rows that were imported without tokens count, too.
            is_trainable(r.status, fault, 1, true)
                and not bool_or(has_failed(t.verdict, t.verdict_reason)) over (partition by t.row) as trained,
            trained and misses_answers(unplayed, r.reason) and (r.status = 'truncated' or fault = 'policy')
                as unfinished
        from turns t join trajectories r using (row) join data_sets d on d.data_set = t.data_set
    ), lowest as (
        select data_set, scorer, if(is_verdicts(scorer), 0, least(0, min(reward) filter (graded and trained))) as lowest
        from placed group by data_set, scorer
    ), paid as materialized (
        select *, unfinished and not ((last or is_verdicts(scorer))
                and coalesce(bool_or(graded and success > 0.5) over of_row, false)) as ended,
            graded and not (last and (ended or moment < max(if(graded, moment, 0)) over of_row)) as pays
        from placed join lowest using (data_set, scorer) window of_row as (partition by row)
    ), summed as (
        select row, data_set, problem_id, trained, ended, ended and unplayed <= 0 as uncounted,
            if(ended, if(unplayed > 0 and not last, unplayed, 1) * lowest, 0) as missing,
            coalesce(sum(reward) filter (pays), 0) as rewards, rewards + missing as total,
            bool_or(graded) as graded, max(position) as latest
        from paid group by row, data_set, problem_id, trained, ended, unplayed, last, lowest
    ), groups as (
        select data_set, problem_id, min(total) as worst from summed where trained
        group by data_set, problem_id having bool_or(uncounted)
    ), ahead as (
        select data_set, problem_id, p.row, p.position, any_value(s.missing) + coalesce(sum(l.reward), 0) as earned
        from (select distinct data_set, problem_id, row, position from paid semi join groups using (data_set, problem_id)) p
        join summed s using (data_set, problem_id, row)
        left join paid l on l.row = p.row and l.pays and l.moment > p.position where s.trained
        group by data_set, problem_id, p.row, p.position
    ), floors as (
        select data_set, problem_id, position, min(earned) as floor from ahead group by data_set, problem_id, position
    )
    select s.row, if(s.graded or s.ended, s.total + if(s.uncounted, least(worst - s.total, floor - a.earned), 0), null)
        as earned
    from summed s left join groups using (data_set, problem_id)
    left join floors f on (f.data_set, f.problem_id, f.position) = (s.data_set, s.problem_id, s.latest)
    left join ahead a on a.row = s.row and a.position = s.latest;

-- The first graded turns of all episodes.
create view first_turns as from turns where answer = 0;

-- One row for each trajectory, without tokens: row, data_set, run, iteration, trajectory_id, problem_id, sample,
-- status, reason, turns, sampled (tokens), policy_version, calls (number), branches (number of turns that follow the
-- same turn as an earlier one, or begin another conversation); first and best: success of the first and of the best
-- graded turn, null without scores; earned, as in `earnings`.
create table episodes as
    select t.row, t.data_set, t.run, t.iteration, t.trajectory_id, t.problem_id, t.sample, t.status, t.reason,
        len(t.turns)::integer as turns, sampled_tokens(t.action_mask) as sampled,
        t.policy_version, coalesce(len(t.calls), 0)::integer as calls,
        coalesce(len(t.follows) - list_unique(t.follows), 0)::integer as branches, g.first, g.best, e.earned
    from trajectories t
    left join (
        select row, first_turn(success, answer) as first, any_turn(success) as best from turns group by row
    ) g using (row)
    left join earnings e using (row);

-- Groups of two or more episodes: `same` is true if in each turn all episodes earned the same.
create view played_groups as
    select data_set, problem_id, max(best) as best, max(episodes) as episodes, bool_and(alike) as same from (
        select t.data_set, t.problem_id, t.turn, any_turn(t.success) as best, count(distinct t.row) as episodes,
            has_no_variance(t.scored_reward)
                and bool_or(t.verdict = 'none') = bool_and(t.verdict = 'none') as alike
        from turns t join episodes e using (row)
        where t.verdict is not null and e.status in ('completed', 'truncated') group by all
    ) group by 1, 2 having max(episodes) > 1;

-- Each trajectory that is no evaluation's, with how many versions its oldest token was behind, and how many are
-- allowed.
create temp view staleness as
    select trajectory_id, data_set, allowed,
        d.iteration - oldest_version(versions) as behind
    from trajectories join data_sets d using (data_set) where not d.evaluation;
