"""The run on a Ray cluster: what goes where, and the processes on its nodes.

Ray places, watches and ends processes; what they do is in `tasks.rollout`. Data and weights go through the store.
All modules but `placement` import Ray.
"""
