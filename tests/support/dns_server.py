"""A real DNS server on loopback that answers for one headless service, as a cluster's does."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self, cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

SRV: Final = "_http._tcp.lora-replica.prod.svc.cluster.local"
_ZONE: Final = "lora-replica.prod.svc.cluster.local"
_TTL: Final = 5


class DnsServer(asyncio.DatagramProtocol):
    """By UDP, and by TCP where an answer was too long (`datagram_max`)."""

    def __init__(self) -> None:
        self.pods: dict[str, tuple[str, int]] = {}  # name: address and port
        self.glue = True  # addresses come with the services
        self.broken = False  # it answers SERVFAIL
        self.silent = False
        self.datagram_max = 512
        self.asked: list[tuple[str, str]] = []  # how, and what type

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._tcp = await asyncio.start_server(self._stream, "127.0.0.1", 0)
        self.port: int = self._tcp.sockets[0].getsockname()[1]
        self._udp, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", self.port)
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._udp.close()
        self._tcp.close()
        await self._tcp.wait_closed()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._out = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        if self.silent:
            return
        reply = self._answer(data, "udp")
        if len(reply.to_wire()) > self.datagram_max:
            reply = dns.message.make_response(dns.message.from_wire(data))
            reply.flags |= dns.flags.TC
        self._out.sendto(reply.to_wire(), peer)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            size = int.from_bytes(await reader.readexactly(2))
            reply = self._answer(await reader.readexactly(size), "tcp").to_wire()
            writer.write(len(reply).to_bytes(2) + reply)
            await writer.drain()
        finally:
            writer.close()

    def _answer(self, data: bytes, how: str) -> dns.message.Message:
        query = dns.message.from_wire(data)
        reply = dns.message.make_response(query)
        (question,) = query.question
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append((how, dns.rdatatype.to_text(question.rdtype)))
        pod = self.pods.get(name.removesuffix(f".{_ZONE}"))
        if self.broken:
            reply.set_rcode(dns.rcode.SERVFAIL)
        elif name == SRV and self.pods:
            records = [f"0 10 {port} {pod}.{_ZONE}." for pod, (_, port) in self.pods.items()]
            reply.answer.append(dns.rrset.from_text(f"{name}.", _TTL, "IN", "SRV", *records))
            if self.glue:
                reply.additional += [
                    dns.rrset.from_text(f"{pod}.{_ZONE}.", _TTL, "IN", "A", address)
                    for pod, (address, _) in self.pods.items()
                ]
        elif pod is not None:
            if question.rdtype == dns.rdatatype.A:
                reply.answer.append(dns.rrset.from_text(f"{name}.", _TTL, "IN", "A", pod[0]))
        else:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        return reply
