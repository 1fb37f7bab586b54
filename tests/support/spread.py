"""Run under torchrun: a tiny model spread over the processes; prints what policies generate.

torchrun --nproc-per-node 2 tests/support/spread.py FOLDER POLICY...
"""

import json
import sys

from torch import distributed
from transformers import AutoModelForCausalLM

import kvpolicies
from kvpolicies.adapter import tensor_parallel
from kvpolicies.errors import UserError

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]]
BUDGET = kvpolicies.Budget(total=12, sinks=2, window=4)


def generated(model, policies):
    """{policy: the tokens of each prompt, or why it is refused}."""
    made = {}
    for policy in policies:
        try:
            found = kvpolicies.generate(
                model, PROMPTS, policy, BUDGET, max_new_tokens=14, temperature=0.8, seed=3
            )
            made[policy] = [out.tokens for out in found]
        except UserError as error:
            made[policy] = str(error)
    return made


def main() -> None:
    folder, *policies = sys.argv[1:]
    distributed.init_process_group("gloo")
    size = distributed.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(folder, **tensor_parallel(size))
    found: list = [None] * size
    distributed.all_gather_object(found, generated(model, policies))
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
