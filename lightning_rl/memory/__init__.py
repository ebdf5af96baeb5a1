"""What a run needs of GPUs, told before it loads anything: its own step traced without numbers, and bytes counted.

`live_bytes` counts what is alive, `traced_step` runs the step, `gpus` and `engine` know cards and vLLM, `budget` adds
up the phases of a run, `choices` finds keys that fit, `speed` says what to expect, and `plan` is all of it for a
person.
"""
