"""A verdict as JUnit XML: one testcase for each promise and for each planned fault.

CI systems show it as they show tests: a promise that was broken or a fault that did not happen failed, a promise that
was not judged was skipped, unless the scenario attacked it. A run that could not be carried through is an error.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from toprope.chaos.reports.words import fault_of, plain
from toprope.chaos.verdict import Injection, Promise, Verdict


def junit(verdict: Verdict) -> bytes:
    """Return the document."""
    suite = ET.Element("testsuite", name=plain(f"chaos.{verdict.scenario}"), time=f"{verdict.seconds:.3f}")
    _properties(suite, verdict)
    for promise in verdict.promises:
        _promise(suite, verdict, promise)
    for number, injection in enumerate(verdict.injections, 1):
        _injection(suite, verdict, number, injection)
    if verdict.stopped:
        _tell(
            _case(suite, verdict, "the run", verdict.seconds),
            "error",
            "the run was not carried through",
            verdict.stopped,
        )
    suite.set("tests", str(len(suite.findall("testcase"))))
    for kind, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{kind}"))))
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    text: bytes = ET.tostring(suites, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _properties(suite: ET.Element, verdict: Verdict) -> None:
    properties = ET.SubElement(suite, "properties")
    values = {"seed": verdict.seed, "steps": verdict.steps, "world": verdict.world, **verdict.figures}
    for name, value in values.items():
        ET.SubElement(properties, "property", name=plain(name), value=f"{value:g}")


def _promise(suite: ET.Element, verdict: Verdict, promise: Promise) -> None:
    case = _case(suite, verdict, f"promise: {promise.name}", 0.0)
    evidence = "\n".join((promise.says, *promise.evidence))
    if promise.outcome == "broken":
        _tell(case, "failure", promise.evidence[0] if promise.evidence else promise.says, evidence)
    elif promise.outcome == "not judged" and promise.attacked:
        _tell(case, "failure", "the promise that the scenario attacks was not judged", evidence)
    elif promise.outcome == "not judged":
        _tell(case, "skipped", "not judged", evidence)
    else:
        ET.SubElement(case, "system-out").text = plain(evidence)


def _injection(suite: ET.Element, verdict: Verdict, number: int, injection: Injection) -> None:
    took_s = max(0.0, injection.until_s - injection.at_s)
    case = _case(suite, verdict, f"fault {number}: {fault_of(injection)}, {injection.trigger}", took_s)
    if injection.fired:
        ET.SubElement(case, "system-out").text = plain(f"at {injection.at_s:.2f} s: {injection.witness}")
    else:
        _tell(case, "failure", "the planned fault did not happen", injection.witness)


def _case(suite: ET.Element, verdict: Verdict, name: str, seconds: float) -> ET.Element:
    where = f"chaos.{verdict.scenario}"
    return ET.SubElement(suite, "testcase", classname=plain(where), name=plain(name), time=f"{seconds:.3f}")


def _tell(case: ET.Element, kind: str, message: str, text: str) -> None:
    ET.SubElement(case, kind, message=plain(message)).text = plain(text)
