"""Read the output of `iperf3 --json`, of a client or a server, as links between hosts.

Rates are bits per second (8 bits are a byte), of the payload. `sum_received` counts at the receiver, `sum_sent` at the
sender; the receiver's rate is that of the link. Data flow from client to server; with --reverse the other way, with
--bidir both ways. A server cannot know the client's rate in --reverse, and writes 0.

iperf3 3.7 to 3.10 wrote both directions of --bidir under one name (issue 952); later versions add `_bidir_reverse`.
UDP sends at a given rate, by default 1 Mbit/s. So it shows a link's rate only if datagrams are lost.

Source: iperf_api.c of iperf3 3.1 to 3.19. With --json-stream, each line is an object with `event` and `data`.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Dict, Iterable, List, Optional, Tuple

from hwaware.errors import RecordError
from hwaware.interop.readings import Documents, End, FoundLink, Reading, Repeated, entries, positive, table

PROGRAM = "iperf3"
_FIX = "give the output of: iperf3 --client HOST --json."
# Less loss than this shows that UDP did not fill the link.
_FILLED_PERCENT = 0.1


def read(path: str, text: str, found: Documents) -> Reading:
    """Return one link for each direction that was measured.

    Raises:
        RecordError: The file has no test, or a test that failed.
    """
    del text
    # A result without its end may lack the receiver's rate.
    whole = found.found[:-1] if found.is_cut else found.found
    tests = [one for one in _streamed(whole) if "start" in one or "end" in one or "error" in one]
    if not tests and not found.is_cut:
        raise RecordError(f"{path} is not the output of iperf3 --json.", _FIX)
    links: Dict[Tuple[End, End], FoundLink] = {}
    remarks: List[str] = []
    failed = "it ends in the middle of a result" if found.is_cut and not tests else ""
    for test in tests:
        if isinstance(test.get("error"), str):
            failed = str(test["error"])[:200]
        for link, remark in _links(test):
            if (link.source, link.target) in links:
                raise RecordError(
                    f"{path} has several tests from {link.source.shown()} to {link.target.shown()}.",
                    "give one file for each test.",
                )
            links[link.source, link.target] = link
            remarks += [f"{path}: {remark}"] if remark else []
    if not links:
        detail = f": {failed}" if failed else ""
        raise RecordError(
            f"{path} has no rate of iperf3{detail}{'.' if not detail.endswith('.') else ''}",
            "run the test again to its end: iperf3 --client HOST --json.",
        )
    if found.is_cut:
        remarks.append(f"{path} ends in the middle of a result; hwaware took the results that are whole.")
    if failed:
        remarks.append(f"{path}: iperf3 ended with an error ({failed}); hwaware took the rates up to then.")
    return Reading(PROGRAM, path, links=tuple(links.values()), remarks=tuple(remarks))


def _streamed(found: Iterable[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return documents; those of --json-stream are put together from their lines."""
    made: List[Dict[str, Any]] = []
    for one in found:
        event = one.get("event")
        if not isinstance(event, str) or "data" not in one:
            made.append(one)
        elif event == "start" or not made:
            made.append({event: one["data"]})
        elif event in ("end", "error"):
            made[-1][event] = one["data"]
    return made


def _links(test: Dict[str, Any]) -> Iterable[Tuple[FoundLink, str]]:
    start, end = table(test.get("start")), table(test.get("end"))
    client, server = _ends(start)
    settings = table(start.get("test_start"))
    is_reverse = _is_set(settings.get("reverse"))
    rates = _rates(end)
    pairs = [(server, client) if is_reverse else (client, server)]
    pairs.append(pairs[0][::-1])
    latency_s = _latency_s(end)
    for (source, target), (rate, counted) in zip(pairs, rates):
        if rate is None:
            continue
        facts: Dict[str, Any] = {"counted_by": counted, "protocol": str(settings.get("protocol", "TCP"))[:20]}
        streams = settings.get("num_streams")
        if isinstance(streams, int):
            facts["streams"] = streams
        yield FoundLink(source, target, rate / 8, facts=facts, loaded_latency_s=latency_s), _doubt(settings, end)


def _is_set(value: Any) -> bool:
    return value in (1, True, "true", "1")


def _doubt(settings: Dict[str, Any], end: Dict[str, Any]) -> str:
    """Return a sentence if the test did not fill the link."""
    lost = positive(table(end.get("sum")).get("lost_percent")) or 0.0
    target = positive(settings.get("target_bitrate"))
    if settings.get("protocol") == "UDP" and lost < _FILLED_PERCENT:
        return "UDP sent at a given rate and lost nothing, so the link may be faster than this rate."
    if target is not None and settings.get("protocol") != "UDP":
        return f"iperf3 sent at most {target:.3g} bit/s (--bitrate), so the link may be faster than this rate."
    return ""


def _rates(end: Dict[str, Any]) -> List[Tuple[Optional[float], str]]:
    """Return the bit rate of the first direction and of the reverse one of --bidir, each with who counted it."""
    received, sent = _both(end, "sum_received"), _both(end, "sum_sent")
    total = _both(end, "sum")
    found: List[Tuple[Optional[float], str]] = []
    for way in range(2):
        rate, counted = positive(received[way].get("bits_per_second")), "receiver"
        if rate is None:
            rate, counted = positive(sent[way].get("bits_per_second")), "sender"
        if rate is None:
            rate = positive(total[way].get("bits_per_second"))
            lost = positive(total[way].get("lost_percent")) or 0.0
            if rate is not None and lost < 100 and total[way].get("sender") is not False:
                rate *= 1 - lost / 100  # before 3.11, UDP has the sender's rate and the loss
                counted = "sender, less the loss"
        found.append((rate, counted))
    return found


def _both(end: Dict[str, Any], key: str) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    value = end.get(key)
    if isinstance(value, Repeated):
        return table(value[0]), table(value[1])
    return table(value), table(end.get(f"{key}_bidir_reverse"))


def _latency_s(end: Dict[str, Any]) -> Optional[float]:
    """Return half of the shortest round trip (µs) that TCP saw; Linux alone reports it.

    The stream's own queue lengthens this round trip.
    """
    trips = [positive(table(table(one).get("sender")).get("min_rtt")) for one in entries(end.get("streams"))]
    known = [trip for trip in trips if trip is not None]
    return min(known) * 1e-6 / 2 if known else None


def _ends(start: Dict[str, Any]) -> Tuple[End, End]:
    """Return client and server."""
    connected = table(next(iter(entries(start.get("connected"))), None))
    local, remote = _names(connected.get("local_host")), _names(connected.get("remote_host"))
    if local and local == remote:
        raise RecordError(
            f"iperf3 measured from {local[0]} to itself, expected two hosts.", "run iperf3 between two hosts."
        )
    words = str(start.get("system_info") or "").split()
    local = [*words[1:2], *local] if local and len(words) > 2 else local
    if "accepted_connection" in start:
        accepted = _names(table(start["accepted_connection"]).get("host"))
        return End(tuple(remote or accepted), "client"), End(tuple(local), "server")
    asked = _names(table(start.get("connecting_to")).get("host"))
    return End(tuple(local), "client"), End(tuple(dict.fromkeys([*asked, *remote])), "server")


def _names(host: Any) -> List[str]:
    """Return a host's name or address; an IPv4 address inside an IPv6 address as IPv4."""
    if not isinstance(host, str) or not host.strip():
        return []
    try:
        address = ipaddress.ip_address(host.strip().partition("%")[0])
    except ValueError:
        return [host.strip()[:253]]
    inner = getattr(address, "ipv4_mapped", None)
    return [str(inner or address)]
