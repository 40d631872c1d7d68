"""TLS before a port of this machine: `python -m tests.lab.tls_proxy CERTIFICATE KEY PORT`.

Prints its own port. A process of its own, which is killed with all its connections.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from contextlib import suppress


async def main(certificate: str, key: str, port: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(1 << 16):
                target.write(piece)
                await target.drain()
        target.close()

    async def serve(near: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        far, request = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(near, request), copy(far, answer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
