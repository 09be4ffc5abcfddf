"""Errors of the endpoint, in OpenAI's form."""

from typing import Any

ONLY_CHAT = "only chat completions are answered; a client that prefers OpenAI's Responses API has a setting for them"


class EndpointError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        code: OpenAI's, such as `invalid_api_key`; clients compare it.
        message: what is wrong, and what to do.
        parameter: the parameter of the request that is wrong.
    """

    def __init__(self, status: int, code: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.parameter = status, code, message, parameter

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}


class StepError(RuntimeError):
    """The agent asked the environment at the wrong time."""


def episode_ended() -> EndpointError:
    """Return the error of a request that comes too late."""
    return EndpointError(410, "episode_ended", "the episode of this key has ended")


def invalid(message: str, parameter: str | None = None, code: str = "invalid_value") -> EndpointError:
    """Return the error of a request that the endpoint cannot answer."""
    return EndpointError(400, code, message, parameter)
