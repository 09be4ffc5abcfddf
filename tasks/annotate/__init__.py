"""The annotate stage: models beside the policy are asked about stored trajectories, and what they say is stored.

`asking` has the questions: a judge's and a reward model's about turns, a teacher's about tokens. `annotating` asks them
and writes the answers; a killed stage continues with those that are stored. The servers are those of
`tasks.inference.beside`. The scorers of `tasks.score.by_model` and the algorithm `opd` only read what is stored.
"""
