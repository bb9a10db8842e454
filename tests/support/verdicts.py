"""A verdict such as a run of some minutes yields, with all that a report has to show."""

from __future__ import annotations

import msgspec

from toprope.chaos.verdict import NO_RANK, Goodput, Injection, Loss, Promise, Span, Verdict

HOSTILE = "</style></title><script>alert(1)</script>&\"'\x00\x1b[31m"
LONG = "shards/a3/s000012000/rank-00003-of-00008-" + 6 * "0123456789abcdef" + ".safetensors"


def promise(name: str, outcome: str = "held", *, attacked: bool = False, evidence: tuple[str, ...] = ()) -> Promise:
    said = evidence or (f"looked at {len(name)} things",)
    fields = {"name": name, "says": f"What {name} says.", "outcome": outcome, "evidence": said, "attacked": attacked}
    return msgspec.convert(fields, Promise)


def injection(fault: str, at_s: float, *, fired: bool = True, until_s: float = 0.0) -> Injection:
    witness = "pid 4711 ended with status -9" if fired else "step 40 was never reached"
    return Injection(
        fault=fault, target="node b", trigger="at step 20", fired=fired, witness=witness, at_s=at_s, until_s=until_s
    )


def a_verdict() -> Verdict:
    """Four ranks on two nodes for 62 s: a node killed, a store that browns out, and a promise that broke."""
    return Verdict(
        scenario="kill-node",
        about="A node is killed between two snapshots while the object store answers 503; training goes on.",
        seed=7,
        steps=60,
        world=4,
        seconds=62.4,
        promises=(
            promise("bit-identical", attacked=True, evidence=("rank 0 weights 5f0c… = 5f0c…", f"read {LONG}")),
            promise("steps-lost", "broken", attacked=True, evidence=("9 steps were lost, 4 are allowed",)),
            promise("ready-once"),
            promise("trainer-stall", "not judged", evidence=("no clean run to compare with",)),
        ),
        injections=(
            injection("kill", 21.4),
            injection("503", 22.0, until_s=37.5),
            injection("bit flip", 22.6),
            injection("pause", 50.0, until_s=55.0),
        ),
        timeline=_timeline(),
        figures={"detected_after_s": 1.37, "recovered_after_s": 12.6, "lost_steps": 9, "shard_bytes": 14_680_064},
        losses=(Loss(cause="down", rank_seconds=61.2), Loss(cause="steps done again", rank_seconds=18.0)),
        goodput=tuple(Goodput(at_s=5.0 * n, share=0.1 if 4 < n < 8 else 0.93) for n in range(1, 13)),
        log=tuple(f"{n:>3} READY attempt {1 + n // 5} step {4 * n} sha256 {'0123456789abcdef' * 4}" for n in range(12)),
    )


def _timeline() -> tuple[Span, ...]:
    spans = [
        Span(rank=NO_RANK, begin_s=21.4, end_s=25.0, kind="down", what="node b"),
        Span(rank=NO_RANK, begin_s=22.0, end_s=37.5, kind="fault", what="503 of node b"),
    ]
    for rank in range(4):
        spans += [
            Span(rank=rank, begin_s=2.0, end_s=21.5, kind="training", what="steps 1 to 20"),
            Span(rank=rank, begin_s=21.5, end_s=30.1, kind="down"),
            Span(rank=rank, begin_s=30.1, end_s=34.0, kind="restore", what="step 16 from a peer"),
            Span(rank=rank, begin_s=34.0, end_s=61.0, kind="training", what="steps 17 to 60"),
        ]
        starts = [4.0 * n for n in range(1, 15) if not 20 < 4 * n < 34]
        spans += [Span(rank=rank, begin_s=at_s, end_s=at_s + 0.02, kind="snapshot") for at_s in starts]
    return tuple(spans)


def a_hostile_verdict() -> Verdict:
    """All texts hold what would break a page or XML that does not quote them."""
    spoiled = Injection(fault=HOSTILE, target=HOSTILE, trigger=HOSTILE, fired=False, witness=HOSTILE)
    return Verdict(
        scenario=HOSTILE,
        about=HOSTILE,
        seed=1,
        steps=1,
        world=1,
        seconds=0.0,
        promises=(promise(HOSTILE, "broken", evidence=(HOSTILE,)), promise("x", "not judged", attacked=True)),
        injections=(spoiled, msgspec.structs.replace(spoiled, fired=True)),
        timeline=(Span(rank=0, begin_s=0.0, end_s=1.0, kind="training", what=HOSTILE),),
        figures={HOSTILE: 1.5},
        losses=(Loss(cause=HOSTILE, rank_seconds=0.0),),
        goodput=(Goodput(at_s=0.0, share=2.0),),
        log=(HOSTILE,),
        stopped=HOSTILE,
    )
