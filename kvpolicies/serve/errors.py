"""Refusals as OpenAI's clients know them."""

from dataclasses import dataclass, field

from fastapi.responses import JSONResponse

from kvpolicies.errors import one_line

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Any other is an "invalid_request_error"."""

OUTCOMES = {413: "too_large", 429: "overloaded", 500: "failed", 503: "unavailable"}
"""How refusals are counted; any other is "invalid"."""


@dataclass
class ApiError(Exception):
    """An answer that is no completion.

    Args:
        param: the field of the body at fault. code: a word for programs.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object that is sent."""
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"message": one_line(self.message), "type": kind, "param": self.param,
                 "code": self.code}  # fmt: skip
        return {"error": error}


def retry_later(status: int, message: str, code: str) -> ApiError:
    """A refusal that another attempt may not meet."""
    return ApiError(status, message, code=code, headers={"Retry-After": "1"})


def response(error: ApiError) -> JSONResponse:
    """The error as it is sent."""
    return JSONResponse(error.body(), error.status, headers=error.headers)
