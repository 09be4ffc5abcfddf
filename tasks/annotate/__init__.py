"""The annotate stage: models beside the policy are asked about stored trajectories, and what they say is stored.

An `Asker` makes the questions, asks them and writes the answers: a judge and a reward model are asked about turns, a
teacher about tokens. A killed stage continues with the answers that are stored. The servers are those
of `tasks.inference.beside`. The scorers of `tasks.score.by_model` and the algorithm `opd` only read what is stored.
"""
