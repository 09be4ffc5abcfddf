"""The environments by name.

Add one with `register_environment("name", Class)`, or configure it as `package.module:Class`.
"""

from tasks.environments.guess_number import GuessNumberEnvironment
from tasks.environments.interface import Environment
from tasks.environments.math_verify import MathVerifyEnvironment, NullEnvironment
from tasks.registry import Registry

ENVIRONMENTS: Registry[Environment] = Registry("environment")
register_environment = ENVIRONMENTS.register

register_environment("math-verify", MathVerifyEnvironment)
register_environment("guess-number", GuessNumberEnvironment)
register_environment("null", NullEnvironment)
# Its package is imported when it is used: not everybody has it.
register_environment("gymnasium", "tasks.environments.gymnasium_env:GymnasiumEnvironment")
