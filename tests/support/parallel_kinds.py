"""The ways to be parallel that are tested, for a test process that loads none of them."""

from __future__ import annotations

JOB = "parallel"
GATE = 6
WORLDS = {
    "ddp": 2,
    "ddp+zero1": 2,
    "fsdp1": 2,
    "fsdp1-flat": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "tp+sp": 2,
    "expert": 2,
    "pipeline": 2,
    "fsdp2xtp": 4,
    "pipelinexfsdp2": 4,
}
"""How many ranks each kind has."""
FULLY_SHARDED = ("fsdp2", "hsdp", "tp+sp", "fsdp2xtp")
"""Those whose every parameter is a DTensor; each can also have 4 ranks."""
OTHERS = ("ddp", "ddp+zero1", "fsdp1", "fsdp1-flat", "expert")
"""The rest that 4 ranks can have."""
ONE_MODEL = ("ddp", "fsdp1", "fsdp2", "hsdp")
"""Those that train the same model with the same optimizer."""
