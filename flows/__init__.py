"""The Prefect flows, one per module; read `math_mt_ppo` first. `launch` has their command line and Prefect servers."""
