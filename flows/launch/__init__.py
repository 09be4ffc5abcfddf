"""How flows are started: their command line, and the Prefect servers that they run in.

`cli` is the command line that all flows share. `temporary_server` starts a Prefect server (`prefect_server`) for one
command. `local_server` is `make up` and `make down`: a server and a worker that stay.
`retrain_demo` is `make retrain-demo`.
"""
