#!/usr/bin/env python3
"""Checks that every stream of the contracts is bounded and that no code has a message limit of its own.

The limits are in proto/src/limits.rs, which the generated clients and servers use. A streaming method that a service serves has the type
`Bounded`, and a client sends through `bounded_requests` (quintlet_kit::messages)."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONTRACTS = ROOT / "proto/quintlet"
SERVICES = sorted((ROOT / "services").rglob("src/**/*.rs"))
# Clients and servers of the CRI and of containerd, whose limits are those of the runtime, and the server of the PodResources API, whose
# requests are small. Reflection, whose requests are names. The probe of a container, whose answer is a number.
OTHERS = re.compile(
    r"(RuntimeService|ImageService|Events|Health)Client::new\(|Grpc::new\(service\)|Grpc::new\(inner\)|Server::for_guests\("
    r"|Builder::configure\(\)")

faults = []
streams = set()
sending = set()
for file in sorted(CONTRACTS.rglob("*.proto")):
    for method, sends, answers in re.findall(r"rpc (\w+)\((stream )?\w+\) returns \((stream )?\w+\)", file.read_text()):
        if answers:
            streams.add(method + "Stream")
        if sends:
            sending.add(re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower())

for file in SERVICES:
    text = file.read_text()
    name = file.relative_to(ROOT)
    product = re.split(r"#\[cfg\(test\)\]\nmod \w+ \{", text)[0]
    for found in re.finditer(r"max_(de|en)coding_message_size", product):
        statement = product[max(0, product.rfind(";", 0, found.start())):found.start()]
        if not OTHERS.search(statement):
            faults.append(f"{name}: a limit of its own: use that of proto/src/limits.rs")
    for stream, kind in re.findall(r"\n    type (\w+Stream) = ([^;]+);", product):
        if stream in streams and not kind.startswith("Bounded<"):
            faults.append(f"{name}: {stream} is {kind}, not Bounded<…> (quintlet_kit::messages)")
    for method in sending:
        for call in re.findall(rf"\.{method}\((\w*Stream::new|tokio_stream|futures)", product):
            faults.append(f"{name}: {method}({call}…) is not from bounded_requests (quintlet_kit::messages)")

for fault in faults:
    print(fault, file=sys.stderr)
sys.exit(bool(faults))
