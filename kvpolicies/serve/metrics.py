"""What the server counts, in Prometheus' text format."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
OUTCOMES = (
    "stop", "length", "cancelled", "failed", "invalid", "too_large", "overloaded", "unavailable",
)  # fmt: skip


class Metrics:
    """A registry of its own, so that two servers in one process do not meet."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.requests = Counter(
            "kvpolicies_requests", "Requests for a completion, by outcome", ["outcome"], registry=r
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.prompt_tokens = Counter(
            "kvpolicies_prompt_tokens", "Tokens of accepted prompts", registry=r
        )
        self.new_tokens = Counter("kvpolicies_generated_tokens", "Tokens generated", registry=r)
        self.first_token = Histogram(
            "kvpolicies_time_to_first_token_seconds",
            "From acceptance to the first token, the queue included",
            buckets=SECONDS,
            registry=r,
        )
        self.each_token = Histogram(
            "kvpolicies_time_per_token_seconds",
            "Between a request's tokens, the first aside",
            buckets=SECONDS,
            registry=r,
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is read when asked for."""
        Gauge(f"kvpolicies_{name}", text, registry=self.registry).set_function(value)

    def count(self, outcome: str) -> None:
        """One more request came to this end."""
        self.requests.labels(outcome).inc()

    def text(self) -> bytes:
        """The page that /metrics shows."""
        return generate_latest(self.registry)
