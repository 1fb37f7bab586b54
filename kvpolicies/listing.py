"""`kvpolicies policies`: what can be compared."""

import argparse

from kvpolicies.registry import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""
    parser.epilog = "example:\n  kvpolicies policies"


def run(args: argparse.Namespace) -> int:
    """Prints a block a policy: name, one line, source, options with their defaults."""
    for name, line, source, options in describe():
        print(f"{name:<10} {line}\n{'':<10} source: {source}")
        if options:
            print(f"{'':<10} options: {options}")
    return 0
