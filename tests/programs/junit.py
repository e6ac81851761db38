"""junit.py FILE: prints "id outcome" for each test in what `python -m test --junit-xml` wrote, and
"! id, what it said" for each that went wrong."""
import sys
import xml.etree.ElementTree as xml

for case in xml.parse(sys.argv[1]).getroot().iter("testcase"):
    kinds = {child.tag for child in case}
    outcome = next((k for k in ("error", "failure", "skipped") if k in kinds), "passed")
    if case.get("result") not in (None, "completed") or case.get("status") not in (None, "run"):
        outcome += f"/{case.get('status')}/{case.get('result')}"
    print(case.get("name"), outcome)
    for bad in case.findall("error") + case.findall("failure"):
        said = f"{bad.get('message') or ''} {bad.text or ''}".strip()
        print("!", case.get("name"), said.replace("\n", " | "))
