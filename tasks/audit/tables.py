"""SQL for the tables of `tasks.audit.database` that are made of its views."""

TABLES = (
    """create table calls as
    select row, data_set, trajectory_id, problem_id, call.turn,
           (row_number() over (partition by row, call.turn order by place) - 1)::integer as number,
           call.id, call.name, call.arguments, call.output, call.status
    from (
        select row, data_set, trajectory_id, problem_id, unnest(calls) as call, generate_subscripts(calls, 1) as place
        from trajectories
    )""",
    # If a turn has several scores, the first is used; the check `orphan_scores` reports the others.
    """create table turns as
    with spoken as (
        select row, data_set, run, iteration, trajectory_id, problem_id, sample, unnest(turns) as t,
               generate_subscripts(turns, 1) - 1 as turn, len(turns) as turns, ungraded, reward_parts, answers,
               follows, coalesce(scorers[source], scorers['default']) as scorer
        from trajectories join (select data_set, scorers from data_sets) using (data_set)
    ), judged as (
        select distinct on (data_set, trajectory_id, turn) data_set, trajectory_id, turn, verdict, success, extracted,
               solution, reason, coalesce(reward, success) as scored_reward, parts
        from scores order by row
    ), joined as (
        select s.*, j.* exclude (data_set, trajectory_id, turn),
               coalesce(verdict = 'none', list_contains(ungraded, s.turn) or t.verdict = 'none', false) as silent
        from spoken s left join judged j using (data_set, trajectory_id, turn)
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
    from joined s left join (select row, turn, count(*) as calls from calls group by 1, 2) c using (row, turn)""",
    """create table episodes as
    select t.row, t.data_set, t.run, t.iteration, t.trajectory_id, t.problem_id, t.sample, t.status, t.reason,
           len(t.turns)::integer as turns, list_count(list_filter(t.action_mask, lambda m: m))::integer as sampled,
           t.policy_version, coalesce(len(t.calls), 0)::integer as calls,
           coalesce(len(t.follows) - list_unique(t.follows), 0)::integer as branches, g.first, g.best
    from trajectories t
    left join (select row, max(success) filter (answer = 0) as first, max(success) as best from turns group by row) g
    using (row)""",
    # From each graded turn up its branch, past calls of tools, to the graded turn before it.
    """create table revisions as
    with recursive climbing as (
        select row, turn, follows as before from turns where answer is not null and follows >= 0
        union
        select c.row, c.turn, t.follows from climbing c join turns t on t.row = c.row and t.turn = c.before
        where t.answer is null and t.follows >= 0
    )
    select t.row, t.data_set, t.trajectory_id, t.turn, t.success, c.before, b.success as was
    from climbing c join turns t on t.row = c.row and t.turn = c.turn
    join turns b on b.row = c.row and b.turn = c.before where b.answer is not null""",
    """create table problems as
    select problem_id, prompt, solutions,
           bool_or(coalesce(scorers[source], scorers['default']) = 'math-verify') as math_verify
    from trajectories join (select data_set, scorers from data_sets) using (data_set) group by 1, 2, 3""",
)
